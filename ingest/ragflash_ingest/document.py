"""What a parser makes of a file: one text, and where each part of it comes from.

Every offset in the product is an index into `Document.text`; ranges are end exclusive.
"""

import struct
import zlib
from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import numpy as np
import numpy.typing as npt


class FailureReason(StrEnum):
    """Why a file gave no document."""

    EMPTY = "empty"
    ENCRYPTED = "encrypted"
    NO_TEXT = "no_text"
    CORRUPT = "corrupt"
    ENCODING_UNKNOWN = "encoding_unknown"
    UNSUPPORTED_TYPE = "unsupported_type"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"


class ParseError(Exception):
    """A file cannot be read; `detail` is a sentence for whoever sent it."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle on a page, in points (1/72 inch) from the page's top left corner."""

    x0: float
    y0: float
    x1: float
    y1: float


@dataclass(frozen=True, slots=True)
class DocumentPage:
    """One page's range of the text.

    Attributes:
        number: Physical page, slide or sheet, from 1.
        label: The number printed on the page ("iii"), where the file says so; a sheet's name.
        width: Points; None for formats without paper.
        error: Why the page could not be read; its text is then empty.
    """

    number: int
    label: str | None
    start: int
    end: int
    width: float | None = None
    height: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, or what names the columns of a long table.

    Attributes:
        level: From 1; that of columns is below every heading's.
        start: Where it begins in the text; of columns, where the first row below them does.
        end: Where a table ends; None for headings, which go on until the next of their level.
    """

    title: str
    level: int
    start: int
    end: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BoxTable:
    """One box a character, and the start of each page.

    Attributes:
        boxes: float32 [len(text), 4] as x0, y0, x1, y1; NaN where a character has no place.
            Multiples of 1/64 point, so that the stored form is exact.
        page_starts: Offset of the first character of page 1, 2, …
    """

    boxes: npt.NDArray[np.float32]
    page_starts: tuple[int, ...]

    @classmethod
    def rounded(cls, boxes: npt.NDArray[np.float32], page_starts: tuple[int, ...]) -> Self:
        """Make a table of boxes of any precision; boxes without width count as none."""
        grid = (np.round(boxes * 64) / 64).astype(np.float32)
        grid[~(grid[:, 2] > grid[:, 0]) | np.isnan(grid).any(axis=1)] = np.nan
        return cls(grid, page_starts)

    def lines(self, start: int, end: int) -> list[tuple[int, Box]]:
        """Boxes that cover a range of characters: one a line, in text order.

        A wide gap inside a line (the gutter between two columns) also starts a new box.

        Returns:
            Pairs of physical page number and box.
        """
        found: list[tuple[int, Box]] = []
        for offset in range(max(start, 0), min(end, len(self.boxes))):
            x0, y0, x1, y1 = (float(side) for side in self.boxes[offset])
            if not x1 > x0:  # NaN
                continue
            page = bisect_right(self.page_starts, offset)
            if found and found[-1][0] == page and _same_line(found[-1][1], x0, y0, x1, y1):
                old = found[-1][1]
                grown = Box(min(old.x0, x0), min(old.y0, y0), max(old.x1, x1), max(old.y1, y1))
                found[-1] = (page, grown)
            else:
                found.append((page, Box(x0, y0, x1, y1)))
        return found

    def to_bytes(self) -> bytes:
        """Pack for storage, in about two bytes a character.

        A character is kept as its distance from the one before, its width (0: no box) and the
        changes of its top and height, which are mostly zero; in byte planes, deflated.
        """
        present = ~np.isnan(self.boxes[:, 0])
        grid = (np.nan_to_num(self.boxes) * 64).astype("<i4")
        last = np.maximum.accumulate(np.where(present, np.arange(len(grid)), 0))
        x0, y0, x1, y1 = grid[last].T
        width = np.where(present, x1 - x0, 0)
        x1_before = np.concatenate(([0], x1[:-1])) if len(x1) else x1
        gap = np.where(present, x0 - x1_before, 0)
        columns = np.stack([gap, width, _steps(y0), _steps(y1 - y0)]).astype("<i4")
        planes = columns.view(np.uint8).reshape(4, len(grid), 4).transpose(0, 2, 1)
        starts = struct.pack(f"<{len(self.page_starts)}I", *self.page_starts)
        header = struct.pack("<4sII", _MAGIC, len(grid), len(self.page_starts))
        return header + starts + zlib.compress(planes.tobytes(), 6)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Unpack what `to_bytes` made.

        Raises:
            ValueError: The bytes are not a box table.
        """
        if data[:4] != _MAGIC or len(data) < 12:
            raise ValueError("not a box table")
        _, count, pages = struct.unpack_from("<4sII", data)
        try:
            starts = struct.unpack_from(f"<{pages}I", data, 12)
            raw = zlib.decompress(data[12 + 4 * pages :])
        except (struct.error, zlib.error) as error:
            raise ValueError("damaged box table") from error
        if len(raw) != 16 * count:
            raise ValueError(f"box table holds {len(raw)} bytes instead of {16 * count}")
        planes = np.frombuffer(raw, np.uint8).reshape(4, 4, count).transpose(0, 2, 1)
        columns = np.ascontiguousarray(planes).view("<i4").reshape(4, count)
        gap, width, top, height = columns
        x1, y0 = np.cumsum(gap + width), np.cumsum(top)
        grid = np.stack([x1 - width, y0, x1, y0 + np.cumsum(height)], axis=1) / 64
        grid[width == 0] = np.nan
        return cls(grid.astype(np.float32), starts)


def _steps(values: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.diff(values, prepend=values.dtype.type(0))


_MAGIC = b"RFB1"
_GUTTER = 2.5  # gap, in line heights, beyond which a line's next character stands elsewhere


def _same_line(line: Box, x0: float, y0: float, x1: float, y1: float) -> bool:
    middle, height = (y0 + y1) / 2, line.y1 - line.y0
    level = line.y0 <= middle <= line.y1 or y0 <= (line.y0 + line.y1) / 2 <= y1
    gap = max(x0 - line.x1, line.x0 - x1)
    return level and gap <= _GUTTER * max(height, y1 - y0)


@dataclass(frozen=True, slots=True)
class Document:
    r"""A parsed file.

    Attributes:
        text: The canonical text: the parser's output in its own spelling (ligatures kept), C0
            controls other than tab and newline removed, CRLF and CR as LF.
        pages: Consecutive ranges of the text, joined by one "\n" that belongs to no page.
            Formats without pages have one.
        sections: In text order.
        media_type: For example "application/pdf".
        encoding: Of text formats: the encoding that was used.
        warnings: What the reader should know, a sentence each.
        parser: Name and version, part of a document's identity.
        boxes: Where each character stands on its page; PDF only.
        furniture: Ranges that repeat from page to page (running heads, page numbers) or lead
            elsewhere (contents lines): part of the text, but nothing to quote.
        title: The file's own title, if it has one.
    """

    text: str
    pages: tuple[DocumentPage, ...]
    sections: tuple[Section, ...]
    media_type: str
    encoding: str | None
    warnings: tuple[str, ...]
    parser: str
    boxes: BoxTable | None = None
    furniture: tuple[tuple[int, int], ...] = ()
    title: str | None = None

    def __post_init__(self) -> None:
        cursor = -1
        for page in self.pages:
            if page.start != cursor + 1 or page.end < page.start:
                raise ValueError(f"page {page.number} does not follow its predecessor")
            cursor = page.end
        if cursor != len(self.text):
            raise ValueError("pages do not cover the text")

    @property
    def partial(self) -> bool:
        """Whether a page is missing."""
        return any(page.error for page in self.pages)

    def page_at(self, offset: int) -> DocumentPage:
        """Page of a character; a separator counts to the page before it."""
        index = bisect_right(self.pages, offset, key=lambda page: page.start)
        return self.pages[max(index - 1, 0)]

    def section_path(self, offset: int) -> tuple[str, ...]:
        """Titles of the sections around a character, outermost first."""
        path: list[Section] = []
        for section in self.sections[: bisect_right(self.sections, offset, key=lambda s: s.start)]:
            while path and path[-1].level >= section.level:
                path.pop()
            path.append(section)
        return tuple(s.title for s in path if s.end is None or offset < s.end)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of a document that is embedded and found as one.

    Attributes:
        text: Exactly `document.text[start:end]`.
        page_start: Physical page of the first character.
        section: Path of headings, joined by " › ".
    """

    index: int
    start: int
    end: int
    text: str
    page_start: int
    page_end: int
    section: str | None
