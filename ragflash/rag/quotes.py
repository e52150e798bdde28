"""Quotes: found in the stored source by code, or not shown.

A quote is looked for as written, then in the match form of `ragflash_ingest.normalise` (page and
line breaks, hyphenation,
ligatures, curly quotes), then in the caller's other documents. Only the first two verdicts may
leave as citations.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ragflash.engine.constrain.words import MIN_UNSPACED_CHARACTERS, UNSPACED
from ragflash.engine.constraint import MIN_WORDS
from ragflash.rag.records import Citation, DocumentRecord, PageBox, PageRange, QuoteMatch
from ragflash_ingest.document import Document
from ragflash_ingest.normalise import normalise


@dataclass(frozen=True, slots=True)
class Verdict:
    """Where a quote stands.

    Attributes:
        document_id: The document that holds it; `None` when nothing does.
        start: Range in that document's text; 0 when nothing does.
    """

    match: QuoteMatch
    document_id: str | None = None
    start: int = 0
    end: int = 0


def locate(quote: str, text: str, *, near: int = 0) -> tuple[QuoteMatch, int, int] | None:
    """Find a quote in a text, at word boundaries.

    Args:
        quote: As given by a model or a caller.
        text: A document's stored text.
        near: Of several occurrences the one that starts nearest to here is taken.

    Returns:
        How it was found and its range in `text`; `None` when it is not there.
    """
    wanted = quote.strip()
    if not wanted:
        return None
    start = min(_occurrences(wanted, text), key=lambda at: abs(at - near), default=-1)
    if start >= 0:
        return QuoteMatch.EXACT, start, start + len(wanted)
    ranges = [found for found in normalise(text).find_all(wanted) if _at_words(text, *found)]
    best = min(ranges, key=lambda found: abs(found[0] - near), default=None)
    return None if best is None else (QuoteMatch.NORMALISED, *best)


def verify(
    quote: str,
    document_ids: Iterable[str],
    elsewhere_ids: Iterable[str],
    load: Callable[[str], Document],
) -> Verdict:
    """Judge a quote against the documents it was asked of, then against the rest of the scope."""
    for document_id in document_ids:
        found = locate(quote, load(document_id).text)
        if found is not None:
            return Verdict(found[0], document_id, found[1], found[2])
    for document_id in elsewhere_ids:
        found = locate(quote, load(document_id).text)
        if found is not None:
            return Verdict(QuoteMatch.ELSEWHERE, document_id, found[1], found[2])
    return Verdict(QuoteMatch.NOT_FOUND)


def is_quotable(text: str, start: int, end: int) -> bool:
    """Whether a range says enough to be a citation.

    Five words, ten characters of a script without spaces, or a whole line or table cell: a heading,
    a part number.
    """
    quote = text[start:end]
    words = [word for word in quote.split() if any(character.isalnum() for character in word)]
    if len(words) >= MIN_WORDS or sum(_is_unspaced(c) for c in quote) >= MIN_UNSPACED_CHARACTERS:
        return True
    before, after = text[:start].rpartition("\n")[2], text[end:].partition("\n")[0]
    is_begun = not before.strip() or before.endswith("| ")
    is_ended = not after.strip(" .") or after.startswith(" |")
    return bool(words) and is_begun and is_ended


def cite(
    number: int, record: DocumentRecord, document: Document, start: int, end: int, match: QuoteMatch
) -> Citation:
    """Build the citation of a verified range of a document."""
    pages = page_ranges(document, start, end)
    path = document.section_path(start)
    boxes = document.boxes.lines(start, end) if document.boxes is not None else []
    return Citation(
        n=number,
        document_id=record.id,
        document_name=record.name,
        version_sha256=record.sha256,
        quote=document.text[start:end],
        start=start,
        end=end,
        page_start=pages[0].page,
        page_end=pages[-1].page,
        page_label=pages[0].label,
        section=" › ".join(path) if path else None,
        match=match,
        pages=pages,
        boxes=tuple(PageBox(page, box.x0, box.y0, box.x1, box.y1) for page, box in boxes),
    )


def page_ranges(document: Document, start: int, end: int) -> tuple[PageRange, ...]:
    """Split a range of a document at its page breaks, which belong to no page themselves."""
    ranges = []
    for page in document.pages:
        first, last = max(start, page.start), min(end, page.end)
        if first < last:
            ranges.append(PageRange(page.number, page.label, first - page.start, last - page.start))
    if not ranges:
        page = document.page_at(start)
        ranges.append(PageRange(page.number, page.label, start - page.start, end - page.start))
    return tuple(ranges)


def _occurrences(needle: str, text: str) -> Iterator[int]:
    at = text.find(needle)
    while at >= 0:
        if _at_words(text, at, at + len(needle)):
            yield at
        at = text.find(needle, at + 1)


def _at_words(text: str, start: int, end: int) -> bool:
    return not (_splits_word(text, start) or _splits_word(text, end))


def _splits_word(text: str, at: int) -> bool:
    if at <= 0 or at >= len(text):
        return False
    left, right = text[at - 1], text[at]
    return left.isalnum() and right.isalnum() and not (_is_unspaced(left) or _is_unspaced(right))


def _is_unspaced(character: str) -> bool:
    point = ord(character)
    return any(first <= point <= last for first, last in UNSPACED)
