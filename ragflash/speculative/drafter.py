"""The contract of a drafter: it proposes a chain of tokens, the target verifies it in one forward.

A drafter may be wrong; it can cost time, never change the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain of proposed tokens, each a one-point distribution to the verifier."""

    token_ids: tuple[int, ...]
    source: str


class Drafter(Protocol):
    """State of one sequence's drafting; lives on the worker thread."""

    def propose(self, history: Sequence[int], budget: int) -> Draft:
        """Propose at most `budget` tokens, possibly none, to follow prompt and output."""

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Tell how far the last proposal was accepted."""
