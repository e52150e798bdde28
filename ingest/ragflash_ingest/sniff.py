"""What a file is, by its bytes; its name only says which kind of text it is."""

import re
from enum import StrEnum
from pathlib import PurePath

import puremagic

from ragflash_ingest.document import FailureReason, ParseError
from ragflash_ingest.encoding import has_mark, utf16_without_mark


class MediaType(StrEnum):
    """The kinds of file that have a parser."""

    PDF = "application/pdf"
    HTML = "text/html"
    MARKDOWN = "text/markdown"
    TEXT = "text/plain"


PREFIX_BYTES = 64 * 1024
"""How much of a file `sniff` wants to see."""

_BY_EXTENSION = {
    ".md": MediaType.MARKDOWN,
    ".markdown": MediaType.MARKDOWN,
    ".html": MediaType.HTML,
    ".htm": MediaType.HTML,
    ".xhtml": MediaType.HTML,
}
_PDF = re.compile(rb"\A\s*%PDF-\d")
_PDF_AFTER_JUNK = re.compile(rb"^%PDF-\d", re.MULTILINE)  # the format allows 1,024 bytes of it
_HTML = re.compile(
    rb"\A(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff)?(?:\s|<!--.*?-->|<\?xml[^>]*>)*<(?:!doctype\s+html|html|head|body)\b",
    re.IGNORECASE | re.DOTALL,
)
_STRAY_CONTROLS = 4  # texts with so few are texts; the parsers drop them
_CONTROLS = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
# Formats that are made of characters but are not their text.
_TEXTUAL = ((b"{\\rtf", "RTF"), (b"%!PS", "PostScript"))


def sniff(data_prefix: bytes, name: str) -> MediaType:
    """Tell the type of a file from its first `PREFIX_BYTES` bytes.

    Raises:
        ParseError: `empty`, or `unsupported_type` with the type's name if it is known.
    """
    if not data_prefix:
        raise ParseError(FailureReason.EMPTY, "the file has no bytes")
    extension = PurePath(name).suffix.lower()
    if _PDF.match(data_prefix) or (
        extension == ".pdf" and _PDF_AFTER_JUNK.search(data_prefix[:1024])
    ):
        return MediaType.PDF
    for start, kind in _TEXTUAL:
        if data_prefix.startswith(start):
            raise ParseError(FailureReason.UNSUPPORTED_TYPE, f"{kind} files are not supported")
    wide = has_mark(data_prefix) or utf16_without_mark(data_prefix[: len(data_prefix) & ~1])
    controls = len(_CONTROLS.findall(data_prefix))
    if not wide and controls > max(_STRAY_CONTROLS, len(data_prefix) // 200):
        kind = _kind(data_prefix)
        raise ParseError(FailureReason.UNSUPPORTED_TYPE, f"{kind} files are not supported")
    if _HTML.match(data_prefix.replace(b"\0", b"")):
        return MediaType.HTML
    return _BY_EXTENSION.get(extension, MediaType.TEXT)


def _kind(data_prefix: bytes) -> str:
    try:
        matches = puremagic.magic_string(data_prefix)
    except (puremagic.PureError, ValueError):
        return "binary"
    return matches[0].name or matches[0].mime_type or "binary"
