"""Free text up to a marker or a number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ragflash.engine.constrain.mask import ANYTHING, TokenMask


class FreeProgram:
    """Finds a marker in the bytes of tokens (Knuth, Morris, Pratt 1977).

    A token that would complete the marker before its own last byte is banned, so that what follows
    the marker begins with a token of its own.
    """

    def __init__(self, until: bytes, max_tokens: int, token_bytes: Sequence[bytes]) -> None:
        self.until = until
        self.max_tokens = max_tokens
        self.token_bytes = token_bytes
        self._borders = _borders(until)
        self._masks: dict[int, TokenMask] = {}

    def scan(self, matched: int, data: bytes) -> int:
        """Return how many bytes of the marker are matched after `data`; stops at a whole marker."""
        for byte in data:
            if matched == len(self.until):
                break
            while matched and self.until[matched] != byte:
                matched = self._borders[matched - 1]
            matched += self.until[matched] == byte
        return matched

    def mask(self, matched: int) -> TokenMask:
        """Ban the tokens that overshoot the marker when `matched` bytes of it are there."""
        if not self.until:
            return ANYTHING
        if matched not in self._masks:
            rests = []
            at = matched
            while at:
                rests.append(self.until[at:])
                at = self._borders[at - 1]
            banned = [
                token_id
                for token_id, data in enumerate(self.token_bytes)
                if self.until in data[:-1]
                or any(len(data) > len(rest) and data.startswith(rest) for rest in rests)
            ]
            self._masks[matched] = TokenMask(np.array(banned, dtype=np.int64), is_allow=False)
        return self._masks[matched]


def _borders(pattern: bytes) -> list[int]:
    borders = [0] * len(pattern)
    matched = 0
    for at in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[at]:
            matched = borders[matched - 1]
        matched += pattern[matched] == pattern[at]
        borders[at] = matched
    return borders


@dataclass(frozen=True, slots=True)
class FreeState:
    """Bytes of the marker that the text ends with, and its number of tokens."""

    program: FreeProgram
    matched: int = 0
    num_tokens: int = 0

    @property
    def can_end(self) -> bool:
        """Free text ends at its marker or limit, or with the output."""
        return self.is_done

    @property
    def is_done(self) -> bool:
        """Whether the marker or the limit is reached."""
        program = self.program
        at_marker = bool(program.until) and self.matched == len(program.until)
        return at_marker or (0 < program.max_tokens <= self.num_tokens)

    def mask(self) -> TokenMask:
        """Return all tokens but those that overshoot the marker."""
        return self.program.mask(self.matched)

    def step(self, token_id: int) -> "FreeState":
        """Add a token."""
        program = self.program
        matched = program.scan(self.matched, program.token_bytes[token_id]) if program.until else 0
        return FreeState(program, matched, self.num_tokens + 1)
