"""Lines of a paged document that are not its text: running heads, page numbers, contents lines."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ragflash_ingest.document import DocumentPage

_EDGE_LINES = 2
_LEAST_PAGES = 3
_LONGEST = 120
_NUMBER = re.compile(r"\d+")
_ROMAN = re.compile(r"^[ivxlcdm]+$|(?<=\s)[ivxlcdm]+$|^[ivxlcdm]+(?=\s)")
_LEADERS = re.compile(r"^.*(?:[.·…] ?){4,} *[\divxlcdm-]{0,7}[ \t]*$", re.MULTILINE)
_PRINTED = re.compile(r"^(\d{1,5})\b|\b(\d{1,5})$")

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Furniture:
    """What was found.

    Attributes:
        ranges: Whole lines, ascending, without overlap.
        labels: Printed page numbers by physical ones, on the pages that show theirs.
    """

    ranges: tuple[Range, ...]
    labels: dict[int, str]


def find_furniture(text: str, pages: Sequence[DocumentPage]) -> Furniture:
    """Find them by repetition.

    A line at the top or bottom of a page counts if it stands, numbers aside, on three pages or
    more, or if it carries the page's printed number. Dot leaders count anywhere.
    """
    edges = {page.number: _edge_lines(text, page) for page in pages}
    lines = [text[start:end] for spans in edges.values() for start, end in spans]
    times = Counter(_shape(line) for line in lines)
    printed = {
        number: {shown for start, end in spans for shown in _printed(text[start:end])}
        for number, spans in edges.items()
    }
    shift = _number_shift(printed)
    found = {match.span() for match in _LEADERS.finditer(text)}
    for page in pages:
        for start, end in edges[page.number]:
            line = text[start:end]
            numbered = shift is not None and page.number - shift in _printed(line)
            if numbered or times[_shape(line)] >= _LEAST_PAGES or line.strip() == page.label:
                found.add((start, end))
    labels = {
        number: str(number - shift)
        for number, shown in printed.items()
        if shift is not None and number - shift in shown
    }
    return Furniture(tuple(sorted(found)), labels)


def _edge_lines(text: str, page: DocumentPage) -> list[Range]:
    """The first and last lines of a page that hold anything, but for long ones."""
    lines: list[Range] = []
    start = page.start
    while start <= page.end:
        end = text.find("\n", start, page.end)
        end = page.end if end < 0 else end
        if text[start:end].strip():
            lines.append((start, end))
        start = end + 1
    edges = sorted({*lines[:_EDGE_LINES], *lines[-_EDGE_LINES:]})
    return [(start, end) for start, end in edges if end - start <= _LONGEST]


def _shape(line: str) -> str:
    bare = _ROMAN.sub("#", line.strip())
    return " ".join(_NUMBER.sub("#", bare).casefold().split())


def _printed(line: str) -> set[int]:
    """Numbers at either end of a line."""
    return {int(first or last) for first, last in _PRINTED.findall(line.strip())}


def _number_shift(printed: dict[int, set[int]]) -> int | None:
    """Physical less printed page number, if half of the pages agree on one."""
    shifts = Counter(number - shown for number, seen in printed.items() for shown in seen)
    if not shifts:
        return None
    shift, pages = shifts.most_common(1)[0]
    return shift if pages >= max(_LEAST_PAGES, len(printed) / 2) else None
