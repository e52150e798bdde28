"""Workbooks (XLSX, XLSB, XLS, ODS): a sheet is a page, a row is a line."""

import datetime
import io
import re
from collections.abc import Iterator

from python_calamine import (
    CalamineError,
    CalamineSheet,
    CalamineWorkbook,
    PasswordError,
    SheetTypeEnum,
    SheetVisibleEnum,
)

from ragflash_ingest.archive import Archive, unpack
from ragflash_ingest.document import Document, FailureReason, ParseError
from ragflash_ingest.parsers.writer import TextWriter
from ragflash_ingest.sniff import MediaType

PARSER = "sheets 1"
MAX_CELLS = 10_000_000
"""Cells of the rectangle around what a sheet holds; the library keeps them all in memory."""

_CELL = re.compile(rb"""<(?:\w+:)?c\s[^>]*?\br=["']([A-Z]{1,3})([0-9]{1,7})["']""")
# In XLS, a FILEPASS record after the first (BOF), or after WRITEPROT ([MS-XLS] 2.1.7.20.3).
_XLS_ENCRYPTED = re.compile(rb"\x09\x08(?:\x08\0.{8}|\x10\0.{16})(?:\x86\0\0\0)?\x2f\0", re.DOTALL)
_ODS_ENCRYPTED = b"encryption-data"
_PROTECTED = "the file is protected by a password"
_MIDNIGHT = datetime.time()


def parse(data: bytes, kind: MediaType) -> Document:
    """Parse a workbook. Formulas show the value that was stored with them.

    Raises:
        ParseError: `encrypted`, `corrupt`, `too_large`, or `empty`.
    """
    source = _checked_old(data) if kind is MediaType.XLS else _checked(unpack(data))
    writer = TextWriter()
    hidden = 0
    try:
        with CalamineWorkbook.from_filelike(source) as workbook:
            for index, sheet in enumerate(workbook.sheets_metadata):
                if sheet.typ is not SheetTypeEnum.WorkSheet:
                    continue
                if sheet.visible is not SheetVisibleEnum.Visible:
                    hidden += 1
                    continue
                rows = _rows(workbook.get_sheet_by_index(index))
                if any(any(row) for row in rows):
                    writer.heading(sheet.name, 1)
                writer.table(rows, header_level=2)
                writer.end_page(sheet.name)
    except PasswordError as error:
        raise ParseError(FailureReason.ENCRYPTED, _PROTECTED) from error
    except CalamineError as error:
        raise ParseError(FailureReason.CORRUPT, f"the workbook is damaged: {error}") from error
    warnings = (f"{hidden} hidden sheets were left out",) if hidden else ()
    return writer.document(kind, PARSER, warnings=warnings)


def _checked_old(data: bytes) -> io.BytesIO:
    if _XLS_ENCRYPTED.search(data):
        raise ParseError(FailureReason.ENCRYPTED, _PROTECTED)
    return io.BytesIO(data)


def _checked(archive: Archive) -> io.BytesIO:
    """The archive, unless it is encrypted or a few cells span more than memory."""
    if _ODS_ENCRYPTED in archive.texts.get("META-INF/manifest.xml", b""):
        raise ParseError(FailureReason.ENCRYPTED, _PROTECTED)
    for name, data in archive.texts.items():
        if name.startswith("xl/worksheets/") and _span(data) > MAX_CELLS:
            detail = f"a sheet spans more than {MAX_CELLS:,} cells; delete the stray ones far out"
            raise ParseError(FailureReason.TOO_LARGE, detail)
    return archive.repack()


def _span(sheet: bytes) -> int:
    """Cells of the rectangle around all cells of a sheet's XML."""
    rows: set[int] = set()
    columns: set[bytes] = set()
    for column, row in _CELL.findall(sheet):
        rows.add(int(row))
        columns.add(column)
    if not rows:
        return 0
    numbers = [_column_number(column) for column in columns]
    return (max(rows) - min(rows) + 1) * (max(numbers) - min(numbers) + 1)


def _column_number(letters: bytes) -> int:
    number = 0
    for letter in letters:
        number = 26 * number + letter - 64
    return number


def _rows(sheet: CalamineSheet) -> list[list[str]]:
    """Cells as text; a merged cell's text stands in every cell that it covers."""
    rows = [[_shown(cell) for cell in row] for row in sheet.to_python(skip_empty_area=True)]
    if sheet.start is None:
        return rows
    covered = 0
    for top, left, bottom, right in _merged(sheet, sheet.start):
        area = [(row, slice(left, right + 1)) for row in rows[top : bottom + 1]]
        covered += sum(len(row[part]) for row, part in area)
        if covered > sheet.height * sheet.width:
            raise ParseError(FailureReason.CORRUPT, f"merged cells of {sheet.name} overlap")
        for row, part in area:
            row[part] = [rows[top][left]] * len(row[part])
    return rows


def _merged(sheet: CalamineSheet, start: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
    """Merged ranges inside the sheet's data, counted from its first row and column."""
    for (top, left), (bottom, right) in sheet.merged_cell_ranges or ():
        first = top - start[0], left - start[1]
        if 0 <= first[0] < sheet.height and 0 <= first[1] < sheet.width:
            yield *first, bottom - start[0], right - start[1]


def _shown(cell: object) -> str:
    match cell:
        case bool():
            return str(cell).upper()
        case float():
            return f"{cell:.15g}"  # the digits that a sheet keeps
        case datetime.datetime():
            midnight = cell.time() == _MIDNIGHT
            return cell.date().isoformat() if midnight else cell.isoformat(" ", "seconds")
        case datetime.date() | datetime.time():
            return cell.isoformat()
        case _:
            return str(cell)
