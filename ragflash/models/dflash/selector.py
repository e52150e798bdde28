"""The candidate selector of DFlash 2: a path through the slots' candidates, left to right."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ragflash.models.linear import Linear

Table = Callable[[torch.Tensor], torch.Tensor]  # token ids [N] to rows [N, R]


@dataclass(frozen=True, slots=True)
class PathSelector:
    """Scores a candidate by its own logit and by how it follows the token chosen before it.

    The second is `⟨before[previous] ⊙ (hidden · h), after[candidate]⟩`, `h` being the slot's row.
    So slots that were predicted side by side depend on each other without a second pass.

    Attributes:
        top_k: Candidates a slot that it was trained to choose among.
        before: Of tokens that are followed.
        after: Of tokens that follow.
        hidden: Projection of rows to the tables' width.
    """

    top_k: int
    before: Table
    after: Table
    hidden: Linear

    def choose(
        self,
        pending: torch.Tensor,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        scores: torch.Tensor,
    ) -> torch.Tensor:
        """Return one token a slot, int64 `[S]`; launches the same whatever the tensors hold.

        Args:
            pending: The token before the first slot, int64 `[1]`.
            hidden: `[S, H]`, what the head reads.
            token_ids: Candidates `[S, K]`, the best first; the first `top_k` are considered.
            scores: Their logits `[S, K]`, up to a constant a slot.
        """
        token_ids, scores = token_ids[:, : self.top_k], scores[:, : self.top_k]
        projected = self.hidden(hidden).float()
        path, previous = [], pending
        for row, candidates, own in zip(projected, token_ids, scores, strict=True):
            following = self.after(candidates).float() @ (self.before(previous)[0].float() * row)
            previous = candidates[(own + following).argmax(0, keepdim=True)]
            path.append(previous)
        return torch.cat(path)
