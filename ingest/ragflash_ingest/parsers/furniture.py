"""Lines of a paged document that are not its text: running heads, page numbers, contents lines."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ragflash_ingest.document import DocumentPage

_EDGE_LINES = 2
_LEAST_PAGES = 3
_LONGEST = 120
_END_NUMBER = re.compile(r"^(?:\d+|[ivxlcdm]+)(?=\s|$)|(?:(?<=\s)|^)(?:\d+|[ivxlcdm]+)$")
# From where dots begin, so that a long row of them is looked at once.
_LEADERS = re.compile(
    r"[.·…](?<![.·…].)(?<![.·…] .) ?(?:[.·…] ?){3,}+ *[\divxlcdm-]{0,7}[ \t]*$", re.MULTILINE
)
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

    A line at the top or bottom of a page counts if it stands, but for a number at its end, on
    three pages or more, or if it carries the page's printed number; the line next to it counts
    only if it does. Dot leaders count anywhere. A text is never all furniture.
    """
    edges = {page.number: _edges(text, page) for page in pages}
    shown = {
        number: {
            printed
            for side in sides
            for start, end in side
            for printed in _printed(text[start:end])
        }
        for number, sides in edges.items()
    }
    shift = _number_shift(shown)
    times = Counter(
        shape
        for sides in edges.values()
        for shape in {_shape(text[start:end]) for side in sides for start, end in side}
    )
    found = {
        (text.rfind("\n", 0, match.start()) + 1, match.end()) for match in _LEADERS.finditer(text)
    }
    for page in pages:
        for side in edges[page.number]:
            for start, end in side:
                line = text[start:end]
                numbered = shift is not None and page.number - shift in _printed(line)
                repeated = times[_shape(line)] >= _LEAST_PAGES or line.strip() == page.label
                if not (numbered or repeated or (start, end) in found):
                    break
                found.add((start, end))
    ranges = tuple(sorted(found))
    gaps = zip(
        (0, *(end for _, end in ranges)), (*(start for start, _ in ranges), len(text)), strict=True
    )
    if not any(text[start:end].strip() for start, end in gaps):
        ranges = ()
    labels = {
        number: str(number - shift)
        for number, printed in shown.items()
        if shift is not None and number - shift in printed
    }
    return Furniture(ranges, labels)


def _edges(text: str, page: DocumentPage) -> tuple[list[Range], list[Range]]:
    """The first and the last lines of a page that hold anything, from the edge inwards."""
    sides = _lines_down(text, page.start, page.end), _lines_up(text, page.start, page.end)
    top, bottom = (
        [line for line in islice(side, _EDGE_LINES) if line[1] - line[0] <= _LONGEST]
        for side in sides
    )
    return top, bottom


def _lines_down(text: str, start: int, end: int) -> Iterator[Range]:
    while start <= end:
        found = text.find("\n", start, end)
        stop = found if found >= 0 else end
        if text[start:stop].strip():
            yield start, stop
        start = stop + 1


def _lines_up(text: str, start: int, end: int) -> Iterator[Range]:
    while end >= start:
        first = text.rfind("\n", start, end) + 1 or start
        if text[first:end].strip():
            yield first, end
        end = first - 1


def _shape(line: str) -> str:
    """A line with "#" for the number at its begin or end."""
    return " ".join(_END_NUMBER.sub("#", line.strip()).casefold().split())


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
