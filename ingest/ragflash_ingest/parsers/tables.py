"""Rows of tables as lines of text, and which of them names the columns."""

from collections.abc import Sequence

from ragflash_ingest.document import Section

CELL_SEPARATOR = " | "

_TITLE_CHARS = 200
_COLUMNS_LEVEL = 10  # headings have 9 at most
_LONG_CHARS = 1000  # a table that is longer may be cut
_HEADER_DEPTH = 20
_AROUND_NUMBERS = str.maketrans("", "", "+-−()%.,' \u00a0\u202f$€£¥")


def row_text(cells: Sequence[str]) -> str:
    """One line for a row: white space inside a cell is one space, empty cells at its end go."""
    words = [" ".join(cell.split()) for cell in cells]
    while words and not words[-1]:
        words.pop()
    return CELL_SEPARATOR.join(words)


def header_title(line: str) -> str:
    """A row that names columns, short enough for a section's title."""
    if len(line) <= _TITLE_CHARS:
        return line
    cut = line.rfind(CELL_SEPARATOR, 0, _TITLE_CHARS)
    return line[: cut if cut > 0 else _TITLE_CHARS].rstrip()


def columns(line: str, start: int, end: int) -> tuple[Section, ...]:
    """What names the columns of the rows at `start:end`, if these may be cut apart."""
    title = header_title(" ".join(line.split()))
    return (Section(title, _COLUMNS_LEVEL, start, end),) if end - start > _LONG_CHARS else ()


def find_header(rows: Sequence[Sequence[str]]) -> int | None:
    """Index of the row that names the columns.

    It is the first row with two cells or more, unless one of them is a number that is not a
    year. What stands above it is the table's caption.
    """
    for index, row in enumerate(rows[:_HEADER_DEPTH]):
        # A merged caption repeats one text over its columns.
        filled = {cell.strip() for cell in row} - {""}
        if len(filled) > 1:
            return index if all(map(_is_label, filled)) else None
    return None


def _is_label(cell: str) -> bool:
    digits = cell.translate(_AROUND_NUMBERS)
    is_year = cell.isdigit() and 1900 <= int(cell[:5]) < 2100
    return is_year or not digits.isdigit()
