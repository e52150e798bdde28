"""A document's text while it grows: paragraphs, lines, table rows, headings and pages."""

from collections.abc import Sequence
from dataclasses import replace

from ragflash_ingest.document import Document, DocumentPage, FailureReason, ParseError, Section
from ragflash_ingest.parsers.tables import columns, find_header, header_title, row_text
from ragflash_ingest.parsers.text import clean

_PARAGRAPH, _LINE = "\n\n", "\n"


class TextWriter:
    """Collects what a parser finds, in reading order; offsets come from what has been written."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0
        self._pages: list[DocumentPage] = []
        self._page_start = 0
        self._sections: list[Section] = []

    def end_page(self, label: str | None = None) -> None:
        """Make a page of what was written since the last call, even if that is nothing."""
        number = len(self._pages) + 1
        self._pages.append(DocumentPage(number, label, self._page_start, self._length))
        self._append("\n")
        self._page_start = self._length

    def paragraph(self, text: str) -> None:
        """Write a block of text, set off by an empty line; blank ones leave no trace."""
        self._write(text.strip("\n"), _PARAGRAPH)

    def line(self, text: str) -> None:
        """Write a line right below what stands there."""
        self._write(text.strip("\n"), _LINE)

    def heading(self, text: str, level: int) -> None:
        """Write a heading; a section begins here."""
        title = " ".join(clean(text).split())
        if title:
            self._sections.append(Section(title, level, self._write(title, _PARAGRAPH)))

    def block(self, text: str, sections: Sequence[Section]) -> None:
        """Write a text that has sections already; its white space at both ends stays out."""
        lead = len(text) - len(text.lstrip())
        start = self._write(text.strip(), _PARAGRAPH)
        self._sections.extend(
            replace(
                section,
                start=start + max(section.start - lead, 0),
                end=None if section.end is None else start + section.end - lead,
            )
            for section in sections
        )

    def table(self, rows: Sequence[Sequence[str]], *, header_level: int | None = None) -> None:
        """Write a table, set off by an empty line; rows without a word are left out.

        Args:
            rows: Cells of each row.
            header_level: Level of the section that the row of column names begins and that does
                not end with the table. Without it, every later part of a long table is found
                under its column names, and what follows the table is not.
        """
        header, names, body = find_header(rows), "", 0
        gap = _PARAGRAPH
        for index, row in enumerate(rows):
            line = clean(row_text(row))
            if not line.strip(" |"):
                continue
            start = self._write(line, gap)
            gap = _LINE
            if index == header:
                names, body = line, self._length + len(_LINE)
                if header_level:
                    self._sections.append(Section(header_title(line), header_level, start))
        if names and not header_level:
            self._sections.extend(columns(names, body, self._length))

    def document(
        self,
        media_type: str,
        parser: str,
        *,
        encoding: str | None = None,
        warnings: tuple[str, ...] = (),
        title: str | None = None,
    ) -> Document:
        """Make the document. What was written after the last page is a page of its own.

        Raises:
            ParseError: `empty`, when nothing was written.
        """
        if not self._pages or self._length > self._page_start:
            self.end_page()
        text = "".join(self._pieces[:-1])
        if not text.strip():
            raise ParseError(FailureReason.EMPTY, "the file holds no text")
        return Document(
            text=text,
            pages=tuple(self._pages),
            sections=tuple(self._sections),
            media_type=media_type,
            encoding=encoding,
            warnings=warnings,
            parser=parser,
            title=title,
        )

    def _write(self, text: str, gap: str) -> int:
        """Write a text after a gap; returns where the text begins."""
        shown = clean(text).rstrip()
        if not shown.strip():
            return self._length
        if self._length > self._page_start:
            self._append(gap)
        start = self._length
        self._append(shown)
        return start

    def _append(self, piece: str) -> None:
        self._pieces.append(piece)
        self._length += len(piece)
