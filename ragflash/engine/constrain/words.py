"""Where words, cells and headings of a text begin and end, for all of it at once.

A piece is what stands between white space, bars and em dashes. A quote may begin at a piece or
behind its opening punctuation, and end behind a piece or before some of its closing punctuation:
"3.14", "don't" and "well-known" are never cut. Scripts without spaces are cut between any two
characters. No cut is before a combining mark or beside a joiner.
"""

import unicodedata
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ragflash.engine.constrain.spelling import Places

Flags = NDArray[np.bool_]
Kinds = NDArray[np.uint16]

UNSPACED = (
    (0x0E00, 0x0FFF),
    (0x1780, 0x17FF),
    (0x2E80, 0xA4CF),
    (0xAC00, 0xD7AF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)
MIN_UNSPACED_CHARACTERS = 10

_SPACE, _PARTS, _LETTER, _UNSPACED, _OPENS, _CLOSES, _MARK, _JOINER, _BREAK = (
    1 << bit for bit in range(9)
)
_SEPARATORS = "|—―\u200b"
_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\t"
_CLOSING = ".,;:!?…"
_EITHER = "\"'*_`"
_ZERO_WIDTH_JOINER = "\u200d"


@dataclass(frozen=True, slots=True)
class Words:
    """Character positions in a text; a position before an end is that of the character behind it.

    Attributes:
        is_start: Whether a quote may begin with each character.
        is_end: Whether a quote may end before each character.
        filled: Of what is no white space, ascending.
        letters: Of letters and digits, ascending.
        first: Of the first letter or digit of each piece that has one.
        last: Of the last one.
        unspaced: Of letters of scripts without spaces.
        cell_start: Where cells, headings and other whole lines with a letter or digit begin.
        cell_end: Where each of them ends.
    """

    is_start: Flags
    is_end: Flags
    filled: Places
    letters: Places
    first: Places
    last: Places
    unspaced: Places
    cell_start: Places
    cell_end: Places

    @classmethod
    def of(cls, text: str) -> "Words":
        """Look at a text that ends with a line break."""
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        kinds = _kinds_of(codes)
        is_letter = _has(kinds, _LETTER)
        letters = np.flatnonzero(is_letter)
        piece = np.cumsum(_has(kinds, _PARTS))[letters]
        is_first = np.append(True, piece[1:] != piece[:-1])[: len(piece)]
        is_last = np.append(piece[1:] != piece[:-1], True)[: len(piece)]
        cell_start, cell_end = _cells(kinds, np.flatnonzero(codes == ord("|")), letters)
        return cls(
            is_start=_starts(kinds),
            is_end=_ends(kinds),
            filled=np.flatnonzero(~_has(kinds, _SPACE)),
            letters=letters,
            first=letters[is_first],
            last=letters[is_last],
            unspaced=np.flatnonzero(is_letter & _has(kinds, _UNSPACED)),
            cell_start=cell_start,
            cell_end=cell_end,
        )

    def soonest_ends(self, starts: Places, min_words: int) -> Places:
        """For each start, the first position by which enough is quoted.

        Enough are so many pieces with a letter or digit, one at least, or ten letters of scripts
        without spaces. A position behind the text says that there is not enough.
        """
        never = len(self.is_start) + 1
        num_before = np.searchsorted(self.last, starts)
        by_words = np.maximum(
            _at(self.first, num_before + max(min_words, 1) - 1, never),
            _at(self.letters, np.searchsorted(self.letters, starts), never),
        )
        num_before = np.searchsorted(self.unspaced, starts)
        by_letters = _at(self.unspaced, num_before + MIN_UNSPACED_CHARACTERS - 1, never)
        return np.minimum(by_words, by_letters) + 1


def _at(positions: Places, index: Places, otherwise: int) -> Places:
    padded = np.append(positions, otherwise)
    taken: Places = padded[np.minimum(index, len(positions))]
    return taken


def _has(kinds: Kinds, kind: int) -> Flags:
    has: Flags = (kinds & kind) != 0
    return has


def _starts(kinds: Kinds) -> Flags:
    """Behind nothing of the piece but opening punctuation, or beside a script without spaces."""
    parts = _has(kinds, _PARTS)
    stops = np.where(_has(kinds, _OPENS), -1, np.arange(len(kinds)))
    before = np.append(-1, np.maximum.accumulate(stops)[:-1])  # last that opens nothing
    is_start = ~parts & ((before < 0) | parts[before])
    beside_unspaced = _has(kinds, _UNSPACED) | _has(_moved(kinds), _UNSPACED)
    is_start |= _has(kinds, _LETTER) & beside_unspaced
    may_start: Flags = is_start & ~_is_joined(kinds)
    return may_start


def _ends(kinds: Kinds) -> Flags:
    """Before nothing of the piece but closing punctuation, or beside a script without spaces."""
    parts, size = _has(kinds, _PARTS), len(kinds)
    stops = np.where(_has(kinds, _CLOSES), size - 1, np.arange(size))
    behind = np.minimum.accumulate(stops[::-1])[::-1]  # next that closes nothing
    left = _moved(kinds)
    is_end = parts[behind] & ~_has(left, _PARTS)
    is_end |= _has(left, _UNSPACED) | (_has(left, _LETTER) & _has(kinds, _UNSPACED))
    may_end: Flags = is_end & ~_is_joined(kinds)
    may_end[0] = False
    return may_end


def _is_joined(kinds: Kinds) -> Flags:
    return _has(kinds, _MARK | _JOINER) | _has(_moved(kinds), _JOINER)


def _moved(kinds: Kinds) -> Kinds:
    """Kinds of the character to the left of each; the first has a line break there."""
    return np.append(np.uint16(_SPACE | _PARTS | _BREAK), kinds[:-1])


def _cells(kinds: Kinds, bars: Places, letters: Places) -> tuple[Places, Places]:
    is_apart = _has(_moved(kinds)[bars], _SPACE) & _has(kinds[bars + 1], _SPACE)
    breaks = np.union1d(np.flatnonzero(_has(kinds, _BREAK)), bars[is_apart])
    edges = np.append(-1, breaks)
    filled = np.flatnonzero(~_has(kinds, _PARTS))
    start = _at(filled, np.searchsorted(filled, edges[:-1]), len(kinds))
    end = np.append(filled, 0)[np.searchsorted(filled, edges[1:]) - 1] + 1
    num_letters = np.searchsorted(letters, edges[1:]) - np.searchsorted(letters, edges[:-1])
    is_cell = (num_letters > 0) & (start < end)
    return start[is_cell], end[is_cell]


def _kinds_of(codes: NDArray[np.uint32]) -> Kinds:
    is_used = np.zeros(0x110000, dtype=np.bool_)
    is_used[codes] = True
    table = np.zeros(0x110000, dtype=np.uint16)
    for code in np.flatnonzero(is_used).tolist():
        table[code] = _kind(chr(code))
    kinds: Kinds = table[codes]
    return kinds


@cache
def _kind(character: str) -> int:
    category, code = unicodedata.category(character), ord(character)
    tests = {
        _SPACE: character.isspace(),
        _PARTS: character.isspace() or character in _SEPARATORS,
        _LETTER: character.isalnum(),
        _UNSPACED: any(first <= code <= last for first, last in UNSPACED),
        _OPENS: category in {"Ps", "Pi"} or character in _EITHER,
        _CLOSES: category in {"Pe", "Pf"} or character in _CLOSING or character in _EITHER,
        _MARK: category.startswith("M"),
        _JOINER: character == _ZERO_WIDTH_JOINER,
        _BREAK: character in _BREAKS,
    }
    return sum(kind for kind, holds in tests.items() if holds)
