"""Plain text: only the encoding is a question."""

import re

from ragflash_ingest.document import Document, DocumentPage, FailureReason, ParseError
from ragflash_ingest.encoding import decode
from ragflash_ingest.sniff import MediaType

PARSER = "text 1"

_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LINE_END = re.compile(r"\r\n?")


def parse(data: bytes) -> Document:
    """Parse a text file.

    Raises:
        ParseError: `empty` (nothing but white space) or `encoding_unknown`.
    """
    decoded = decode(data)
    text = canonical(decoded.text)
    return Document(
        text=text,
        pages=single_page(text),
        sections=(),
        media_type=MediaType.TEXT,
        encoding=decoded.encoding,
        warnings=decoded.warnings,
        parser=PARSER,
    )


def canonical(text: str) -> str:
    r"""Text as it is stored: "\n" as line end, no control characters but it and the tab.

    Raises:
        ParseError: `empty`.
    """
    shown = clean(text)
    if not shown.strip():
        raise ParseError(FailureReason.EMPTY, "the file holds nothing but white space")
    return shown


def clean(text: str) -> str:
    """Make a part of a text canonical; it may be blank."""
    return _CONTROLS.sub("", _LINE_END.sub("\n", text.replace("\f", "\n")))


def single_page(text: str) -> tuple[DocumentPage, ...]:
    """The one page of a format without pages."""
    return (DocumentPage(number=1, label=None, start=0, end=len(text)),)
