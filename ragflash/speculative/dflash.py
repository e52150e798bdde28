"""Drafts of a DFlash model, as chains."""

from collections.abc import Sequence

import torch

from ragflash.models.dflash import Candidates, DraftContext
from ragflash.speculative.drafter import Draft
from ragflash.speculative.policy import Idle

SOURCE = "dflash"


class DFlashDrafter:
    """See `RowDrafter`; proposes nothing while tokens before the newest are not computed.

    Args:
        context: Of the sequence that this drafts for.
        num_tokens: Of a proposal at most; `None` is what the model was trained for.

    Attributes:
        source: See `Draft`.
        most_tokens: Of a proposal.
    """

    source = SOURCE

    def __init__(self, context: DraftContext, num_tokens: int | None = None) -> None:
        self._context = context
        trained = context.most_tokens
        self.most_tokens = trained if num_tokens is None else min(num_tokens, trained)

    @property
    def position(self) -> int:
        """See `RowDrafter`; a context may lack its beginning."""
        return self._context.position

    def absorb(self, position: int, token_ids: Sequence[int], rows: torch.Tensor) -> None:
        """See `RowDrafter`; the rows are the taps of `DFlashConfig.tap_layers` side by side."""
        if position <= self._context.position:
            self._context.truncate(position)
        else:
            self._context.restart(position)
        self._context.append(rows)

    def propose(self, history: Sequence[int], budget: int) -> Draft:
        """See `Drafter`."""
        found = self.candidates(history, budget)
        if found is None:
            return Draft((), SOURCE, reason=Idle.NO_CONTEXT)
        return Draft(found.chain, SOURCE)

    def candidates(self, history: Sequence[int], width: int, top_k: int = 1) -> Candidates | None:
        """Return what may follow the history, to build a chain or a tree from.

        Args:
            history: Prompt and output; the last token is pending, those before it are computed.
            width: Tokens at most; no more than `most_tokens` are predicted.
            top_k: See `DraftContext.draft`.

        Returns:
            `None` when features are missing just before the pending token.
        """
        pending = len(history) - 1
        if self._context.position != pending:
            return None
        return self._context.draft(history[-1], pending, min(width, self.most_tokens), top_k)

    def observe(self, draft: Draft, accepted: Sequence[int]) -> None:
        """Nothing: features come of what was committed, not of what was proposed."""

    def export_state(self) -> bytes:
        """See `Drafter`."""
        return self._context.export()

    def load_state(self, state: bytes) -> None:
        """See `Drafter`."""
        self._context.load(state)
