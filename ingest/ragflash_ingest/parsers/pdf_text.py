r"""Characters of a PDF page with their places, in the order of the page's content.

PDFium gives a line-end hyphen as a control code and drops the line break after it; here it is
"-\n" again. Where the distance between lines, their size or a first line's indent shows that a
paragraph ends, the line break becomes an empty line.
"""

import ctypes
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pypdfium2 as pdfium  # type: ignore[import-untyped]
import pypdfium2.raw as pdfium_c  # type: ignore[import-untyped]

_HYPHEN, _NONCHARACTER = 0x02, 0xFFFE
_PARAGRAPH_PITCH = 1.3  # of the page's usual distance between lines
_SIZE_CHANGE = 1.15
_INDENT = (0.6, 5.0)  # in line heights

Boxes = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PageText:
    """Text of one page.

    Attributes:
        boxes: float32 [len(text), 4] as x0, y0, x1, y1 in points from the top left corner of
            the page as it is shown; NaN for line breaks.
        has_objects: Whether anything is painted on the page.
    """

    text: str
    boxes: Boxes
    width: float
    height: float
    has_objects: bool


def read_page(page: pdfium.PdfPage) -> PageText:
    """Extract one page.

    Raises:
        pdfium.PdfiumError: The page's content cannot be loaded.
    """
    textpage = page.get_textpage()
    try:
        codes, rects = _characters(textpage)
        chars, origins = _decode(codes)
        sizes = _line_sizes(textpage, chars, origins)
    finally:
        textpage.close()
    boxes = np.full((len(chars), 4), np.nan, np.float32)
    sources = np.array(origins, dtype=np.int64)
    boxes[sources >= 0] = _to_shown(rects, page)[sources[sources >= 0]]
    boxes[~(boxes[:, 2] > boxes[:, 0])] = np.nan
    text, boxes = _mark_paragraphs("".join(chars), boxes, sizes)
    first = len(text) - len(text.lstrip())
    last = len(text.rstrip())
    width, height = page.get_size()
    has_objects = pdfium_c.FPDFPage_CountObjects(page) > 0
    return PageText(text[first:last], boxes[first:last], width, height, has_objects)


def _characters(textpage: pdfium.PdfTextPage) -> tuple[list[int], Boxes]:
    """Code points and boxes (left, top, right, bottom, in the page's own space)."""
    count = pdfium_c.FPDFText_CountChars(textpage)
    if count <= 0:
        return [], np.empty((0, 4), np.float32)
    handle, unicode, loose = (
        textpage.raw,
        pdfium_c.FPDFText_GetUnicode,
        pdfium_c.FPDFText_GetLooseCharBox,
    )
    rects = (pdfium_c.FS_RECTF * count)()
    first, size = rects[0], ctypes.sizeof(pdfium_c.FS_RECTF)
    codes = [unicode(handle, index) for index in range(count)]
    for index in range(count):
        loose(handle, index, ctypes.byref(first, size * index))
    return codes, np.frombuffer(rects, np.float32).reshape(count, 4).copy()


def _decode(codes: list[int]) -> tuple[list[str], list[int]]:
    """Characters, and for each the index that it came from (-1: a line break)."""
    chars: list[str] = []
    origins: list[int] = []
    for index, code in enumerate(codes):
        if code in (_HYPHEN, _NONCHARACTER):
            chars += ("-", "\n")
            origins += (index, -1)
        elif code == 0x0A:
            chars.append("\n")
            origins.append(-1)
        elif 0xD800 <= code < 0xDC00 and index + 1 < len(codes):
            chars.append(chr(0x10000 + ((code - 0xD800) << 10) + (codes[index + 1] & 0x3FF)))
            origins.append(index)
        elif (code >= 0x20 or code == 0x09) and code != 0x7F and not 0xD800 <= code < 0xE000:
            chars.append(chr(code))
            origins.append(index)
    return chars, origins


def _to_shown(rects: Boxes, page: pdfium.PdfPage) -> Boxes:
    """Boxes from the page's space (origin bottom left) to the page as shown, turned by /Rotate."""
    left, bottom, right, top = page.get_bbox()
    x0, y0 = rects[:, 0] - left, top - rects[:, 1]
    x1, y1 = rects[:, 2] - left, top - rects[:, 3]
    width, height = right - left, top - bottom
    match page.get_rotation():
        case 90:
            sides = (height - y1, x0, height - y0, x1)
        case 180:
            sides = (width - x1, height - y1, width - x0, height - y0)
        case 270:
            sides = (y0, width - x1, y1, width - x0)
        case _:
            sides = (x0, y0, x1, y1)
    return np.stack(sides, axis=1)


def _line_sizes(textpage: pdfium.PdfTextPage, chars: list[str], origins: list[int]) -> list[float]:
    """Font size in the middle of each line, in the font's own measure."""
    bounds = [-1, *(at for at, char in enumerate(chars) if char == "\n"), len(chars)]
    middles = [(before + after) // 2 for before, after in pairwise(bounds)]
    return [
        pdfium_c.FPDFText_GetFontSize(textpage, origins[middle])
        if 0 <= middle < len(chars) and origins[middle] >= 0
        else 0.0
        for middle in middles
    ]


def _mark_paragraphs(text: str, boxes: Boxes, sizes: list[float]) -> tuple[str, Boxes]:
    """Double the line breaks that end a paragraph."""
    breaks = [at for at, char in enumerate(text) if char == "\n"]
    parts = np.split(boxes, breaks)
    lines = [_line(part, size) for part, size in zip(parts, sizes, strict=True)]
    pitches = [
        below.top - above.top for above, below in pairwise(lines) if below.top - above.top > 0
    ]
    usual = float(np.median(pitches)) if pitches else 0.0
    doubled = [
        at + 1
        for number, at in enumerate(breaks)
        if number + 1 < len(lines)
        and text[at - 1 : at] != "-"
        and _new_paragraph(lines, number, usual)
    ]
    if not doubled:
        return text, boxes
    pieces = [text[start:end] for start, end in zip([0, *doubled], [*doubled, None], strict=True)]
    return "\n".join(pieces), np.insert(boxes, doubled, np.float32(np.nan), axis=0)


@dataclass(frozen=True, slots=True)
class _Line:
    """Where most of a line's characters are; a footnote mark does not count."""

    left: float
    top: float
    height: float
    font_size: float


def _line(boxes: Boxes, font_size: float) -> _Line:
    placed = boxes[~np.isnan(boxes[:, 0])]
    if not len(placed):
        return _Line(np.nan, np.nan, np.nan, font_size)
    tops, heights = placed[:, 1], placed[:, 3] - placed[:, 1]
    middle = len(placed) // 2
    return _Line(
        float(placed[:, 0].min()),
        float(np.partition(tops, middle)[middle]),
        float(np.partition(heights, middle)[middle]),
        font_size,
    )


def _new_paragraph(lines: list[_Line], number: int, usual: float) -> bool:
    above, below = lines[number], lines[number + 1]
    pitch = below.top - above.top
    if not pitch > 0:  # up again, as at the next column; or a line without a place
        return False
    if pitch > _PARAGRAPH_PITCH * usual:
        return True
    # Another font alone has other heights, a scaled one the same size: both must differ.
    if _differ(above.height, below.height) and _differ(above.font_size, below.font_size):
        return True
    after = lines[number + 2] if number + 2 < len(lines) else above
    indents = (below.left - above.left, below.left - after.left)
    return all(_INDENT[0] * below.height < indent < _INDENT[1] * below.height for indent in indents)


def _differ(one: float, other: float) -> bool:
    low, high = sorted((one, other))
    return high > _SIZE_CHANGE * low
