"""Drafts of a DFlash model, as chains."""

from collections.abc import Sequence

import torch

from ragflash.models.dflash import RING_TOKENS, Candidates, DFlashModel, DraftSequence
from ragflash.speculative.drafter import Draft

SOURCE = "dflash"


class DFlashDrafter:
    """See `RowDrafter`; proposes nothing while tokens before the newest are not computed.

    Args:
        model: The drafter, shared.
        ring_tokens: See `DraftSequence`.
    """

    def __init__(self, model: DFlashModel, ring_tokens: int = RING_TOKENS) -> None:
        self._sequence = DraftSequence(model, ring_tokens)
        self._max_width = model.config.block_size - 1

    def absorb(self, position: int, token_ids: Sequence[int], rows: torch.Tensor) -> None:
        """See `RowDrafter`; the rows are the taps of `DFlashConfig.tap_layers` side by side."""
        if position <= self._sequence.position:
            self._sequence.truncate(position)
        else:
            self._sequence.restart(position)
        self._sequence.append(rows)

    def propose(self, history: Sequence[int], budget: int) -> Draft:
        """See `Drafter`."""
        found = self.candidates(history, budget)
        return Draft(() if found is None else found.chain, SOURCE)

    def candidates(self, history: Sequence[int], width: int, top_k: int = 1) -> Candidates | None:
        """Return what may follow the history, to build a chain or a tree from.

        Args:
            history: Prompt and output; the last token is pending, those before it are computed.
            width: Tokens at most; no more than the model was trained for are predicted.
            top_k: See `DraftSequence.draft`.

        Returns:
            `None` when features are missing just before the pending token.
        """
        pending = len(history) - 1
        if self._sequence.position != pending:
            return None
        return self._sequence.draft(history[-1], pending, min(width, self._max_width), top_k)

    def observe(self, draft: Draft, accepted: Sequence[int]) -> None:
        """Nothing: features come of what was committed, not of what was proposed."""

    def export_state(self) -> bytes:
        """See `Drafter`."""
        return self._sequence.export()

    def load_state(self, state: bytes) -> None:
        """See `Drafter`."""
        self._sequence.load(state)
