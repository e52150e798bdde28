"""Quotes that cannot be invented: the output only follows the prompt's own document tokens.

`QuoteProgram` lays the document tokens of a prompt out in one array, runs separated by a sentinel.
A state is the array of places that the quote may be read to; the next token must be the token at
one of them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragflash.engine.constrain.mask import TokenMask, allow

SENTINEL = -1

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SourceQuote:
    """What a quote copies.

    Attributes:
        num_tokens: Of the output.
        lead: Characters of the output's first token that are not part of the source range (white
            space).
        source: Index into the prompt's `source_ids`.
        source_start: Character offset in the source.
        source_end: Exclusive.
    """

    num_tokens: int
    lead: int
    source: int
    source_start: int
    source_end: int


@dataclass(frozen=True, slots=True)
class QuoteProgram:
    """Arrays over `D` places, a place being a document token or the sentinel after a run.

    Attributes:
        tokens: Token id at each place; `SENTINEL` after a run.
        first_alternative: Token that may stand for a quote's first one, without its leading white
            space, or `SENTINEL`.
        source: Source index of each place.
        start_char: Source offset that a quote starting at a place starts at.
        end_char: Source offset that a quote whose last token is at a place ends at.
        lead: Characters of the token at a place before `start_char`.
        starts: Places where a quote may start, ascending.
        is_end: Whether a quote may end before a place, i.e. with the token one place back.
        is_char_end: Whether a character ends before a place.
        last_end: For each start, the place before which a quote from there ends at the latest.
        min_tokens: A quote does not end sooner, unless at its `last_end`.
    """

    tokens: Places
    first_alternative: Places
    source: Places
    start_char: Places
    end_char: Places
    lead: Places
    starts: Places
    is_end: NDArray[np.bool_]
    is_char_end: NDArray[np.bool_]
    last_end: Places
    min_tokens: int

    def start(self) -> "QuoteState":
        """Return the state before the first token."""
        return QuoteState(self, self.starts, 0, SENTINEL)


@dataclass(frozen=True, slots=True)
class QuoteState:
    """The quote so far is the `num_tokens` tokens before each of `live`."""

    program: QuoteProgram
    live: Places
    num_tokens: int
    first_token: int

    @property
    def can_end(self) -> bool:
        """Whether a permitted end is reached."""
        return self.num_tokens > 0 and bool(self._may_end().any())

    @property
    def is_done(self) -> bool:
        """Whether the source or the limit leaves no continuation."""
        return not self._goes_on().any()

    def mask(self) -> TokenMask:
        """Return the tokens that some occurrence of the quote continues with."""
        going = self.live[self._goes_on()]
        token_ids = self.program.tokens[going]
        if self.num_tokens == 0:
            alternatives = self.program.first_alternative[going]
            token_ids = np.concatenate([token_ids, alternatives[alternatives != SENTINEL]])
        return allow(token_ids)

    def step(self, token_id: int) -> "QuoteState":
        """Keep the occurrences that continue with a token."""
        program = self.program
        going = self.live[self._goes_on()]
        matches = program.tokens[going] == token_id
        if self.num_tokens == 0:
            matches |= program.first_alternative[going] == token_id
        first = token_id if self.num_tokens == 0 else self.first_token
        return QuoteState(program, going[matches] + 1, self.num_tokens + 1, first)

    def quote(self) -> SourceQuote | None:
        """Return what is quoted, cut back to whole characters; `None` when that is nothing."""
        program = self.program
        may_end = self.live[self._may_end()]
        at = int(may_end[0] if len(may_end) else self.live[0])
        start = at - self.num_tokens
        while at > start and not program.is_char_end[at]:
            at -= 1
        if at == start:
            return None
        is_alternative = program.tokens[start] != self.first_token
        return SourceQuote(
            num_tokens=at - start,
            lead=0 if is_alternative else int(program.lead[start]),
            source=int(program.source[start]),
            source_start=int(program.start_char[start]),
            source_end=int(program.end_char[at - 1]),
        )

    def _goes_on(self) -> NDArray[np.bool_]:
        return self.live < self._last_end()

    def _may_end(self) -> NDArray[np.bool_]:
        may_end: NDArray[np.bool_] = self.live == self._last_end()
        if self.num_tokens >= self.program.min_tokens:
            may_end |= self.program.is_end[self.live]
        return may_end

    def _last_end(self) -> Places:
        last_end: Places = self.program.last_end[self.live - self.num_tokens]
        return last_end
