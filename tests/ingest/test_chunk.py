import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragflash_ingest.chunk import chunk
from ragflash_ingest.document import Document, DocumentPage, Section


def document(text, sections=(), furniture=(), pages=None):
    pages = pages or (DocumentPage(number=1, label=None, start=0, end=len(text)),)
    return Document(
        text=text,
        pages=pages,
        sections=tuple(sections),
        media_type="text/plain",
        encoding=None,
        warnings=(),
        parser="test",
        furniture=tuple(furniture),
    )


BLOCKS = st.sampled_from(
    ["word " * 40, "x" * 300, "\n" * 9, "東京" * 80, "文。" * 50, "Same. ", "A sentence here. " * 9]
) | st.sampled_from(["\n\n", " ", "\n", "\t", "e\u0301" * 70, "a\n", "𝔘" * 30])
TEXTS = st.lists(BLOCKS | st.text(max_size=20), max_size=25).map("".join)


@given(TEXTS, st.data())
def test_chunks_are_slices_that_cover_the_text(text, data):
    starts = data.draw(st.lists(st.integers(0, max(len(text) - 1, 0)), max_size=4))
    sections = [Section("S", 1, start) for start in sorted(starts)] if text else []
    chunks = chunk(document(text, sections), target_chars=200, max_chars=260, overlap_chars=40)
    covered = set()
    previous_start, previous_end = -1, 0
    for index, piece in enumerate(chunks):
        assert piece.index == index
        assert text[piece.start : piece.end] == piece.text
        assert piece.text == piece.text.strip() != ""
        assert len(piece.text) <= 260
        assert piece.start > previous_start
        assert piece.end > previous_end
        assert previous_end - piece.start <= 40
        previous_start, previous_end = piece.start, piece.end
        covered.update(range(piece.start, piece.end))
    assert all(char.isspace() for at, char in enumerate(text) if at not in covered)


def test_a_chunk_ends_where_a_section_begins():
    body = "A sentence of some length stands here. " * 12
    text = f"Alpha\n\n{body}\n\nBeta\n\n{body}"
    sections = [Section("Alpha", 1, 0), Section("Beta", 2, text.index("Beta"))]
    first, second = chunk(document(text, sections))
    assert (first.section, second.section) == ("Alpha", "Alpha › Beta")
    assert second.text.startswith("Beta")


def test_a_heading_without_text_stays_with_what_follows():
    text = "Part\n\nChapter\n\n" + "Some words stand here. " * 5
    sections = [Section("Part", 1, 0), Section("Chapter", 2, 6)]
    assert len(chunk(document(text, sections))) == 1


def test_cuts_prefer_paragraphs_then_sentences_then_words():
    sentence = "This is one sentence of sixty characters, more or less, yes. "
    paragraphs = (sentence * 12 + "\n\n") * 3
    assert all(piece.text.endswith("yes.") for piece in chunk(document(paragraphs)))
    assert chunk(document(paragraphs))[0].text == (sentence * 12).strip()
    words = "word " * 900
    assert all(set(piece.text.split()) == {"word"} for piece in chunk(document(words)))


def test_chunks_of_wide_characters_are_half_as_long():
    narrow = chunk(document("Ein Satz von etwa vierzig Zeichen Länge. " * 80))
    wide = chunk(document("これは四十字ほどの長さの文であり、区切りの空白は一つもない。" * 80))
    assert 900 < len(narrow[0].text) <= 1100
    assert 450 < len(wide[0].text) <= 550
    assert all(piece.text.endswith("。") for piece in wide)


def test_pages_of_a_chunk():
    pages = (DocumentPage(1, "iii", 0, 10), DocumentPage(2, "iv", 11, 21))
    (piece,) = chunk(document("First page\nand a next", pages=pages))
    assert (piece.page_start, piece.page_end) == (1, 2)


def test_furniture_is_not_at_the_edges_and_makes_no_chunk():
    text = "Running head\nThe words of the page.\n7"
    (piece,) = chunk(document(text, furniture=[(0, 12), (36, 37)]))
    assert piece.text == "The words of the page."
    assert chunk(document("7", furniture=[(0, 1)])) == []


def test_an_index_makes_no_chunk():
    lines = ["A", *(f"entry {number} . . . . . {number}" for number in range(30)), "B"]
    text = "\n".join(lines)
    furniture = [(text.index(line), text.index(line) + len(line)) for line in lines[1:-1]]
    assert chunk(document(text, furniture=furniture)) == []


def test_blank_documents_have_no_chunks():
    assert chunk(document("")) == []
    assert chunk(document(" \n \n")) == []


def test_lengths_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="overlap"):
        chunk(document("x"), target_chars=100, max_chars=200, overlap_chars=50)


def test_cutting_a_long_text_can_be_ended_at_any_time():
    long = document("One sentence. And another one.\n" * 2000)
    calls: list[None] = []

    def end() -> None:
        calls.append(None)
        if len(calls) == enough:
            raise KeyboardInterrupt

    enough = 100
    with pytest.raises(KeyboardInterrupt):
        chunk(long, check=end)
    assert len(calls) == enough
    enough = 4000 + 10  # all sentences are found, and chunks are made
    with pytest.raises(KeyboardInterrupt):
        chunk(long, check=end)
