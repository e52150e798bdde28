"""What may be quoted, found character by character: the oracle of the tests of quotes."""

import re
import unicodedata
from collections.abc import Iterator
from itertools import pairwise, takewhile

UNSPACED = re.compile("[\u0e00-\u0fff\u1780-\u17ff\u2e80-\ua4cf\uac00-\ud7af\uf900-\ufaff]")
PIECE = re.compile("[^\\s|—―\u200b]+")
LINE = re.compile("[^\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\t]+")
BAR = re.compile(r"(?<!\S)\|(?!\S)")


def opens(character: str) -> bool:
    return unicodedata.category(character) in {"Ps", "Pi"} or character in "\"'*_`"


def closes(character: str) -> bool:
    return unicodedata.category(character) in {"Pe", "Pf"} or character in "\"'*_`.,;:!?…"


def is_joined(text: str, at: int) -> bool:
    """Whether a boundary would part a character from what belongs to it."""
    beside = text[max(at - 1, 0) : at + 1]
    is_mark = at < len(text) and unicodedata.category(text[at]).startswith("M")
    return "\u200d" in beside or is_mark


def boundaries(text: str) -> tuple[set[int], set[int]]:
    """Where quotes may start and end."""
    starts, ends = set(), set()
    for piece in PIECE.finditer(text):
        leading = len([*takewhile(opens, piece[0])])
        trailing = len([*takewhile(closes, piece[0][::-1])])
        starts |= {piece.start() + ahead for ahead in range(leading + 1)} & {
            *range(piece.start(), piece.end())
        }
        ends |= {piece.end() - back for back in range(trailing + 1)} & {
            *range(piece.start() + 1, piece.end() + 1)
        }
    for at in range(1, len(text)):
        left, right = text[at - 1], text[at]
        if right.isalnum() and (UNSPACED.match(left) or UNSPACED.match(right)):
            starts.add(at)
        if UNSPACED.match(left) or (left.isalnum() and UNSPACED.match(right)):
            ends.add(at)
    if text[:1].isalnum() and UNSPACED.match(text):
        starts.add(0)
    if UNSPACED.match(text[-1:]):
        ends.add(len(text))
    return (
        {at for at in starts if not is_joined(text, at)},
        {at for at in ends if not is_joined(text, at)},
    )


def cells(text: str) -> set[tuple[int, int]]:
    """Whole lines and table cells; the last line may go on where nobody sees it."""
    found = set()
    for line in LINE.finditer(text):
        cuts = [0, *(bar.start() for bar in BAR.finditer(line[0])), len(line[0])]
        for number, (cut, end) in enumerate(pairwise(cuts)):
            start = cut + (number > 0)
            cell = line[0][start:end]
            shown = re.sub("[\\s|—―\u200b]+$", "", re.sub("^[\\s|—―\u200b]+", "", cell))
            at = line.start() + start + cell.find(shown)
            if any(map(str.isalnum, shown)):
                found.add((at, at + len(shown)))
    return {(start, end) for start, end in found if end < len(text)}


def num_words(quote: str) -> int:
    return sum(any(map(str.isalnum, piece[0])) for piece in PIECE.finditer(quote))


def is_enough(quote: str, min_words: int) -> bool:
    if not any(map(str.isalnum, quote)):
        return False
    letters = sum(bool(UNSPACED.match(c)) and c.isalnum() for c in quote)
    return num_words(quote) >= min_words or letters >= 10


def quotes(text: str, min_words: int, max_characters: int) -> Iterator[tuple[int, int]]:
    """All that may be quoted of a source that is shown from its first character on."""
    starts, ends = boundaries(text)
    whole = cells(text)
    for start in starts:
        for end in ends:
            if start < end <= start + max_characters and (
                (start, end) in whole or is_enough(text[start:end], min_words)
            ):
                yield start, end
