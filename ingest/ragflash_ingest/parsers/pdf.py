"""PDF through PDFium. Not safe in threads: the caller gives it a process of its own (`pool`)."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby

import numpy as np
import pypdfium2 as pdfium  # type: ignore[import-untyped]
import pypdfium2.raw as pdfium_c  # type: ignore[import-untyped]

from ragflash_ingest.document import (
    BoxTable,
    Document,
    DocumentPage,
    FailureReason,
    ParseError,
    Section,
)
from ragflash_ingest.normalise import normalise
from ragflash_ingest.parsers.furniture import find_furniture
from ragflash_ingest.parsers.pdf_text import PageText, read_page
from ragflash_ingest.sniff import MediaType

PARSER = f"pdf 1 (pypdfium2 {pdfium.version.PYPDFIUM_INFO.version})"

Progress = Callable[[str, int, int], None]

_GARBAGE = re.compile("[\ufffd\ue000-\uf8ff\u0080-\u009f]")
_GARBAGE_SHARE = 0.3
# As it stands in a squeezed line: "3.1.", "a.2", "chapter4".
_HEADING_NUMBER = re.compile(
    r"\d{1,3}(?:\.\d+)*\.?|[a-z](?:\.\d+)+\.?|(?:chapter|appendix|part)[\da-z]{1,3}[.:]?"
)


def parse(data: bytes, progress: Progress | None = None) -> Document:
    """Parse a PDF file.

    Args:
        data: The file.
        progress: Called after each page with "pages", pages done and pages in all.

    Raises:
        ParseError: `encrypted` (a password is needed to open it), `corrupt` (no page can be
            read) or `no_text`.
    """
    try:
        pdf = pdfium.PdfDocument(data)
    except pdfium.PdfiumError as error:
        raise _open_error(error) from error
    try:
        return _parse(pdf, progress)
    finally:
        pdf.close()


def _open_error(error: pdfium.PdfiumError) -> ParseError:
    match error.err_code:
        case pdfium_c.FPDF_ERR_PASSWORD:
            return ParseError(FailureReason.ENCRYPTED, "the PDF opens only with a password")
        case pdfium_c.FPDF_ERR_SECURITY:
            detail = "the PDF is encrypted in a way that is not supported"
            return ParseError(FailureReason.ENCRYPTED, detail)
        case _:
            return ParseError(FailureReason.CORRUPT, "the PDF's structure cannot be read")


def _parse(pdf: pdfium.PdfDocument, progress: Progress | None) -> Document:
    count = len(pdf)
    reads: list[PageText | str] = []
    for index in range(count):
        reads.append(_read(pdf, index))
        if progress:
            progress("pages", index + 1, count)
    if all(isinstance(read, str) for read in reads):
        raise ParseError(FailureReason.CORRUPT, f"none of the PDF's {count} pages can be read")
    text, pages, boxes = _assemble(pdf, reads)
    if not text.strip():
        detail = "no page has text; scanned pages would need character recognition"
        raise ParseError(FailureReason.NO_TEXT, detail)
    furniture = find_furniture(text, pages)
    pages = tuple(
        replace(page, label=page.label or furniture.labels.get(page.number)) for page in pages
    )
    return Document(
        text=text,
        pages=pages,
        sections=_sections(pdf, text, pages),
        media_type=MediaType.PDF,
        encoding=None,
        warnings=_warnings(reads),
        parser=PARSER,
        boxes=boxes,
        furniture=furniture.ranges,
        title=pdf.get_metadata_value("Title").strip() or None,
    )


def _read(pdf: pdfium.PdfDocument, index: int) -> PageText | str:
    """A page's text, or what is wrong with it."""
    try:
        page = pdf[index]
    except pdfium.PdfiumError as error:
        return str(error)
    try:
        return read_page(page)
    except pdfium.PdfiumError as error:
        return str(error)
    finally:
        page.close()


def _assemble(
    pdf: pdfium.PdfDocument, reads: list[PageText | str]
) -> tuple[str, tuple[DocumentPage, ...], BoxTable]:
    pages: list[DocumentPage] = []
    texts: list[str] = []
    tables = []
    separator = np.full((1, 4), np.nan, np.float32)
    start = 0
    for number, read in enumerate(reads, start=1):
        label = pdf.get_page_label(number - 1) or None
        if isinstance(read, str):
            pages.append(DocumentPage(number, label, start, start, error=read))
            texts.append("")
        else:
            end = start + len(read.text)
            pages.append(DocumentPage(number, label, start, end, read.width, read.height))
            texts.append(read.text)
            tables.append(read.boxes)
        tables.append(separator)
        start = pages[-1].end + 1
    boxes = BoxTable.rounded(np.concatenate(tables[:-1]), tuple(page.start for page in pages))
    return "\n".join(texts), tuple(pages), boxes


def _sections(
    pdf: pdfium.PdfDocument, text: str, pages: tuple[DocumentPage, ...]
) -> tuple[Section, ...]:
    """The outline, each entry where its title stands on its page, else at the page's top."""
    sections: list[Section] = []
    for bookmark in pdf.get_toc():
        title = " ".join(bookmark.get_title().split())
        dest = bookmark.get_dest()
        index = dest.get_index() if dest else None
        if not title or index is None or not 0 <= index < len(pages):
            continue
        page = pages[index]
        earliest = sections[-1].start if sections else 0
        start = _find_heading(text[page.start : page.end], title, max(earliest - page.start, 0))
        sections.append(Section(title, bookmark.level + 1, page.start + start))
    return tuple(sorted(sections, key=lambda section: section.start))


def _find_heading(page_text: str, title: str, earliest: int) -> int:
    """Offset of the line that is the title, perhaps after a number; 0 if there is none."""
    wanted = _squeeze(title)
    start = end = -1
    while end < len(page_text):
        start, end = end + 1, page_text.find("\n", end + 1)
        end = end if end >= 0 else len(page_text)
        if start < earliest:
            continue
        line = _squeeze(page_text[start:end]).removesuffix("-")
        number = _HEADING_NUMBER.match(line)
        for skipped in {0, number.end() if number else 0}:
            rest = line[skipped:]
            if rest and wanted.startswith(rest):
                following = _squeeze(page_text[start : start + 2 * len(title) + 40])
                if following.startswith(wanted, skipped):
                    return start
    return 0


def _squeeze(text: str) -> str:
    plain = text.isascii() and "\n" not in text  # nothing to normalise, no word to join
    return re.sub(r"\s", "", text if plain else normalise(text).text).casefold()


def _warnings(reads: list[PageText | str]) -> tuple[str, ...]:
    numbered = list(enumerate(reads, start=1))
    pages = [(number, read) for number, read in numbered if isinstance(read, PageText)]
    unread = [number for number, read in numbered if isinstance(read, str)]
    silent = [number for number, page in pages if not page.text and page.has_objects]
    garbled = [
        number
        for number, page in pages
        if len(_GARBAGE.findall(page.text)) > _GARBAGE_SHARE * max(len(page.text), 1)
    ]
    found = (
        (unread, "cannot be read"),
        (silent, "shows something but has no text (a scan?)"),
        (garbled, "has text that its fonts do not explain"),
    )
    return tuple(f"page {_list(numbers)} {what}" for numbers, what in found if numbers)


def _list(numbers: Iterable[int]) -> str:
    """Numbers as "2, 5–9"."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{span[0]}–{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)
