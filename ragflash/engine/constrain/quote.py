"""Quotes that cannot be invented: the output only follows the prompt's document text.

The quote so far stands at one or more places of the text, and what comes next must go on from one
of them. It is followed byte by byte: it may begin inside a token of the prompt, and be spelled by
any tokens. Where all places go on with the same token of the prompt, that one is forced.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ragflash.engine.constrain.mask import TokenMask, allow
from ragflash.engine.constrain.source_text import SourceText
from ragflash.engine.constrain.spelling import NONE, Places, Text
from ragflash.engine.constrain.words import Flags


@dataclass(frozen=True, slots=True)
class SourceQuote:
    """What a quote copies.

    Attributes:
        source: Index into the prompt's `source_ids`.
        source_start: Character offset in the source.
        source_end: Exclusive.
    """

    source: int
    source_start: int
    source_end: int


@dataclass(frozen=True)
class QuoteProgram:
    """Where quotes start and end; shared by requests. Arrays but `is_end` have one entry a start.

    Attributes:
        text: What is quoted.
        start: Places where a quote may start, ascending.
        soonest: Before that place a quote from there does not end …
        cell_end: … but here, behind the cell or heading that starts there; 0 if none does.
        latest: Where it ends at the latest, always a permitted end.
        is_end: Whether a quote may end before each place of the text.
    """

    text: SourceText
    start: Places
    soonest: Places
    cell_end: Places
    latest: Places
    is_end: Flags

    def begin(self) -> "QuoteState":
        """Return the state before the first byte."""
        return QuoteState(self, np.arange(len(self.start)), 0)

    @cached_property
    def first_mask(self) -> TokenMask:
        """What a quote may begin with."""
        return self.begin().find_mask()

    @cached_property
    def first_bytes(self) -> Text:
        """What stands at each start."""
        return self.text.data[self.start]

    @cached_property
    def ends(self) -> Places:
        """Places before which a quote may end, ascending."""
        return np.flatnonzero(self.is_end)

    def may_end(self, at: int, place: int) -> bool:
        """Whether a quote from a start may end before a place."""
        is_enough = place >= self.soonest[at] or place == self.cell_end[at]
        return bool(place == self.latest[at] or (is_enough and self.is_end[place]))

    def next_end(self, at: int, place: int) -> int:
        """Return the first permitted end behind a place, of a quote that goes on there."""
        index = int(np.searchsorted(self.ends, max(place + 1, int(self.soonest[at]))))
        found: list[int] = [int(self.latest[at]), *self.ends[index : index + 1].tolist()]
        cell_end = int(self.cell_end[at])
        return min([*found, cell_end] if cell_end > place else found)

    def own_tokens(self, at: int, place: int) -> tuple[int, ...]:
        """Return the prompt's tokens from a place to the next end, but none that reaches over it.

        Empty where no token of the prompt begins.
        """
        own = self.text.own[place : self.next_end(at, place)]
        if not len(own) or own[0] == NONE:
            return ()
        begins = np.flatnonzero(own != NONE)
        ids = own[begins]
        fits = begins + self.text.spellings.length[ids] <= len(own)
        return tuple(ids[fits].tolist())


@dataclass(frozen=True, slots=True)
class QuoteState:
    """The quote so far is the `num_bytes` bytes behind `program.start[live]`, at each of these."""

    program: QuoteProgram
    live: Places
    num_bytes: int

    @property
    def can_end(self) -> bool:
        """Whether a permitted end is reached."""
        if (single := self._single()) is not None:
            return self.num_bytes > 0 and self.program.may_end(*single)
        return self.num_bytes > 0 and bool(self._may_end(self.live, self._places(self.live)).any())

    @property
    def is_done(self) -> bool:
        """Whether the source or the limit leaves no continuation."""
        if (single := self._single()) is not None:
            return single[1] >= int(self.program.latest[single[0]])
        return not bool((self._places(self.live) < self.program.latest[self.live]).any())

    @property
    def num_skipped(self) -> int:
        """What follows a quote is never left out."""
        return 0

    def mask(self) -> TokenMask:
        """Return the tokens that spell what stands behind the quote somewhere."""
        return self.program.first_mask if self.num_bytes == 0 else self.find_mask()

    def find_mask(self) -> TokenMask:
        """Compute `mask`."""
        forced = self._forced()
        if forced:
            return allow(np.array(forced[:1], dtype=np.int64))
        _, places, room = self._going()
        spellings = self.program.text.spellings
        longest = self.program.text.longest(places)
        while (is_over := spellings.length[longest] > room).any():  # a byte always fits
            longest[is_over] = spellings.shorter[longest[is_over]]
        return TokenMask(spellings.all_from(longest), is_allow=True)

    def forced(self) -> tuple[int, ...]:
        """Return what comes next in any case: the prompt's own tokens, or the one permitted."""
        own = self._forced()
        if own:
            return own
        only = self.mask().only
        return () if only is None else (only,)

    def permits(self, token_id: int) -> bool:
        """Tell whether `mask` has a token."""
        if self.num_bytes == 0:
            return self.program.first_mask.permits(token_id)
        forced = self._forced()
        return token_id == forced[0] if forced else bool(len(self._followed(token_id)))

    def step(self, token_id: int) -> "QuoteState":
        """Keep the places where a token goes on."""
        length = int(self.program.text.spellings.length[token_id])
        return QuoteState(self.program, self._followed(token_id), self.num_bytes + length)

    def quote(self) -> SourceQuote | None:
        """Return what is quoted, cut back to a permitted end; `None` when that is nothing."""
        program, places = self.program, self._places(self.live)
        may_end = np.flatnonzero(self._may_end(self.live, places))
        if self.num_bytes and len(may_end):
            return self._source_quote(int(self.live[may_end[0]]), int(places[may_end[0]]))
        at, place = int(self.live[0]), int(places[0])
        last = int(np.searchsorted(program.ends, place, side="right")) - 1
        for end in (int(program.ends[last]) if last >= 0 else 0, int(program.cell_end[at])):
            is_permitted = end >= program.soonest[at] or end == program.cell_end[at]
            if program.start[at] < end <= place and is_permitted:
                return self._source_quote(at, end)
        return None

    def _source_quote(self, at: int, end: int) -> SourceQuote:
        return SourceQuote(*self.program.text.source_range(int(self.program.start[at]), end))

    def _single(self) -> tuple[int, int] | None:
        """Return the start and the place, if there is one alone."""
        if len(self.live) != 1:
            return None
        at = int(self.live[0])
        return at, int(self.program.start[at]) + self.num_bytes

    def _places(self, live: Places) -> Places:
        places: Places = self.program.start[live] + self.num_bytes
        return places

    def _going(self) -> tuple[Places, Places, Places]:
        """Return what of `live` may go on, the places there, and how many bytes are left there."""
        places = self._places(self.live)
        room = self.program.latest[self.live] - places
        goes_on = room > 0
        return self.live[goes_on], places[goes_on], room[goes_on]

    def _may_end(self, live: Places, places: Places) -> Flags:
        program = self.program
        is_enough = (places >= program.soonest[live]) | (places == program.cell_end[live])
        may_end: Flags = (program.is_end[places] & is_enough) | (places == program.latest[live])
        return may_end

    def _forced(self) -> tuple[int, ...]:
        """Return the prompt's own tokens where all places go on with them.

        A token that reaches over an end, or into what may not be quoted, is not forced.
        """
        if (single := self._single()) is not None:
            return self.program.own_tokens(*single)
        live, places, room = self._going()
        own = self.program.text.own
        token_id = int(own[places[0]])
        if token_id == NONE or not (own[places] == token_id).all():
            return ()
        length = int(self.program.text.spellings.length[token_id])
        if int(room.min()) < length:
            return ()
        is_over = any(self._may_end(live, places + ahead).any() for ahead in range(1, length))
        return () if is_over else (token_id,)

    def _followed(self, token_id: int) -> Places:
        """Return what of `live` goes on with a token."""
        program, spelled = self.program, self.program.text.spellings.token_bytes[token_id]
        if not spelled:
            return self.live[:0]
        if self.num_bytes > 0 and (single := self._single()) is not None:
            at, place = single
            end = place + len(spelled)
            goes_on = end <= program.latest[at] and program.text.stored[place:end] == spelled
            return self.live if goes_on else self.live[:0]
        live = self.live
        if self.num_bytes == 0:  # of all starts, at once those of one byte
            live = np.flatnonzero(program.first_bytes == spelled[0])
        places = self._places(live)
        fits = program.latest[live] - places >= len(spelled)
        live, places = live[fits], places[fits]
        for ahead, byte in enumerate(spelled):
            is_alike = program.text.data[places + ahead] == byte
            live, places = live[is_alike], places[is_alike]
        return live
