r"""Characters of a PDF page with their places, in the order of the page's content.

PDFium gives a line-end hyphen as a control code and drops the line break after it; here it is
"-\n" again. Where the distance between lines, their size or a first line's indent shows that a
paragraph ends, the line break becomes an empty line.
"""

import ctypes
from collections import deque
from dataclasses import dataclass
from itertools import repeat
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import pypdfium2 as pdfium  # type: ignore[import-untyped]
import pypdfium2.raw as pdfium_c  # type: ignore[import-untyped]

_LINE_FEED = 0x0A
_PARAGRAPH_PITCH = 1.3  # of the page's usual distance between lines
_SIZE_CHANGE = 1.15
_INDENT = (0.6, 5.0)  # in line heights

Boxes = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint32]
Indices = npt.NDArray[np.int64]
Handle = Any  # of a text page, as `from_param` gives it


def _function(function: Any, result: Any) -> Any:  # noqa: ANN401  (ctypes makes its types)
    """A function of PDFium that takes its arguments as they are: half the time of a call.

    The binding converts and checks every argument, which takes longer than what is called once a
    character. Arguments must be what `from_param` or `byref` give, or ints for C ints.
    """
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return ctypes.PYFUNCTYPE(result)(address)


_get_text = _function(pdfium_c.FPDFText_GetText, ctypes.c_int)
_get_unicode = _function(pdfium_c.FPDFText_GetUnicode, ctypes.c_uint)
_get_font_size = _function(pdfium_c.FPDFText_GetFontSize, ctypes.c_double)
_get_loose_box = _function(pdfium_c.FPDFText_GetLooseCharBox, None)

# Boxes are read in blocks into one place, so that the pointers into it are made once.
_BLOCK = 4096
_BLOCK_BUFFER = (pdfium_c.FS_RECTF * _BLOCK)()
_BLOCK_RECTS = np.frombuffer(_BLOCK_BUFFER, np.float32).reshape(_BLOCK, 4)
_BLOCK_POINTERS = [
    ctypes.byref(_BLOCK_BUFFER, ctypes.sizeof(pdfium_c.FS_RECTF) * at) for at in range(_BLOCK)
]


# What becomes of a code; what comes after _HYPHEN is left out.
_PLAIN, _BREAK, _HYPHEN, _CONTROL, _HIGH, _LOW = range(6)


def _code_kinds() -> npt.NDArray[np.uint8]:
    kinds = np.full(0x10001, _PLAIN, np.uint8)
    kinds[:0x20] = kinds[0x7F] = _CONTROL
    kinds[ord("\t")] = _PLAIN
    kinds[_LINE_FEED] = _BREAK
    kinds[[0x02, 0xFFFE]] = _HYPHEN
    kinds[0xD800:0xDC00], kinds[0xDC00:0xE000] = _HIGH, _LOW
    return kinds


_KINDS = _code_kinds()  # the last one stands for all codes beyond 16 bits


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
        count = max(pdfium_c.FPDFText_CountChars(textpage), 0)
        handle = ctypes.c_void_p.from_param(ctypes.cast(textpage.raw, ctypes.c_void_p).value)
        chars, origins = _decode(_codes(handle, count))
        rects = _rects(handle, count)
        sizes = _font_sizes(handle, chars, origins)
    finally:
        textpage.close()
    sides = _to_shown(rects, page)
    chars, origins = _mark_paragraphs(chars, origins, sides, sizes)
    text = chars.astype("<u4").tobytes().decode("utf-32-le", "replace")
    first = len(text) - len(text.lstrip())
    last = len(text.rstrip())
    boxes = np.where(
        _placed(origins, sides)[first:last],
        sides.take(origins[first:last], axis=1, mode="wrap"),
        np.float32(np.nan),
    )
    width, height = page.get_size()
    has_objects = pdfium_c.FPDFPage_CountObjects(page) > 0
    return PageText(text[first:last], boxes.T, width, height, has_objects)


def _codes(handle: Handle, count: int) -> Codes:
    """Code of each character, in UTF-16 or whole."""
    buffer = np.zeros(count + 1, np.uint16)
    written = _get_text(handle, 0, count, ctypes.c_void_p(buffer.ctypes.data))
    if written == count + 1:
        codes = buffer[:count].astype(np.uint32)
        for at in np.flatnonzero(codes == 0xFFFE).tolist():  # a line-end hyphen, or a NUL
            codes[at] = _get_unicode(handle, at)
        return codes
    # Characters without a code are left out there, which shifts the others.
    return np.fromiter(map(_get_unicode, repeat(handle), range(count)), np.uint32, count)


def _rects(handle: Handle, count: int) -> Boxes:
    """Boxes of all characters: left, top, right, bottom, in the page's own space."""
    rects = np.empty((count, 4), np.float32)
    for start in range(0, count, _BLOCK):
        indices = range(start, min(start + _BLOCK, count))
        _BLOCK_RECTS[:] = 0
        deque(map(_get_loose_box, repeat(handle), indices, _BLOCK_POINTERS), maxlen=0)
        rects[start : start + _BLOCK] = _BLOCK_RECTS[: len(indices)]
    return rects


def _decode(codes: Codes) -> tuple[Codes, Indices]:
    """Code points, and for each the index that it came from (-1: a line break)."""
    kinds = _KINDS[np.minimum(codes, len(_KINDS) - 1)]
    pairs = np.flatnonzero((kinds[:-1] == _HIGH) & (kinds[1:] == _LOW))
    codes[pairs] = 0x10000 + ((codes[pairs] & 0x3FF) << 10) + (codes[pairs + 1] & 0x3FF)
    kinds[pairs] = _PLAIN
    kept = np.flatnonzero(kinds <= _HYPHEN)
    chars, kinds = codes[kept], kinds[kept]
    origins = np.where(kinds == _BREAK, -1, kept)
    hyphens = np.flatnonzero(kinds == _HYPHEN)
    chars[hyphens] = ord("-")
    return np.insert(chars, hyphens + 1, _LINE_FEED), np.insert(origins, hyphens + 1, -1)


def _to_shown(rects: Boxes, page: pdfium.PdfPage) -> Boxes:
    """Boxes from the page's space (origin bottom left) to the page as shown, turned by /Rotate.

    Returns:
        float32 [4, characters]: x0, y0, x1, y1.
    """
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
    return np.stack(sides)


def _font_sizes(handle: Handle, chars: Codes, origins: Indices) -> npt.NDArray[np.float64]:
    """Font size in the middle of each line, in the font's own measure; 0: no character there."""
    bounds = np.concatenate(([-1], np.flatnonzero(chars == _LINE_FEED), [len(chars)]))
    middles = np.append(origins, -1)[(bounds[:-1] + bounds[1:]) // 2].tolist()
    return np.array([_get_font_size(handle, at) if at >= 0 else 0.0 for at in middles])


def _placed(origins: Indices, sides: Boxes) -> npt.NDArray[np.bool_]:
    """Whether each character has a box."""
    return np.append(sides[2] > sides[0], False).take(origins)


def _mark_paragraphs(
    chars: Codes, origins: Indices, sides: Boxes, font_sizes: npt.NDArray[np.float64]
) -> tuple[Codes, Indices]:
    """Double the line breaks that end a paragraph."""
    breaks = np.flatnonzero(chars == _LINE_FEED)
    ends = _paragraph_ends(_measure_lines(chars, origins, sides, font_sizes))
    doubled = breaks[ends & (chars[breaks - 1] != ord("-"))] + 1
    return np.insert(chars, doubled, _LINE_FEED), np.insert(origins, doubled, -1)


@dataclass(frozen=True, slots=True, eq=False)
class _Lines:
    """Where most of each line's characters are; a footnote mark does not count.

    All are float64 [lines], NaN for a line without boxes.
    """

    left: npt.NDArray[np.float64]
    top: npt.NDArray[np.float64]
    height: npt.NDArray[np.float64]
    font_size: npt.NDArray[np.float64]


def _measure_lines(
    chars: Codes, origins: Indices, sides: Boxes, font_sizes: npt.NDArray[np.float64]
) -> _Lines:
    placed = np.flatnonzero(_placed(origins, sides))
    numbers = np.cumsum(chars == _LINE_FEED)[placed]
    counts = np.bincount(numbers, minlength=len(font_sizes))
    filled = np.flatnonzero(counts)
    starts = (np.cumsum(counts) - counts)[filled]
    middles = starts + counts[filled] // 2
    left, top, height = np.full((3, len(font_sizes)), np.nan)
    if len(filled):
        x0, y0, _, y1 = sides.take(origins[placed], axis=1)
        heights = y1 - y0
        left[filled] = np.minimum.reduceat(x0, starts)
        top[filled] = y0[np.lexsort((y0, numbers))[middles]]
        height[filled] = heights[np.lexsort((heights, numbers))[middles]]
    return _Lines(left, top, height, font_sizes)


def _paragraph_ends(lines: _Lines) -> npt.NDArray[np.bool_]:
    """Whether a paragraph ends with each line but the last."""
    pitch = np.diff(lines.top)
    down = pitch > 0  # not so at the next column, or at a line without a place
    usual = median(pitch[down].tolist()) if down.any() else np.inf
    # Another font alone has other heights, a scaled one the same size: both must differ.
    resized = _differ(lines.height) & _differ(lines.font_size)
    left, height = lines.left, lines.height[1:]
    after = np.append(left[2:], left[-2:-1])
    indented = _is_indent(left[1:] - left[:-1], height) & _is_indent(left[1:] - after, height)
    return down & ((pitch > _PARAGRAPH_PITCH * usual) | resized | indented)


def _differ(values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Whether each value and the next are far apart."""
    one, other = values[:-1], values[1:]
    return np.maximum(one, other) > _SIZE_CHANGE * np.minimum(one, other)


def _is_indent(
    shift: npt.NDArray[np.float64], height: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    return (_INDENT[0] * height < shift) & (shift < _INDENT[1] * height)
