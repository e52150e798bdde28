"""The drafter that copies: from the documents of a prompt, or from what was written before."""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ragflash.speculative.drafter import Draft
from ragflash.speculative.lookup.continuation import branch_width, follow
from ragflash.speculative.lookup.output_index import OutputIndex, Recurrence
from ragflash.speculative.lookup.source_index import (
    GRAM,
    TOKEN_BYTES,
    Interval,
    SourceIndex,
    encode,
)

DOCUMENT = "lookup"
OUTPUT = "lookup_output"
COMPARED_TOKENS = 64
"""Of the history, its last: longer matches are told apart by the place that is being copied."""

ROWS = ((13, 21), (8, 16), (GRAM, 8))
"""Tokens that match at least, and rows of the forward then, the one before the draft included."""

RESUMED, NEARBY = 8, 4
"""Tokens that a copy had at least, to be resumed by one token that is the same; it then counts as a
match of as many. And from where it broke off, in the source as in the history, how many tokens."""

_STATE_VERSION = 2
_NOTHING = Draft((), DOCUMENT)

Run = tuple[int, ...]


class Match(NamedTuple):
    """What a proposal rests on.

    Attributes:
        source: `DOCUMENT` or `OUTPUT`.
        length: Tokens of the history that were found, at most `COMPARED_TOKENS` unless they are
            being copied; `RESUMED` of a copy that is resumed.
        num_occurrences: Where they were found.
        num_agreeing: Of these, those that go on as the trunk does where they part first.
    """

    source: str
    length: int
    num_occurrences: int
    num_agreeing: int


class _Place(NamedTuple):
    """Somewhere in a source.

    Attributes:
        source: Number of the source.
        position: The token that comes next there.
        run: Tokens before it that are the last ones of the history; 0 once they differ.
        is_sure: Whether a search would find nothing else: the source has no other place with as
            many and no other source one with more, or they are more than are compared.
        patience: Of a copy that broke off here, how many more tokens it may take to be resumed.
    """

    source: int
    position: int
    run: int
    is_sure: bool
    patience: int = 0

    def broken(self, num_copied: int, num_since: int) -> "_Place":
        """Return the place after a copy broke off, or was not resumed.

        Args:
            num_copied: Tokens that were copied before it.
            num_since: Tokens that were written since.
        """
        patience = NEARBY + 1 if num_copied >= RESUMED else self.patience
        return self._replace(run=0, is_sure=False, patience=max(0, patience - num_since))


class LookupDrafter:
    """Drafts for one sequence; made on any thread and used on one.

    The document that is being copied is searched first, then the others in their order, then the
    conversation and the output; the longest match wins. Nothing has to be observed: where a copy
    goes on, or has left off, is read from the history.

    Args:
        sources: Of the documents that may be copied, the whole of each.
        prompt: What the history begins with.
        written_from: Tokens of the prompt before this one are in `sources`, or not to be copied.
        num_tokens: Of every proposal, whatever the match; `None` lets its length decide.
        has_branches: Whether the runner-up is proposed, too; else all proposals are chains.
    """

    def __init__(
        self,
        sources: Sequence[SourceIndex],
        prompt: Sequence[int] = (),
        *,
        written_from: int = 0,
        num_tokens: int | None = None,
        has_branches: bool = True,
    ) -> None:
        self._sources = tuple(sources)
        self._num_tokens = num_tokens
        self._has_branches = has_branches
        self._tail = encode(prompt[-COMPARED_TOKENS:])
        self._written = OutputIndex()
        self._written.extend(prompt[written_from:])
        self._num_seen = self._num_placed = len(prompt)
        self._most = COMPARED_TOKENS
        self._place: _Place | None = None
        self._order = tuple(range(len(self._sources)))
        self._proposed: tuple[_Place, ...] = ()
        self.match: Match | None = None

    def propose(self, history: Sequence[int], budget: int) -> Draft:
        """See `Drafter`; `match` says afterwards what the proposal rests on."""
        self._take(history)
        self._proposed = ()
        place = self._place
        if place and place.is_sure and place.position < len(self._sources[place.source]):
            self.match = Match(DOCUMENT, place.run, 1, 1)
            self._proposed = (place,)
            index, width = self._sources[place.source], self._width(place.run, budget)
            return Draft(index.tokens(place.position, width), DOCUMENT)
        found = self._find()
        length = found[1] if found else 0
        again = self._written.longest(max(length + 1, GRAM), COMPARED_TOKENS)
        if again:
            return self._from_written(again, budget)
        if found:
            return self._from_document(*found, budget)
        return self._resume(history, budget)

    def observe(self, draft: Draft, accepted: Sequence[int]) -> None:
        """See `Drafter`."""

    def export_state(self) -> bytes:
        """See `Drafter`: the places that are copied; the rest follows from prompt and sources."""
        places = [self._place] if self._place else []
        state = {
            "version": _STATE_VERSION,
            "num_placed": self._num_placed,
            "place": [self._spell(place) for place in places],
            "proposed": [self._spell(place) for place in self._proposed],
        }
        return json.dumps(state).encode()

    def load_state(self, state: bytes) -> None:
        """See `Drafter`; places in documents that are not among the sources are left out."""
        try:
            given = json.loads(state)
            if given["version"] != _STATE_VERSION:
                raise ValueError(f"version {given['version']} is not {_STATE_VERSION}")
            num_placed = max(0, int(given["num_placed"]))
            place = self._read(given["place"])
            proposed = self._read(given["proposed"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no state of a lookup drafter: {error!r}") from error
        self._num_placed, self._proposed = num_placed, proposed
        self._set_place(place[0] if place else None)

    def _take(self, history: Sequence[int]) -> None:
        """Take over what was written since, and see which place it copies."""
        new = history[self._num_seen :]
        unplaced = tuple(history[self._num_placed :])
        self._num_seen = self._num_placed = len(history)
        self._tail = (self._tail + encode(new))[-COMPARED_TOKENS * TOKEN_BYTES :]
        self._most = min(self._most + len(new), COMPARED_TOKENS)
        self._written.extend(new)
        most = 0
        for place in self._proposed:
            copied = self._sources[place.source].tokens(place.position, len(unplaced))
            agreed = _num_agreeing(copied, unplaced)
            if agreed > most:
                most = agreed
                run = place.run + agreed
                is_sure = run > COMPARED_TOKENS or place.is_sure
                reached = _Place(place.source, place.position + agreed, run, is_sure)
                num_since = len(unplaced) - agreed
                self._set_place(reached.broken(run, num_since) if num_since else reached)
        left = self._place
        if left and unplaced and not most and (left.run or left.patience):
            self._place = left.broken(left.run, len(unplaced))

    def _set_place(self, place: _Place | None) -> None:
        self._place = place
        if place and place.source != self._order[0]:
            others = (at for at in range(len(self._sources)) if at != place.source)
            self._order = (place.source, *others)

    def _find(self) -> tuple[int, int, Interval] | None:
        """Find the longest end of the history in the documents: in which, its length, and where."""
        found, least = None, GRAM
        most = min(self._most, len(self._tail) // TOKEN_BYTES)
        for source in self._order:
            longest = self._sources[source].longest(self._tail, least, most)
            if longest is not None:
                found, least = (source, *longest), longest[0] + 1
        self._most = least - 1
        return found

    def _from_document(self, source: int, length: int, interval: Interval, budget: int) -> Draft:
        index, width = self._sources[source], self._width(length, budget)
        last = self._place.position if self._place and self._place.source == source else 0
        chosen = follow(index, interval, width, last, has_branch=self._has_branches)
        self.match = Match(DOCUMENT, length, interval.size, chosen.num_agreeing)
        self._proposed = (_Place(source, chosen.place, length, interval.size == 1),)
        if chosen.branch is None:
            return Draft(index.tokens(chosen.place, width), DOCUMENT)
        depth, place, num_branch = chosen.branch
        self._proposed += (_Place(source, place, length, is_sure=False),)
        trunk = index.tokens(chosen.place, width - num_branch)
        return _forked(DOCUMENT, trunk, depth, index.tokens(place + depth, num_branch))

    def _from_written(self, again: Recurrence, budget: int) -> Draft:
        self.match = Match(OUTPUT, again.length, sum(again.counts), again.counts[0])
        width, num_branch = self._width(again.length, budget), 0
        if self._has_branches and len(again.places) > 1:
            num_branch = branch_width(width, *again.counts[:2])
        trunk = self._written.tokens(again.places[0], width - num_branch)
        if not num_branch:
            return Draft(trunk, OUTPUT)
        return _forked(OUTPUT, trunk, 0, self._written.tokens(again.places[1], num_branch))

    def _resume(self, history: Sequence[int], budget: int) -> Draft:
        """Go on with a copy that broke off, behind the newest token where that stands nearby.

        Who edits what he copies comes back to it after a few words. One token tells where: of
        drafts made so, nine in ten hold.
        """
        self.match = None
        place = self._place
        if place is None or not place.patience:
            return _NOTHING
        index = self._sources[place.source]
        ahead = index.tokens(place.position, NEARBY)
        if history[-1] not in ahead:
            return _NOTHING
        start = place.position + ahead.index(history[-1]) + 1
        self.match = Match(DOCUMENT, RESUMED, 1, 1)
        self._proposed = (_Place(place.source, start, 1, is_sure=False),)
        return Draft(index.tokens(start, self._width(RESUMED, budget)), DOCUMENT)

    def _width(self, length: int, budget: int) -> int:
        """Return how many tokens are proposed for a match."""
        if self._num_tokens is not None:
            return min(self._num_tokens, budget)
        rows = next(rows for least, rows in ROWS if length >= least)
        return min(rows - 1, budget)

    def _spell(self, place: _Place) -> list[str | int]:
        key = self._sources[place.source].key.hex()
        return [key, place.position, place.run, int(place.is_sure), place.patience]

    def _read(self, spelled: Iterable[tuple[str, int, int, int, int]]) -> tuple[_Place, ...]:
        numbers = {index.key.hex(): at for at, index in enumerate(self._sources)}
        places = []
        for key, position, run, is_sure, patience in spelled:
            if position < 0 or run < 0:
                raise ValueError(f"token {position} after {run} is nowhere")
            if key in numbers:
                source = numbers[key]
                places.append(_Place(source, int(position), int(run), bool(is_sure), int(patience)))
        return tuple(places)


def _forked(source: str, trunk: Run, depth: int, branch: Run) -> Draft:
    first, end = len(trunk), len(trunk) + len(branch)
    parents = (*range(-1, first - 1), depth - 1, *range(first, end - 1))
    return Draft(trunk + branch, source, parents)


def _num_agreeing(ours: Run, theirs: Run) -> int:
    if ours == theirs:
        return len(ours)
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
