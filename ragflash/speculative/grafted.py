"""Trees of a block drafter's places, with what was looked up as branches."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ragflash.speculative.drafter import Draft, Drafter
from ragflash.speculative.tree import Graft, Marginals, build_tree

if TYPE_CHECKING:
    from ragflash.models.dflash import Candidates  # imports torch

TREE_TOKENS = 20
"""With the row before them 21, whose query heads fill the tiles of a card."""

_TOP_K = 8
_TRUNK_SHARE = 0.5  # of a tree's tokens, at least
_FIRST_RATE = 0.7
_FORGETTING = 0.9


@runtime_checkable
class BlockDrafter(Protocol):
    """Predicts several places in one pass."""

    @property
    def source(self) -> str:
        """See `Draft.source`."""

    def candidates(self, history: Sequence[int], width: int, top_k: int = 1) -> "Candidates | None":
        """Return each place's likeliest tokens; `None` while it cannot draft."""


class TreeDrafter:
    """See `Drafter`; what the block drafter keeps is stored with its own part of a session.

    How likely a looked-up token holds, if the one before it did, is counted here.

    Args:
        block: Gives the trunk and most branches.
        lookup: Gives drafts that become branches, or the tree while `block` cannot draft.
        num_tokens: Of a tree at most.
    """

    def __init__(self, block: BlockDrafter, lookup: Drafter, num_tokens: int = TREE_TOKENS) -> None:
        self._block = block
        self._lookup = lookup
        self._num_tokens = num_tokens
        self._rate = _FIRST_RATE

    def propose(self, history: Sequence[int], budget: int) -> Draft:
        """See `Drafter`."""
        most = min(budget, self._num_tokens)
        copy = self._lookup.propose(history, most)
        found = self._block.candidates(history, most, _TOP_K)
        if found is None:
            return copy.first(most)
        marginals = Marginals(
            found.token_ids.tolist(), found.log_probs.tolist(), self._block.source
        )
        graft = Graft(copy, self._survival(copy))
        return build_tree(most, marginals, [graft], num_trunk=trunk_tokens(most))

    def observe(self, draft: Draft, accepted: Sequence[int]) -> None:
        """See `Drafter`."""
        self._lookup.observe(draft, accepted)
        held = {-1, *accepted}
        for index in range(len(draft)):
            if draft.parent(index) in held and draft.source_of(index) != self._block.source:
                self._rate = _FORGETTING * self._rate + (1 - _FORGETTING) * (index in held)

    def export_state(self) -> bytes:
        """See `Drafter`: that of what looks up."""
        return self._lookup.export_state()

    def load_state(self, state: bytes) -> None:
        """See `Drafter`."""
        self._lookup.load_state(state)

    def _survival(self, draft: Draft) -> list[float]:
        """Return how likely each token holds; a sibling where those before it do not."""
        survival: list[float] = []
        left = {-1: 1.0}  # of a token's chance, what no child has yet
        for index in range(len(draft)):
            parent = draft.parent(index)
            survival.append(left[parent] * self._rate)
            left[parent] -= survival[index]
            left[index] = survival[index]
        return survival


def trunk_tokens(num_tokens: int) -> int:
    """Return how many of a tree's tokens are its trunk at least."""
    return max(1, int(num_tokens * _TRUNK_SHARE))
