"""Source code: the text stays as it is; functions and classes are its sections."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from ragflash_ingest.document import Document, Section
from ragflash_ingest.encoding import decode
from ragflash_ingest.languages import LANGUAGES
from ragflash_ingest.parsers.text import canonical, single_page
from ragflash_ingest.sniff import MediaType

if TYPE_CHECKING:
    from tree_sitter import Node
    from tree_sitter_language_pack import SupportedLanguage

PARSER = "code 1"

_MAX_LEVEL = 8
_TITLE_CHARS = 120
# What grammars call a thing with a name and a body; functions are not looked into.
_FUNCTION = re.compile(
    r"(?:constructor|function|generator_function|macro|method)_(?:declaration|definition|item)"
    r"|function_expression|method|singleton_method"
)
_CONTAINER = re.compile(
    r"""(?:abstract_class|class|enum|extension|impl|interface|mod|namespace|object|protocol
        |record|struct|trait|type|type_alias|union)
        _(?:declaration|definition|item|spec|specifier)
    |class|internal_module|module""",
    re.VERBOSE,
)
_FUNCTION_VALUES = {"arrow_function", "function_expression"}
_TRANSPARENT = re.compile(r"preproc_(?:if|ifdef|elif|else)|linkage_specification|declaration_list")
_ABOVE = re.compile(r".*comment|attribute_item|attribute_list|annotation|decorator")


def parse(data: bytes, name: str) -> Document:
    """Parse source code in the language that the extension of its name says.

    Raises:
        ParseError: `empty` or `encoding_unknown`.
    """
    decoded = decode(data)
    text = canonical(decoded.text)
    return Document(
        text=text,
        pages=single_page(text),
        sections=tuple(_sections(text, LANGUAGES[PurePath(name).suffix.lower()])),
        media_type=MediaType.CODE,
        encoding=decoded.encoding,
        warnings=decoded.warnings,
        parser=PARSER,
    )


def _sections(text: str, language: "SupportedLanguage") -> Iterator[Section]:
    import tree_sitter_language_pack as grammars  # noqa: PLC0415  (no other kind needs it)

    source = text.encode()
    tree = grammars.get_parser(language).parse(source)
    byte = char = 0
    for mark in _marks(tree.root_node, 1):
        line = source[mark.title_byte : mark.title_end_byte].split(b"\n", 1)[0].decode()
        title = line[:_TITLE_CHARS].rstrip(" \t{:=(")
        char += len(source[byte : mark.start_byte].decode())
        byte = mark.start_byte
        if title:
            yield Section(title, mark.level, char)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where a section begins, and the range whose first line is its title."""

    start_byte: int
    title_byte: int
    title_end_byte: int
    level: int


def _marks(container: "Node", level: int) -> Iterator[_Mark]:
    """Definitions in a file or a class, each from the comments above it.

    Statements that follow a definition begin a section too, lest they count to it.
    """
    above: Node | None = None  # first of the comments right above
    last: Node | None = None
    after_definition = False
    for child in container.named_children:
        if _ABOVE.fullmatch(child.type):
            own_line = last is None or last.end_point.row < child.start_point.row
            if above is None or not _touch(last, child):
                above = child if own_line else None
        elif _TRANSPARENT.fullmatch(child.type):
            yield from _marks(child, level)
            above, after_definition = None, True
        elif (definition := _definition(child)) is not None:
            start = above if above is not None and _touch(last, child) else child
            named = definition if child.type == "decorated_definition" else child
            body = definition.child_by_field_name("body")
            end = body.start_byte if body else child.end_byte
            yield _Mark(start.start_byte, named.start_byte, end, level)
            if level < _MAX_LEVEL and _CONTAINER.fullmatch(definition.type):
                yield from _marks(_body(definition), level + 1)
            above, after_definition = None, True
        else:
            if after_definition:
                yield _Mark(child.start_byte, child.start_byte, child.end_byte, level)
            above, after_definition = None, False
        last = child


def _touch(upper: "Node | None", lower: "Node") -> bool:
    return upper is not None and upper.end_point.row + 1 >= lower.start_point.row


def _definition(node: "Node") -> "Node | None":
    """The definition that a node is, or wraps (exports, decorators, templates, `const f =`)."""
    if _defines(node):
        return node
    for child in node.named_children:
        value = child.child_by_field_name("value")
        if _defines(child) or (value and value.type in _FUNCTION_VALUES):
            return child
        if child.type == "lexical_declaration":  # exported
            return _definition(child)
    return None


def _defines(node: "Node") -> bool:
    if _FUNCTION.fullmatch(node.type):
        return True
    # In C, `struct S x;` only uses what has the same type of node.
    is_use = node.type.endswith("_specifier") and node.child_by_field_name("body") is None
    return bool(_CONTAINER.fullmatch(node.type)) and not is_use


def _body(definition: "Node") -> "Node":
    body = definition.child_by_field_name("body")
    return body or (definition.named_children or [definition])[-1]
