"""Markdown: the text stays the source, so that offsets are its own; the syntax gives sections."""

from collections.abc import Iterator
from itertools import accumulate, pairwise, takewhile

from markdown_it import MarkdownIt
from markdown_it.token import Token

from ragflash_ingest.document import Document, Section
from ragflash_ingest.encoding import decode
from ragflash_ingest.parsers.tables import columns, row_text
from ragflash_ingest.parsers.text import canonical, single_page
from ragflash_ingest.sniff import MediaType

PARSER = "markdown 2"


def parse(data: bytes) -> Document:
    """Parse a Markdown file. Nothing that it links to is fetched.

    Raises:
        ParseError: `empty` or `encoding_unknown`.
    """
    decoded = decode(data)
    text = canonical(decoded.text)
    sections = _sections(text)
    return Document(
        text=text,
        pages=single_page(text),
        sections=sections,
        media_type=MediaType.MARKDOWN,
        encoding=decoded.encoding,
        warnings=decoded.warnings,
        parser=PARSER,
        title=next((section.title for section in sections if section.level == 1), None),
    )


def _sections(text: str) -> tuple[Section, ...]:
    starts = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    found: list[Section] = []
    for at, (token, inline) in enumerate(pairwise(tokens)):
        if token.level or not token.map:
            continue
        if token.type == "heading_open" and _plain(inline):
            found.append(Section(_plain(inline), int(token.tag[1]), starts[token.map[0]]))
        elif token.type == "table_open":
            first, after = token.map
            names = row_text(_header_cells(tokens[index] for index in range(at, len(tokens))))
            found += columns(names, starts[min(first + 2, after)], starts[after] - 1)
    return tuple(found)


def _header_cells(tokens: Iterator[Token]) -> list[str]:
    """Cells of the first row of the table that begins here."""
    row = takewhile(lambda token: token.type != "tr_close", tokens)
    return [_plain(token) for token in row if token.type == "inline"]


def _plain(inline: Token) -> str:
    parts = (
        child.content if child.content else " " if child.type.endswith("break") else ""
        for child in inline.children or ()
    )
    return " ".join("".join(parts).split())
