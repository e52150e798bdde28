"""What a file is, by its bytes; its name only says which kind of text it is."""

import re
from enum import StrEnum
from pathlib import PurePath

import puremagic

from ragflash_ingest import ole
from ragflash_ingest.archive import list_names
from ragflash_ingest.document import FailureReason, ParseError
from ragflash_ingest.encoding import has_mark, utf16_without_mark
from ragflash_ingest.languages import LANGUAGES


class MediaType(StrEnum):
    """The kinds of file that have a parser."""

    PDF = "application/pdf"
    DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
    PPTX = "application/vnd.openxmlformats-officedocument.presentationml.presentation"
    XLSX = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"
    XLS = "application/vnd.ms-excel"
    ODS = "application/vnd.oasis.opendocument.spreadsheet"
    EPUB = "application/epub+zip"
    EMAIL = "message/rfc822"
    HTML = "text/html"
    MARKDOWN = "text/markdown"
    CSV = "text/csv"
    TSV = "text/tab-separated-values"
    CODE = "text/x-source-code"
    TEXT = "text/plain"


_PREFIX_BYTES = 64 * 1024
_BY_EXTENSION = {
    ".md": MediaType.MARKDOWN,
    ".markdown": MediaType.MARKDOWN,
    ".html": MediaType.HTML,
    ".htm": MediaType.HTML,
    ".xhtml": MediaType.HTML,
    ".csv": MediaType.CSV,
    ".tsv": MediaType.TSV,
    ".tab": MediaType.TSV,
    ".eml": MediaType.EMAIL,
    **dict.fromkeys(LANGUAGES, MediaType.CODE),
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
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_PACKAGE = "[Content_Types].xml"  # of Open Packaging, which new office files follow
_BY_FOLDER = {"word": MediaType.DOCX, "ppt": MediaType.PPTX, "xl": MediaType.XLSX}
_BOOK = "META-INF/container.xml"
_ODS_MARK = b"mimetype" + MediaType.ODS.encode()  # stored first and uncompressed, by its standard
_BY_STREAM = (
    ("WordDocument", "old Word (.doc)"),
    ("PowerPoint Document", "old PowerPoint (.ppt)"),
    ("__properties_version1.0", "Outlook (.msg)"),
)


def sniff(data: bytes, name: str) -> MediaType:
    """Tell the type of a file.

    Raises:
        ParseError: `empty`, `unsupported_type` with the type's name if it is known, or what is
            wrong with a container: `encrypted`, `corrupt`, `too_large`.
    """
    if not data:
        raise ParseError(FailureReason.EMPTY, "the file has no bytes")
    prefix = data[:_PREFIX_BYTES]
    extension = PurePath(name).suffix.lower()
    if _PDF.match(prefix) or (extension == ".pdf" and _PDF_AFTER_JUNK.search(prefix[:1024])):
        return MediaType.PDF
    if prefix.startswith(_ZIP):
        return _zip_kind(data)
    if prefix.startswith(ole.SIGNATURE):
        return _ole_kind(data)
    for start, kind in _TEXTUAL:
        if prefix.startswith(start):
            raise _unsupported(kind)
    wide = has_mark(prefix) or utf16_without_mark(prefix[: len(prefix) & ~1])
    controls = len(_CONTROLS.findall(prefix))
    if not wide and controls > max(_STRAY_CONTROLS, len(prefix) // 200):
        raise _unsupported(_kind(prefix))
    if _HTML.match(prefix.replace(b"\0", b"")):
        return MediaType.HTML
    return _BY_EXTENSION.get(extension, MediaType.TEXT)


def _unsupported(kind: str) -> ParseError:
    return ParseError(FailureReason.UNSUPPORTED_TYPE, f"{kind} files are not supported")


def _zip_kind(data: bytes) -> MediaType:
    names = set(list_names(data))
    if _PACKAGE in names:
        folders = {name.partition("/")[0] for name in names}
        for folder, kind in _BY_FOLDER.items():
            if folder in folders:
                return kind
    if _BOOK in names:
        return MediaType.EPUB
    if _ODS_MARK in data[:256]:
        return MediaType.ODS
    detail = "archives are not opened; send the files that are in it"
    raise ParseError(FailureReason.UNSUPPORTED_TYPE, detail)


def _ole_kind(data: bytes) -> MediaType:
    if ole.holds(data, "EncryptedPackage"):
        raise ParseError(FailureReason.ENCRYPTED, "the file is protected by a password")
    for stream, kind in _BY_STREAM:
        if ole.holds(data, stream):
            raise _unsupported(kind)
    if ole.holds(data, "Workbook") or ole.holds(data, "Book"):
        return MediaType.XLS
    raise _unsupported("OLE compound")


def _kind(data_prefix: bytes) -> str:
    try:
        matches = puremagic.magic_string(data_prefix)
    except (puremagic.PureError, ValueError):
        return "binary"
    return matches[0].name or matches[0].mime_type or "binary"
