"""The rules of `ragflash.rag.quotes`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragflash.rag.quotes import cite, is_quotable, locate, verify
from ragflash.rag.records import PageRange, QuoteMatch
from ragflash_ingest.document import Document, DocumentPage
from tests.rag.ready_documents import ready_document

PAGE_1 = "Section 4. The supplier shall keep records for seven years and shall"
PAGE_2 = "produce them within ten days of a written request. Section 5."
CONTRACT = Document(
    text=f"{PAGE_1}\n{PAGE_2}",
    pages=(
        DocumentPage(1, "iii", 0, len(PAGE_1)),
        DocumentPage(2, "iv", len(PAGE_1) + 1, len(PAGE_1) + 1 + len(PAGE_2)),
    ),
    sections=(),
    media_type="application/pdf",
    encoding=None,
    warnings=(),
    parser="test",
)
RECORD = ready_document(
    "d1",
    collection_id="default",
    name="contract.pdf",
    media_type="application/pdf",
    pages=2,
    characters=len(CONTRACT.text),
    tokens=0,
)


def test_o29_quote_across_pages() -> None:
    quote = "keep records for seven years and shall produce them within ten days"
    found = locate(quote, CONTRACT.text)
    assert found is not None
    match, start, end = found
    assert match is QuoteMatch.NORMALISED
    citation = cite(1, RECORD, CONTRACT, start, end, match)
    assert citation.pages == (PageRange(1, "iii", 30, 68), PageRange(2, "iv", 0, 28))
    assert (citation.page_start, citation.page_end, citation.page_label) == (1, 2, "iii")
    assert citation.quote == CONTRACT.text[start:end]


def test_o29_changed_word_is_not_in_the_source() -> None:
    quote = "keep records for eight years and shall produce them within ten days"
    assert locate(quote, CONTRACT.text) is None
    assert verify(quote, ["d1"], [], lambda _: CONTRACT).match is QuoteMatch.NOT_FOUND


def test_quote_of_another_document_is_elsewhere() -> None:
    other = Document(
        "Nothing here.", (DocumentPage(1, None, 0, 13),), (), "text/plain", None, (), "t"
    )
    documents = {"a": other, "b": CONTRACT}
    verdict = verify("written request. Section 5.", ["a"], ["b"], documents.__getitem__)
    assert (verdict.match, verdict.document_id) == (QuoteMatch.ELSEWHERE, "b")


def test_quotes_end_at_words() -> None:
    assert locate("record", "The records of a recorder") is None
    assert locate("記録", "古い記録です") == (QuoteMatch.EXACT, 2, 4)


def test_the_nearest_of_several_places_is_taken() -> None:
    text = "one and the same. " * 5
    assert locate("one and the same.", text, near=40) == (QuoteMatch.EXACT, 36, 53)


@pytest.mark.parametrize(
    ("text", "part", "expected"),
    [
        ("The pump must be drained before winter.", "must be drained before winter", True),
        ("The pump must be drained before winter.", "The pump", False),
        ("Warranty: 36 months\nSerial: ZX-4471-Ω\n", "Serial: ZX-4471-Ω", True),
        ("The pump\n\n  \nruns", "\n  \n", False),
        ("保証期間は三十六か月間とします。", "保証期間は三十六か月間", True),
    ],
)
def test_what_is_worth_quoting(text: str, part: str, expected: bool) -> None:
    start = text.index(part)
    assert is_quotable(text, start, start + len(part)) is expected


@given(st.text(max_size=200), st.data())
def test_whatever_is_located_is_in_the_source(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    found = locate(text[start:end], text, near=start)
    if found is not None:
        match, first, last = found
        assert 0 <= first < last <= len(text)
        if match is QuoteMatch.EXACT:
            assert text[first:last] == text[start:end].strip()
