import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranges import check_ranges

from ragflash_ingest.chunk import chunk
from ragflash_ingest.document import FailureReason, ParseError
from ragflash_ingest.languages import LANGUAGES
from ragflash_ingest.parsers import parse_bytes
from ragflash_ingest.sniff import MediaType

PYTHON = '''"""Größen."""
import os  # noqa

# Says how large.
@cached
def größe(x):
    def inner(): pass
    return x

class Scale(Base):
    """Weighs."""
    unit: str = "kg"

    async def read(self): ...

if __name__ == "__main__":
    größe(1)
    größe(2)
'''
JAVASCRIPT = """import x from "x";
/** Adds. */
export function add(a, b) { return a + b; }
export const sub = (a, b) => a - b;
class Stack {
  push(x) {}
}
add(1, 2);
"""
RUST = """use std::fmt;

/// A point.
#[derive(Debug)]
pub struct Point { x: i32 }

impl fmt::Display for Point {
    fn fmt(&self) {}
}

mod tests { fn works() {} }
"""
C = """struct point;
static struct point *make(void);
struct point { int x; };
/* Makes one. */
static struct point *make(void)
{
    return 0;
}
#ifdef TEST
int main(void) { return 0; }
#endif
"""


@pytest.mark.parametrize(
    ("source", "name", "sections"),
    [
        (
            PYTHON,
            "a.py",
            [
                ("def größe(x)", 1, "# Says how large."),
                ("class Scale(Base)", 1, "class Scale"),
                ("async def read(self)", 2, "async def"),
                ('if __name__ == "__main__"', 1, "if __name__"),
            ],
        ),
        (
            JAVASCRIPT,
            "a.mjs",
            [
                ("export function add(a, b)", 1, "/** Adds. */"),
                ("export const sub = (a, b) => a - b;", 1, "export const"),
                ("class Stack", 1, "class Stack"),
                ("push(x)", 2, "push"),
                ("add(1, 2);", 1, "add(1"),
            ],
        ),
        (
            RUST,
            "a.rs",
            [
                ("pub struct Point", 1, "/// A point."),
                ("impl fmt::Display for Point", 1, "impl fmt"),
                ("fn fmt(&self)", 2, "fn fmt"),
                ("mod tests", 1, "mod tests"),
                ("fn works()", 2, "fn works"),
            ],
        ),
        (
            C,
            "a.c",
            [
                ("struct point", 1, "struct point {"),
                ("static struct point *make(void)", 1, "/* Makes one. */"),
                ("int main(void)", 1, "int main"),
            ],
        ),
    ],
)
def test_definitions_are_sections_with_what_stands_above_them(source, name, sections):
    document = parse_bytes(source.encode(), name)
    assert document.text == source
    assert document.media_type == MediaType.CODE
    assert [(s.title, s.level) for s in document.sections] == [
        (title, level) for title, level, _ in sections
    ]
    for section, (_, _, begins) in zip(document.sections, sections, strict=True):
        assert document.text.startswith(begins, section.start)
    check_ranges(document)


def test_chunks_end_where_definitions_do():
    body = "    total = total + 1  # one more\n" * 20
    source = "".join(f"def step_{number}(total):\n{body}\n" for number in range(4))
    parts = chunk(parse_bytes(source.encode(), "a.py"))
    assert [part.section for part in parts] == [f"def step_{at}(total)" for at in range(4)]
    assert all(part.text.startswith("def step_") for part in parts)


@pytest.mark.parametrize("name", ["a.unknown", "Makefile", "a.sql"])
def test_an_unknown_language_is_plain_text(name):
    document = parse_bytes(PYTHON.encode(), name)
    assert (document.media_type, document.text, document.sections) == (MediaType.TEXT, PYTHON, ())


@pytest.mark.parametrize("extension", LANGUAGES)
def test_every_language_has_its_grammar(extension):
    document = parse_bytes(b"/* one */ x\n", f"a{extension}")
    assert document.text == "/* one */ x\n"


def test_nothing_is_empty():
    with pytest.raises(ParseError) as caught:
        parse_bytes(b"\n\n", "a.py")
    assert caught.value.reason is FailureReason.EMPTY


def test_classes_nested_deep():
    source = "class A { " * 300 + "}" * 300
    document = parse_bytes(source.encode(), "a.java")
    assert document.text == source
    assert [section.level for section in document.sections] == list(range(1, 9))


LINES = st.sampled_from([*PYTHON.splitlines(), "é = '𝄞'", "def (", "class", "\t", "}", '"""'])


@given(st.lists(LINES, min_size=1, max_size=15).filter(lambda lines: "".join(lines).strip()))
def test_any_text_keeps_its_offsets(lines):
    source = "\n".join(lines)
    document = parse_bytes(source.encode(), "a.py")
    assert document.text == source
    check_ranges(document)
    assert all(section.title in source[section.start :] for section in document.sections)
