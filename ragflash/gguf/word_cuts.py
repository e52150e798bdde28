"""Cuts of a long text that its tokens do not show, so that several processors segment it."""

import re
from collections.abc import Iterable

PIECE_CHARACTERS = 16_384

# Between two words of ASCII letters every known pre-tokenizer cuts in front of the blank.
_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")


def may_cut(atoms: Iterable[str]) -> bool:
    """Tell whether no token that is taken whole, whatever the words are, has a cut inside."""
    return not any(_CUT.search(atom) for atom in atoms)


def cut_between_words(text: str, piece_characters: int = PIECE_CHARACTERS) -> list[str]:
    """Cut a text into pieces of at least so many characters, the last one aside."""
    pieces, start = [], 0
    while cut := _CUT.search(text, start + piece_characters):
        pieces.append(text[start : cut.start()])
        start = cut.start()
    pieces.append(text[start:])
    return pieces
