"""Markdown: the text stays the source, so that offsets are its own; the syntax gives sections."""

from itertools import accumulate, pairwise

from markdown_it import MarkdownIt
from markdown_it.token import Token

from ragflash_ingest.document import Document, Section
from ragflash_ingest.encoding import decode
from ragflash_ingest.parsers.text import canonical, single_page
from ragflash_ingest.sniff import MediaType

PARSER = "markdown 1"


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
    tokens = MarkdownIt("commonmark").parse(text)
    return tuple(
        Section(_plain(inline), int(token.tag[1]), starts[token.map[0]])
        for token, inline in pairwise(tokens)
        if token.type == "heading_open" and token.map and token.level == 0 and _plain(inline)
    )


def _plain(inline: Token) -> str:
    parts = (
        child.content if child.content else " " if child.type.endswith("break") else ""
        for child in inline.children or ()
    )
    return " ".join("".join(parts).split())
