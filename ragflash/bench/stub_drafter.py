"""Drafts whose fate is known beforehand, to time their verification."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ragflash.engine.sequence import Sequence as Asking
from ragflash.speculative.drafter import Draft


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


class DrafterSlot:
    """Gives every request the drafter that is put here; without one it decodes plainly."""

    def __init__(self) -> None:
        self.drafter = StubDrafter((), 0, 0)

    def __call__(self, sequence: Asking) -> StubDrafter:
        """Return the drafter of the next request."""
        return self.drafter
