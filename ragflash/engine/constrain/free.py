"""Free text up to a marker, a number of tokens, or a quote."""

from dataclasses import dataclass, replace

import numpy as np

from ragflash.engine.constrain.marker import Marker
from ragflash.engine.constrain.mask import TokenMask


@dataclass(frozen=True, slots=True)
class FreeProgram:
    """A stretch of free text.

    A token that would complete a marker before its own last byte is banned, so that what follows
    the marker begins with a token of its own.

    Attributes:
        until: Ends the text.
        opening: Ends it too, before a quote; banned where no quote may follow.
        num_quote_parts: How many parts make up quotes and what is between them: they follow the
            opening, and are left out behind anything else; 0 where no quote may follow.
        max_tokens: 0 is no limit.
    """

    until: Marker
    opening: Marker
    num_quote_parts: int = 0
    max_tokens: int = 0

    def banned(self, matched: tuple[int, int]) -> TokenMask:
        """Return all tokens but those that may not follow so many bytes of each marker."""
        until, opening = matched
        may_open = self.num_quote_parts > 0
        of_opening = self.opening.overshooting if may_open else self.opening.completing
        ids = np.union1d(self.until.overshooting(until), of_opening(opening))
        return TokenMask(ids, is_allow=False)


@dataclass(frozen=True, slots=True)
class FreeState:
    """How many bytes of either marker the text ends with, and its number of tokens."""

    program: FreeProgram
    matched: tuple[int, int] = (0, 0)
    num_tokens: int = 0

    @property
    def can_end(self) -> bool:
        """Free text ends at a marker or its limit, or with the output."""
        return self.is_done

    @property
    def is_done(self) -> bool:
        """Whether a marker or the limit is reached."""
        program = self.program
        return (
            program.until.is_found(self.matched[0])
            or program.opening.is_found(self.matched[1])
            or 0 < program.max_tokens <= self.num_tokens
        )

    @property
    def num_skipped(self) -> int:
        """Without an opening no quote follows."""
        opened = self.program.opening.is_found(self.matched[1])
        return 0 if opened else self.program.num_quote_parts

    def mask(self) -> TokenMask:
        """Return all tokens but those that overshoot a marker."""
        return self.program.banned(self.matched)

    def permits(self, token_id: int) -> bool:
        """Tell whether `mask` has a token."""
        return self.mask().permits(token_id)

    def forced(self) -> tuple[int, ...]:
        """Nothing is forced."""
        return ()

    def step(self, token_id: int) -> "FreeState":
        """Add a token."""
        program, (until, opening) = self.program, self.matched
        matched = program.until.scan(until, token_id), program.opening.scan(opening, token_id)
        return replace(self, matched=matched, num_tokens=self.num_tokens + 1)
