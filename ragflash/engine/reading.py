"""One sequence on a model where it runs, fed with known tokens: for measurements and tests."""

from collections.abc import Sequence

import torch

from ragflash.engine.placed import Placed
from ragflash.kvcache.allocator import pages_for
from ragflash.models.contract import ForwardBatch, SequenceRows


class Reading:
    """A sequence in slot 0, from its beginning; nothing else may use the model meanwhile.

    Args:
        placed: The model.
        num_tokens: That the sequence will have at most.
    """

    def __init__(self, placed: Placed, num_tokens: int) -> None:
        self._placed = placed
        self._table = placed.allocators.new_table()
        self._table.reserve(num_tokens)
        placed.model.reset(0)

    @property
    def room(self) -> int:
        """Most rows that the next forward may have."""
        return self._table.room

    def close(self) -> None:
        """Give the pages back."""
        self._table.release()

    @torch.inference_mode()
    def feed(
        self, tokens: Sequence[int], *, num_draft: int = 0, wants_logits: bool = True
    ) -> torch.Tensor:
        """Compute rows, all of them valid; return the logits of all, until the next call."""
        table, model = self._table, self._placed.model
        committed, end = table.length, table.length + len(tokens)
        packed = table.packed_pages
        rows = SequenceRows(
            slot=0,
            num_rows=len(tokens),
            committed=committed,
            pages=table.pages[: pages_for(end) - len(packed)],
            logit_rows=tuple(range(len(tokens))) if wants_logits else (),
            num_draft=num_draft,
            packed_pages=packed,
        )
        batch = ForwardBatch(torch.tensor(tokens), torch.arange(committed, end), (rows,))
        logits = model.forward(batch, self._placed.pages)
        model.commit(0, range(len(tokens)))
        self._placed.pages.convert(table.advance(len(tokens)))
        return logits
