"""Finds a marker in the bytes of tokens, and the tokens that must not write it."""

from collections.abc import Sequence

import numpy as np

from ragflash.engine.constrain.mask import Ids


class Marker:
    """A text that ends another (Knuth, Morris, Pratt 1977); an empty one is never found.

    Shared by all requests with that marker; what it remembers is the same for all of them.
    """

    def __init__(self, text: bytes, token_bytes: Sequence[bytes]) -> None:
        self._text = text
        self._token_bytes = token_bytes
        self._borders = _borders(text)
        self._overshooting: dict[int, Ids] = {}
        self._completing: dict[int, Ids] = {}

    def scan(self, matched: int, token_id: int) -> int:
        """Return how many bytes of the text are matched after a token; stops at a whole text."""
        for byte in self._token_bytes[token_id]:
            if matched == len(self._text):
                break
            while matched and self._text[matched] != byte:
                matched = self._borders[matched - 1]
            matched += self._text[matched] == byte
        return matched

    def is_found(self, matched: int) -> bool:
        """Whether all of the text is matched."""
        return 0 < matched == len(self._text)

    def overshooting(self, matched: int) -> Ids:
        """Return the tokens that complete the text before their own last byte."""
        if matched not in self._overshooting:
            self._overshooting[matched] = self._find(matched, left_out=1)
        return self._overshooting[matched]

    def completing(self, matched: int) -> Ids:
        """Return the tokens that complete the text."""
        if matched not in self._completing:
            self._completing[matched] = self._find(matched, left_out=0)
        return self._completing[matched]

    def _find(self, matched: int, *, left_out: int) -> Ids:
        """Return the tokens that complete the text without so many of their own last bytes."""
        rests = []
        while matched:
            rests.append(self._text[matched:])
            matched = self._borders[matched - 1]
        return np.array(
            [
                token_id
                for token_id, data in enumerate(self._token_bytes)
                if self._text
                and (
                    self._text in data[: len(data) - left_out]
                    or any(
                        len(data) >= len(rest) + left_out and data.startswith(rest)
                        for rest in rests
                    )
                )
            ],
            dtype=np.int64,
        )


def _borders(pattern: bytes) -> list[int]:
    borders = [0] * len(pattern)
    matched = 0
    for at in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[at]:
            matched = borders[matched - 1]
        matched += pattern[matched] == pattern[at]
        borders[at] = matched
    return borders
