"""Which drafts are worth their step, and how wide they are.

A draft of w tokens is worth `(1 + E[w]) / (T(1 + w) + t)` tokens a millisecond: E is how many are
expected to hold (`survival`), T what the step takes (`costs`) and t what proposing took. It is
verified where that beats plain decoding by a margin. What is expected can be wrong, so there is an
account besides: the time that drafted steps took longer than plain ones would have for the same
tokens may not exceed a small share of the time that went by.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ragflash.speculative.costs import StepCosts
from ragflash.speculative.drafter import Draft, Drafter
from ragflash.speculative.survival import DraftKind, Survival

BEGIN_AT, STAY_ABOVE = 1.05, 1.0
"""Times plain decoding: what a kind of draft must promise to be begun with, and to be kept."""

KEEP_WIDTH = 0.97
"""A width is kept as long as it promises this share of the best."""

MOST_LOST = 0.03
"""Of the time that went by, what drafts may have lost."""

_FIRST_DWELL, _LONGEST_DWELL = 16, 256
_LOST_AT_FIRST_STEPS = 2.0
_NEWEST_SHARE = 0.2
_FIRST_TURN_RATE, _NEWEST_TURN_SHARE = 0.1, 0.1
_TURN_RATE_OF_COPIES = 0.5  # behind a draft that held


class Idle(StrEnum):
    """Why nothing was proposed in a step."""

    NOTHING_FOUND = "nothing_found"
    NO_GAIN = "no_gain"
    LOST_TIME = "lost_time"
    NO_CONTEXT = "no_context"


@dataclass(frozen=True, slots=True)
class Source:
    """A drafter that may be asked.

    Attributes:
        drafter: Of this sequence.
        kind: Tells what the drafter proposes now; of one that is free, of its last proposal.
        is_free: Whether proposing takes no time to speak of; else it is asked only for what
            promises to be worth it.
        most_tokens: Of a draft; `None` for any number.
        depth: Of a draft of so many tokens, how many can hold: those of a tree's trunk.
        is_ready: Whether it knows what it needs to draft behind a history of so many tokens.
    """

    drafter: Drafter
    kind: Callable[[], DraftKind]
    is_free: bool = True
    most_tokens: int | None = None
    depth: Callable[[int], int] = lambda num_tokens: num_tokens
    is_ready: Callable[[int], bool] = lambda _: True


@dataclass(slots=True)
class _Standing:
    """How a kind of draft is doing.

    Attributes:
        is_on: Whether it is drafted.
        width: Tokens of its last draft.
        steps_off: Steps since it was last tried.
        dwell: Steps after which it is tried again.
        draft_ms: What proposing takes.
    """

    is_on: bool = False
    width: int = 0
    steps_off: int = 0
    dwell: int = _FIRST_DWELL
    draft_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class _Offer:
    """The best use of a source in a step; `gain` is what it promises, times plain decoding."""

    source: Source
    kind: DraftKind
    draft: Draft | None
    width: int
    gain: float


@dataclass(frozen=True, slots=True)
class _Step:
    """A step under way, of which `draft_ms` were taken by a source that costs time.

    With `is_ahead` the step before expected no draft in it, so that it may have been begun early;
    with a draft it waits for what was begun.
    """

    began_at: float
    history: int
    pending: int
    kind: DraftKind | None
    width: int
    draft_ms: float
    is_ahead: bool


class AdaptiveDrafter:
    """Drafts by what it costs and how it has done; a `Drafter` over others.

    A step's time is that from one proposal to the next, all that is done around it included.

    Args:
        sources: In order of preference where they promise the same.
        costs: Shared by all sequences; corrected by the steps of this one.
        survival: Shared by all sequences of a document.
        is_early: Whether plain steps of this sequence may be begun early.
        clock: Seconds.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        costs: StepCosts,
        survival: Survival,
        *,
        is_early: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sources = sources
        self._costs = costs
        self._survival = survival
        self._is_early = is_early
        self._clock = clock
        self._standings: dict[DraftKind, _Standing] = {}
        self._step: _Step | None = None
        self._num_held = 0
        self._turn_rate = _FIRST_TURN_RATE  # of steps without a draft, those before one with one
        self._goes_on: bool | None = None  # what the newest empty draft said; `None` behind others
        self._passed_ms = self._lost_ms = self._draft_ms = 0.0

    def propose(self, history: Sequence[int], budget: int) -> Draft:
        """See `Drafter`; an empty draft has the reason, one of `Idle`."""
        now = self._clock()
        pending = self._end_step(now, len(history))
        self._draft_ms = 0.0
        ready = [source for source in self._sources if source.is_ready(len(history))]
        offers = [self._offer(source, history, budget, pending) for source in ready]
        best = max((offer for offer in offers if offer), key=lambda offer: offer.gain, default=None)
        if best is None:
            is_lacking = len(ready) < len(self._sources)
            reason = Idle.NO_CONTEXT if is_lacking else Idle.NOTHING_FOUND
            draft = Draft((), "none", reason=reason)
        else:
            draft = self._decide(best, history, budget, pending)
        kind = best.kind if best and len(draft) else None
        is_ahead = pending == 1 and bool(self._goes_on)
        width = len(draft)
        self._step = _Step(now, len(history), pending, kind, width, self._draft_ms, is_ahead)
        self._num_held = 0
        goes_on = self._expect(len(history), is_empty=not width)
        return replace(draft, goes_on=True) if goes_on else draft

    def observe(self, draft: Draft, accepted: Sequence[int]) -> None:
        """See `Drafter`; every source is told, with an empty draft where it is not its own."""
        kind = self._step.kind if self._step else None
        self._num_held = len(accepted)
        for source in self._sources:
            is_own = kind is not None and source.kind() == kind
            source.drafter.observe(draft if is_own else Draft((), draft.source), accepted)
        if self._step is not None:
            self._step = replace(self._step, width=len(draft))  # it may have been cut
        if kind is not None and len(draft):
            self._survival.observe(kind, _trunk(draft), len(accepted))
        if accepted:
            self._turn_rate = max(self._turn_rate, _TURN_RATE_OF_COPIES)

    def export_state(self) -> bytes:
        """See `Drafter`: the sources' states, each with its length before it."""
        states = [source.drafter.export_state() for source in self._sources]
        return b"".join(len(state).to_bytes(8, "little") + state for state in states)

    def load_state(self, state: bytes) -> None:
        """See `Drafter`."""
        for source in self._sources:
            length, state = int.from_bytes(state[:8], "little"), state[8:]
            if len(state) < length:
                raise ValueError(
                    f"{length} bytes of a drafter's state are wanted, not {len(state)}"
                )
            source.drafter.load_state(state[:length])
            state = state[length:]
        if state:
            raise ValueError(f"{len(state)} bytes are left of a drafter's state")

    def _expect(self, history: int, *, is_empty: bool) -> bool:
        """Tell whether the next step is to be begun early, as one without a draft.

        That saves what the step would wait for the host, and costs a plain step where it has a
        draft after all.
        """
        if self._goes_on is not None:
            self._turn_rate += _NEWEST_TURN_SHARE * ((not is_empty) - self._turn_rate)
        self._goes_on = None
        if is_empty and self._is_early:
            rate, ahead_ms = self._turn_rate, self._costs.ahead_ms(history)
            saved_ms = self._costs.step_ms(1, history) - ahead_ms
            self._goes_on = rate * ahead_ms < (1 - rate) * saved_ms
        return bool(self._goes_on)

    def _end_step(self, now: float, history: int) -> int:
        """Account for the last step; return the rows of the next one that are no draft."""
        step, self._step = self._step, None
        if step is None:
            return 1
        ms = 1000 * (now - step.began_at)
        if not step.is_ahead:
            self._costs.observe(step.pending + step.width, step.history, ms - step.draft_ms)
        elif not step.width:
            self._costs.observe_ahead(step.history, ms)
        self._passed_ms += ms
        num_chosen = self._num_held + 1
        if step.width:
            plain_ms = self._plain_ms(step.pending, step.history)
            plain_ms += self._num_held * self._plain_ms(1, step.history)
            self._lost_ms += ms - plain_ms
            self._lost_ms = max(self._lost_ms, -plain_ms)  # old gains do not pay for new losses
        num_forced = history - step.history - num_chosen
        return 1 + max(0, num_forced)

    def _plain_ms(self, pending: int, length: int) -> float:
        """Return what a step without a draft takes in plain decoding."""
        costs, is_early = self._costs, self._is_early and pending == 1
        return costs.ahead_ms(length) if is_early else costs.step_ms(pending, length)

    def _offer(
        self, source: Source, history: Sequence[int], budget: int, pending: int
    ) -> _Offer | None:
        """Find the width at which a source promises most."""
        draft, most = None, min(budget, source.most_tokens or budget)
        if source.is_free:
            draft = source.drafter.propose(history, budget)
            most = min(len(draft), most)
        if not most:
            return None
        kind = source.kind()
        standing = self._standings.setdefault(kind, _Standing())
        expected = self._survival.expected(kind, source.depth(most))
        length = len(history)
        plain_ms = self._plain_ms(pending, length)
        more_ms = standing.draft_ms + (plain_ms if pending == 1 and self._goes_on else 0.0)

        def gain(width: int) -> float:
            ms = self._costs.step_ms(pending + width, length) + more_ms
            held = expected[min(source.depth(width), len(expected) - 1)]
            return (1 + held) * plain_ms / ms

        widths = {rows - pending for rows in self._costs.rows if 0 < rows - pending < most}
        best = max(sorted(widths | {most}), key=gain)
        kept = min(standing.width, most)
        if kept and gain(kept) > KEEP_WIDTH * gain(best):
            best = kept
        return _Offer(source, kind, draft, best, gain(best))

    def _decide(self, offer: _Offer, history: Sequence[int], budget: int, pending: int) -> Draft:
        standing = self._standings[offer.kind]
        is_worth_it = offer.gain >= (STAY_ABOVE if standing.is_on else BEGIN_AT)
        if not is_worth_it and standing.is_on:
            standing.is_on, standing.steps_off = False, 0
        if not is_worth_it:
            standing.steps_off += 1
            if standing.steps_off <= standing.dwell:
                return Draft((), offer.kind.source, reason=Idle.NO_GAIN)
            standing.steps_off, standing.dwell = 0, min(2 * standing.dwell, _LONGEST_DWELL)
        allowed_ms = MOST_LOST * self._passed_ms
        allowed_ms += _LOST_AT_FIRST_STEPS * self._costs.step_ms(pending, len(history))
        if self._lost_ms > allowed_ms:
            return Draft((), offer.kind.source, reason=Idle.LOST_TIME)
        if is_worth_it:
            standing.is_on, standing.dwell = True, _FIRST_DWELL
        standing.width = offer.width
        if offer.draft is not None:
            return offer.draft.first(offer.width)
        began_at = self._clock()
        draft = offer.source.drafter.propose(history, min(offer.width, budget))
        ms = self._draft_ms = 1000 * (self._clock() - began_at)
        share = _NEWEST_SHARE if standing.draft_ms else 1.0
        standing.draft_ms += share * (ms - standing.draft_ms)
        return draft


def _trunk(draft: Draft) -> int:
    """Count the tokens of the longest path."""
    if draft.is_chain:
        return len(draft)
    return max((len(draft.path(leaf)) for leaf in draft.leaves()), default=0)
