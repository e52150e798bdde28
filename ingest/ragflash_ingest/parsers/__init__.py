"""One parser a media type. They read bytes they are given and open nothing."""

from collections.abc import Callable, Mapping

from ragflash_ingest.document import Document
from ragflash_ingest.parsers import html, markdown, pdf, text
from ragflash_ingest.sniff import PREFIX_BYTES, MediaType, sniff

Progress = Callable[[str, int, int], None]
"""Receives a stage ("pages"), and how many of how many steps are done."""

PARSERS: Mapping[MediaType, str] = {
    MediaType.PDF: pdf.PARSER,
    MediaType.HTML: html.PARSER,
    MediaType.MARKDOWN: markdown.PARSER,
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
    kind = sniff(data[:PREFIX_BYTES], name)
    match kind:
        case MediaType.PDF:
            return pdf.parse(data, progress)
        case MediaType.HTML:
            return html.parse(data)
        case MediaType.MARKDOWN:
            return markdown.parse(data)
        case MediaType.TEXT:
            return text.parse(data)
