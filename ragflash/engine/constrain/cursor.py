"""One constraint of one output: its parts, where the output stands in them, the way back."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ragflash.engine.constrain.mask import TokenMask, allow, union
from ragflash.engine.constrain.quote import QuoteState, SourceQuote
from ragflash.engine.constrain.state import State


@dataclass(frozen=True, slots=True)
class QuotedTokens:
    """The output copies a source from its token `start` on."""

    start: int
    quote: SourceQuote


@dataclass(frozen=True, slots=True)
class _Point:
    """Where the output stands after some tokens; `part == len(parts)` is the end."""

    part: int
    state: State | None
    part_start: int
    quotes: tuple[QuotedTokens, ...]


class Cursor:
    """Follows the output through a constraint.

    Where a part may end, the token decides: one that the next part begins with ends it, unless the
    next part is free text, which begins only with a token that does not continue the part.

    Args:
        parts: Start states, at least one, none of them complete.
        stop_ids: Tokens that a model may end the last part with, where it can end.
    """

    def __init__(self, parts: tuple[State, ...], stop_ids: Iterable[int]) -> None:
        self._parts = parts
        self._stop = allow(np.fromiter(stop_ids, dtype=np.int64))
        self._points = [_Point(0, parts[0], 0, ())]

    @property
    def num_tokens(self) -> int:
        """Tokens that were followed so far."""
        return len(self._points) - 1

    @property
    def is_done(self) -> bool:
        """Whether nothing may follow, be the output complete (`can_end`) or not."""
        state = self._points[-1].state
        return state is None or state.is_done

    @property
    def can_end(self) -> bool:
        """Whether the output may end here."""
        point = self._points[-1]
        if point.state is None:
            return True
        return point.state.can_end and self._next_part(point) == len(self._parts)

    def mask(self) -> TokenMask:
        """Return what may come next; stop tokens are in it where the output may end."""
        point = self._points[-1]
        if point.state is None:
            return self._stop
        mask = point.state.mask()
        return union(mask, self._following(point)) if point.state.can_end else mask

    def advance(self, token_ids: Iterable[int]) -> None:
        """Follow emitted tokens, each of which `mask` permits."""
        for token_id in token_ids:
            self._points.append(self._next(self._points[-1], token_id))

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens."""
        if num_tokens:
            del self._points[-num_tokens:]

    def num_permitted(self, token_ids: Iterable[int]) -> int:
        """Count the first of `token_ids` that could be emitted in turn; the cursor stays."""
        count = 0
        for token_id in token_ids:
            if self._is_stop(token_id) or not self._permits(token_id):
                break
            self.advance((token_id,))
            count += 1
        self.rollback(count)
        return count

    def forced(self, limit: int) -> tuple[int, ...]:
        """Return at most `limit` tokens that must come next in any case; the cursor stays."""
        token_ids: list[int] = []
        while len(token_ids) < limit:
            state = self._points[-1].state
            if state is None or state.can_end:
                break
            forced = state.forced()[: limit - len(token_ids)]
            if not forced or self._is_stop(forced[0]):
                break
            self.advance(forced)
            token_ids += forced
        self.rollback(len(token_ids))
        return tuple(token_ids)

    def quotes(self) -> tuple[QuotedTokens, ...]:
        """Return all quotes in the output, an unfinished one included."""
        point = self._points[-1]
        return point.quotes + self._quote(point)

    def _next(self, point: _Point, token_id: int) -> _Point:
        state = point.state
        assert state is not None, "a token after the constraint's end"
        if state.can_end and self._ends(point, state, token_id):
            point = self._leave(point)
            state = point.state
            assert state is not None, "stop tokens are not followed"
        after = _Point(point.part, state.step(token_id), point.part_start, point.quotes)
        assert after.state is not None
        if not (after.state.is_done and after.state.can_end):
            return after
        left = self._leave(after)
        return _Point(left.part, left.state, len(self._points), left.quotes)

    def _ends(self, point: _Point, state: State, token_id: int) -> bool:
        follows = self._following(point)
        if follows.is_allow and follows.permits(token_id):
            return True
        return not state.permits(token_id)

    def _permits(self, token_id: int) -> bool:
        point = self._points[-1]
        if point.state is None:
            return False
        if point.state.permits(token_id):
            return True
        return point.state.can_end and self._following(point).permits(token_id)

    def _leave(self, point: _Point) -> _Point:
        part = self._next_part(point)
        state = self._parts[part] if part < len(self._parts) else None
        return _Point(part, state, self.num_tokens, point.quotes + self._quote(point))

    def _following(self, point: _Point) -> TokenMask:
        part = self._next_part(point)
        return self._parts[part].mask() if part < len(self._parts) else self._stop

    @staticmethod
    def _next_part(point: _Point) -> int:
        assert point.state is not None
        return point.part + 1 + point.state.num_skipped

    def _quote(self, point: _Point) -> tuple[QuotedTokens, ...]:
        if not isinstance(point.state, QuoteState):
            return ()
        quote = point.state.quote()
        return () if quote is None else (QuotedTokens(point.part_start, quote),)

    def _is_stop(self, token_id: int) -> bool:
        return self._stop.permits(token_id)
