"""Tables as text (CSV, TSV): the separator is found, cells are unquoted."""

import csv
import io
import re
from collections import Counter

from ragflash_ingest.document import Document
from ragflash_ingest.encoding import Decoded, decode
from ragflash_ingest.parsers.text import canonical, single_page
from ragflash_ingest.parsers.writer import TextWriter
from ragflash_ingest.sniff import MediaType

PARSER = "delimited 1"

_SEPARATORS = ",;\t|"
_SAMPLE_ROWS = 50
_NAMED = re.compile(r"sep=(.)\n", re.IGNORECASE)  # Excel's way to say it


def parse(data: bytes, kind: MediaType) -> Document:
    """Parse a CSV or TSV file.

    A table whose quotes are not well formed is shown as plain text, with a warning.

    Raises:
        ParseError: `empty` or `encoding_unknown`.
    """
    decoded = decode(data)
    text = canonical(decoded.text)
    named = _NAMED.match(text)
    body = text[named.end() :] if named else text
    separator = named[1] if named else "\t" if kind is MediaType.TSV else _separator(body)
    try:
        rows = list(csv.reader(io.StringIO(body, newline=""), delimiter=separator, strict=True))
    except csv.Error:
        return _as_text(text, kind, decoded)
    writer = TextWriter()
    writer.table(rows, header_level=1)
    return writer.document(kind, PARSER, encoding=decoded.encoding, warnings=decoded.warnings)


def _separator(text: str) -> str:
    """The separator that cuts most rows into the same number of cells, two at least."""

    def fit(separator: str) -> tuple[float, int]:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        widths: Counter[int] = Counter()
        try:
            for _, row in zip(range(_SAMPLE_ROWS), reader, strict=False):
                widths[len(row)] += bool(row)
        except csv.Error:
            return 0.0, 0
        width, rows = max(widths.items(), key=lambda item: (item[0] > 1, item[1]), default=(0, 0))
        return (rows / widths.total(), width) if width > 1 else (0.0, 0)

    return max(_SEPARATORS, key=fit)


def _as_text(text: str, kind: MediaType, decoded: Decoded) -> Document:
    warning = "the table's quotes are not well formed; it is shown as it was written"
    return Document(
        text=text,
        pages=single_page(text),
        sections=(),
        media_type=kind,
        encoding=decoded.encoding,
        warnings=(*decoded.warnings, warning),
        parser=PARSER,
    )
