"""The form in which texts are searched and quotes compared, with the way back.

NFKC; invisible characters out; quotes and dashes folded to ASCII; any run of white space is one
space; words that a line end had cut are joined. Case stays.
"""

import re
import unicodedata
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt


# Characters that may combine with what stands before them: marks, Hangul vowels and finals (also
# as compatibility and half-width forms), half-width voicing marks.
def _mark_ranges() -> str:
    marks = [
        code
        for block in (range(0x300, 0x1F000), range(0xE0100, 0xE01F0))
        for code in block
        if unicodedata.category(chr(code))[0] == "M"
    ]
    runs = groupby(enumerate(marks), key=lambda pair: pair[1] - pair[0])
    spans = [[code for _, code in run] for _, run in runs]
    return "".join(f"{chr(span[0])}-{chr(span[-1])}" for span in spans)


_COMBINING = f"{_mark_ranges()}\u1160-\u11ff\ud7b0-\ud7fb\u3131-\u318e\uffa0-\uffdc\uff9e\uff9f"
_INVISIBLE = "\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff"
# Scripts without spaces, whose lines break inside words.
_UNSPACED = "\u3001-\u3020\u3041-\u3096\u30a1-\u30fa\u30fc-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_UNSPACED += "\uff01-\uff60\uff66-\uff9d\U00020000-\U0003134f"
_HYPHENS = "\u00ad\u2010\u2011\ufe63\uff0d\ufffe-"

_SPECIAL = re.compile(
    rf"""
    (?=[^\x20-\x7e]|.[^\x20-\x7e]|[ ]{{2}}|-[ \t])  # most places are plain: leave them fast
    (?:
    (?P<cut>(?<=\w)[{_HYPHENS}][ \t]*\r?\n[ \t]*(?=\w)(?![{_COMBINING}]))
  | (?P<flow>(?<=[{_UNSPACED}])[ \t]*\r?\n[ \t]*(?=[{_UNSPACED}]))
  | (?P<space>[{_INVISIBLE}]*(?:[^\S ]|[ ](?=[\s{_INVISIBLE}]))[\s{_INVISIBLE}]*
             |[{_INVISIBLE}]+[ ][\s{_INVISIBLE}]*)
  | (?P<gone>(?:(?![{_COMBINING}])[{_INVISIBLE}])+)
  | (?P<letter>[^\x00-\x7f](?:[{_INVISIBLE}]*[{_COMBINING}])*
              |[\x00-\x7f](?:[{_INVISIBLE}]*[{_COMBINING}])+)
    )
    """,
    re.VERBOSE | re.DOTALL,
)
_INVISIBLE_RUN = re.compile(f"[{_INVISIBLE}]+")
_COMPOUND_BEFORE = re.compile(r"\w-\w+\Z")
_COMPOUND_AFTER = re.compile(r"\w+-\w")
_INNER_HYPHEN = re.compile(r"(?<=\w)-(?=\w)")
_FOLDS = str.maketrans(
    dict.fromkeys("‘’‚‛′ʼ", "'")
    | dict.fromkeys("“”„‟″«»", '"')
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufffe", "-")
)


@dataclass(frozen=True, slots=True, eq=False)
class Normalised:
    """A text in search form.

    Attributes:
        offsets: int32 [len(text)], where each character's original begins.
        ends: int32 [len(text)], where it ends; a ligature's letters share one original.
        joints: Indices in `text` before which a line-end hyphen was dropped. It may have been
            a real one: `find` allows for both.
    """

    text: str
    offsets: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int32]
    joints: frozenset[int]

    def original_range(self, start: int, end: int) -> tuple[int, int]:
        """Range of original characters behind `text[start:end]`.

        Raises:
            ValueError: The range is empty or outside the text.
        """
        if not 0 <= start < end <= len(self.text):
            raise ValueError(f"no range {start}:{end} in {len(self.text)} characters")
        return int(self.offsets[start]), int(self.ends[end - 1])

    def find(self, needle: str) -> tuple[int, int] | None:
        """Original range of the first place that reads as `needle`, which may be in any form."""
        return next(self.find_all(needle), None)

    def find_all(self, needle: str) -> Iterator[tuple[int, int]]:
        """Original ranges of all places that read as `needle`, without overlap.

        A hyphen inside a word of the needle also matches a joint.
        """
        wanted = normalise(needle).text.strip()
        if not wanted:
            return
        parts = [re.escape(part) for part in _INNER_HYPHEN.split(wanted)]
        for match in re.finditer("(-?)".join(parts), self.text):
            gaps = range(1, len(parts))
            if all(match[gap] or match.start(gap) in self.joints for gap in gaps):
                yield self.original_range(*match.span())


def normalise(text: str) -> Normalised:
    """Bring a text into search form; doing so twice changes nothing more.

    A hyphen at a line's end is dropped when the next line goes on in lower case ("con-⏎trol"),
    unless the word has other hyphens ("state-⏎of-the-art"); otherwise it stays and the line
    break goes.
    """
    pieces: list[str] = []
    offsets, ends = array("i"), array("i")
    joints: set[int] = set()
    cursor = 0
    for match in _SPECIAL.finditer(text):
        start, end = match.span()
        if start > cursor:
            pieces.append(text[cursor:start])
            offsets.extend(range(cursor, start))
            ends.extend(range(cursor + 1, start + 1))
        piece = _replacement(match)
        if piece:
            pieces.append(piece)
            offsets.extend([start] * len(piece))
            ends.extend([end] * len(piece))
        elif match.lastgroup == "cut":
            joints.add(len(offsets))
        cursor = end
    pieces.append(text[cursor:])
    offsets.extend(range(cursor, len(text)))
    ends.extend(range(cursor + 1, len(text) + 1))
    return Normalised(
        "".join(pieces),
        np.array(offsets, dtype=np.int32),
        np.array(ends, dtype=np.int32),
        frozenset(joints),
    )


def _replacement(match: re.Match[str]) -> str:
    match match.lastgroup:
        case "letter":
            return _letter(match.group())
        case "space":
            return " "
        case "cut":
            return "-" if _keeps_hyphen(match) else ""
        case _:
            return ""


def _keeps_hyphen(match: re.Match[str]) -> bool:
    if match.group()[0] == "\u00ad":
        return False
    text, start, end = match.string, match.start(), match.end()
    if not text[end].islower():
        return True
    before = text[max(start - 64, 0) : start]
    return bool(_COMPOUND_BEFORE.search(before) or _COMPOUND_AFTER.match(text, end, end + 64))


def _letter(segment: str) -> str:
    plain = _INVISIBLE_RUN.sub("", segment).translate(_FOLDS)
    folded = unicodedata.normalize("NFKC", plain).translate(_FOLDS)
    if any(char.isspace() for char in folded):  # "´" is a space and an accent in NFKC
        return unicodedata.normalize("NFC", plain)
    return folded
