"""Drafts of a DFlash model, as chains."""

from collections.abc import Sequence

import torch

from ragflash.models.dflash import RING_TOKENS, Candidates, DFlashModel, DraftSequence
from ragflash.speculative.drafter import Draft
from ragflash.speculative.policy import Idle

SOURCE = "dflash"


class DFlashDrafter:
    """See `RowDrafter`; proposes nothing while tokens before the newest are not computed.

    Args:
        model: The drafter, shared.
        ring_tokens: See `DraftSequence`.
        num_tokens: Of a proposal at most; `None` is what the model was trained for.

    Attributes:
        source: See `Draft`.
        most_tokens: Of a proposal.
    """

    source = SOURCE

    def __init__(
        self, model: DFlashModel, ring_tokens: int = RING_TOKENS, num_tokens: int | None = None
    ) -> None:
        self._sequence = DraftSequence(model, ring_tokens)
        trained = model.config.block_size - 1
        self.most_tokens = trained if num_tokens is None else min(num_tokens, trained)

    @property
    def position(self) -> int:
        """See `RowDrafter`; a context may lack its beginning."""
        return self._sequence.position

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
        if found is None:
            return Draft((), SOURCE, reason=Idle.NO_CONTEXT)
        return Draft(found.chain, SOURCE)

    def candidates(self, history: Sequence[int], width: int, top_k: int = 1) -> Candidates | None:
        """Return what may follow the history, to build a chain or a tree from.

        Args:
            history: Prompt and output; the last token is pending, those before it are computed.
            width: Tokens at most; no more than `most_tokens` are predicted.
            top_k: See `DraftSequence.draft`.

        Returns:
            `None` when features are missing just before the pending token.
        """
        pending = len(history) - 1
        if self._sequence.position != pending:
            return None
        return self._sequence.draft(history[-1], pending, min(width, self.most_tokens), top_k)

    def observe(self, draft: Draft, accepted: Sequence[int]) -> None:
        """Nothing: features come of what was committed, not of what was proposed."""

    def export_state(self) -> bytes:
        """See `Drafter`."""
        return self._sequence.export()

    def load_state(self, state: bytes) -> None:
        """See `Drafter`."""
        self._sequence.load(state)
