"""Drafts whose fate is known beforehand, and drafters that are watched, to time what they cost."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ragflash.engine.drafting import Drafting
from ragflash.engine.sequence import Sequence as Asking
from ragflash.kvcache.identity import DRAFTER_PART, MTP_PART
from ragflash.speculative.drafter import Draft, Drafter


@dataclass(slots=True)
class StubDrafter:
    """Proposes what a plain run wrote, or a token off it, and notes when it was asked.

    An engine asks once a step, so that the times between are those of whole steps.

    Attributes:
        continuation: Tokens that greedy decoding writes after the prompt.
        num_prompt: Tokens of the prompt.
        num_drafted: Tokens of a proposal.
        vocab_size: Of the tokenizer; `None` proposes the continuation itself, which is accepted,
            else each token is one off it, which is rejected.
        asked_at: Seconds of the monotonic clock, and whether the proposal was whole.
    """

    continuation: Sequence[int]
    num_prompt: int
    num_drafted: int
    vocab_size: int | None = None
    asked_at: list[tuple[float, bool]] = field(default_factory=list)

    def propose(self, history: Sequence[int], budget: int) -> Draft:
        """See `Drafter`."""
        start = len(history) - self.num_prompt
        tokens = self.continuation[start : start + min(budget, self.num_drafted)]
        if self.vocab_size is not None:
            tokens = [(token + 1) % self.vocab_size for token in tokens]
        self.asked_at.append((time.perf_counter(), len(tokens) == self.num_drafted))
        return Draft(tuple(tokens), "stub")

    def observe(self, draft: Draft, accepted: Sequence[int]) -> None:
        """See `Drafter`."""

    def export_state(self) -> bytes:
        """Return nothing: what it proposes was given to it."""
        return b""

    def load_state(self, state: bytes) -> None:
        """See `Drafter`."""

    def step_times_ms(self) -> list[float]:
        """Return the times of the steps that verified whole proposals, but the first: it reads."""
        pairs = zip(self.asked_at[1:], self.asked_at[2:], strict=False)
        return [1000 * (after - before) for (before, is_whole), (after, _) in pairs if is_whole]


@dataclass(slots=True)
class WatchedDrafter:
    """Another drafter, timed; see `Drafter`.

    Attributes:
        drafter: That is asked.
        num_drafted: Most tokens of a proposal so far.
        asked_at: Seconds of the monotonic clock when it was asked and when it had proposed, and how
            many tokens.
    """

    drafter: Drafter
    num_drafted: int = 0
    asked_at: list[tuple[float, float, int]] = field(default_factory=list)

    def propose(self, history: Sequence[int], budget: int) -> Draft:
        """See `Drafter`."""
        began_at = time.perf_counter()
        draft = self.drafter.propose(history, budget)
        self.asked_at.append((began_at, time.perf_counter(), len(draft)))
        self.num_drafted = max(self.num_drafted, len(draft))
        return draft

    def observe(self, draft: Draft, accepted: Sequence[int]) -> None:
        """See `Drafter`."""
        self.drafter.observe(draft, accepted)

    def export_state(self) -> bytes:
        """See `Drafter`."""
        return self.drafter.export_state()

    def load_state(self, state: bytes) -> None:
        """See `Drafter`."""
        self.drafter.load_state(state)

    def step_times_ms(self) -> list[float]:
        """Return the times of the steps that verified whole proposals, but the first: it reads."""
        pairs = zip(self.asked_at[1:], self.asked_at[2:], strict=False)
        return [1000 * (after[0] - now[0]) for now, after in pairs if now[2] == self.num_drafted]

    def propose_times_ms(self) -> list[float]:
        """Return what whole proposals took, but the first."""
        asked = self.asked_at[1:]
        return [1000 * (end - begin) for begin, end, count in asked if count == self.num_drafted]


class DrafterSlot:
    """Gives every request the drafter that is put here; without one it decodes plainly."""

    def __init__(self) -> None:
        self.drafter = StubDrafter((), 0, 0)

    def __call__(self, sequence: Asking) -> StubDrafter:
        """Return the drafter of the next request."""
        return self.drafter


class OwnSlot:
    """Gives every request what the engine's own `Drafting` would, watched.

    Attributes:
        watched: The last one.
    """

    def __init__(self) -> None:
        self._drafting = Drafting((MTP_PART, DRAFTER_PART))
        self.watched: WatchedDrafter | None = None

    def __call__(self, sequence: Asking) -> Drafter:
        """Return the drafter of the next request."""
        own = self._drafting(sequence)
        assert own is not None
        self.watched = WatchedDrafter(own)
        return self.watched
