"""One parser a media type. They read bytes they are given and open nothing."""

from collections.abc import Callable, Mapping

from ragflash_ingest.document import Document
from ragflash_ingest.parsers import (
    code,
    delimited,
    docx,
    email,
    epub,
    html,
    markdown,
    pdf,
    pptx,
    sheets,
    text,
)
from ragflash_ingest.sniff import MediaType, sniff

__all__ = ["PARSERS", "Progress", "parse_bytes"]

Progress = Callable[[str, int, int], None]
"""Receives a stage ("pages"), and how many of how many steps are done."""

PARSERS: Mapping[MediaType, str] = {
    MediaType.PDF: pdf.PARSER,
    MediaType.DOCX: docx.PARSER,
    MediaType.PPTX: pptx.PARSER,
    MediaType.XLSX: sheets.PARSER,
    MediaType.XLS: sheets.PARSER,
    MediaType.ODS: sheets.PARSER,
    MediaType.EPUB: epub.PARSER,
    MediaType.EMAIL: email.PARSER,
    MediaType.HTML: html.PARSER,
    MediaType.MARKDOWN: markdown.PARSER,
    MediaType.CSV: delimited.PARSER,
    MediaType.TSV: delimited.PARSER,
    MediaType.CODE: code.PARSER,
    MediaType.TEXT: text.PARSER,
}
"""Name and version of each parser; another version may give another text."""


def parse_bytes(data: bytes, name: str, progress: Progress | None = None) -> Document:
    """Parse a file in this process; `pool.ParserPool` does so in one that may die.

    Args:
        data: The whole file.
        name: Its name, used only to tell kinds of text apart.
        progress: Called as the work goes on.

    Raises:
        ParseError: With the reason.
    """
    kind = sniff(data, name)
    match kind:
        case MediaType.PDF:
            return pdf.parse(data, progress)
        case MediaType.XLSX | MediaType.XLS | MediaType.ODS:
            return sheets.parse(data, kind)
        case MediaType.CSV | MediaType.TSV:
            return delimited.parse(data, kind)
        case MediaType.CODE:
            return code.parse(data, name)
        case _:
            return _PLAIN[kind](data)


_PLAIN: Mapping[MediaType, Callable[[bytes], Document]] = {
    MediaType.DOCX: docx.parse,
    MediaType.PPTX: pptx.parse,
    MediaType.EPUB: epub.parse,
    MediaType.EMAIL: email.parse,
    MediaType.HTML: html.parse,
    MediaType.MARKDOWN: markdown.parse,
    MediaType.TEXT: text.parse,
}
