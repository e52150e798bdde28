"""Rows of a step as the tensors of a forward."""

from collections.abc import Sequence as Run
from dataclasses import dataclass

import numpy as np
import torch

from ragflash.engine.sequence import Sequence
from ragflash.kvcache.allocator import pages_for
from ragflash.models.contract import ForwardBatch, SequenceRows
from ragflash.speculative.drafter import Draft
from ragflash_kernels.parents import depths


@dataclass(frozen=True, slots=True)
class Rows:
    """What one sequence puts into a forward.

    Attributes:
        token_ids: Pending tokens, then drafted ones.
        logit_rows: Rows whose logits are wanted, ascending.
        num_draft: Last rows that may be dropped: drafted ones, or all of a target that is scored.
        draft: What the drafter proposed, cut to what may follow; `None` when it was not asked.
    """

    sequence: Sequence
    token_ids: tuple[int, ...]
    logit_rows: tuple[int, ...]
    num_draft: int = 0
    draft: Draft | None = None

    @property
    def num_pending(self) -> int:
        """Rows that are no draft."""
        return len(self.token_ids) - self.num_draft

    @property
    def parents(self) -> tuple[int, ...] | None:
        """For each row the row before it; `None` is a chain."""
        if self.draft is None or self.draft.is_chain:
            return None
        first = self.num_pending
        drafted = (first + self.draft.parent(index) for index in range(len(self.draft)))
        return (*range(-1, first - 1), *drafted)


def build_batch(step: Run[Rows], device: torch.device | str) -> ForwardBatch:
    """Lay the rows of all sequences one after the other, each after its committed tokens.

    Drafted rows of a tree stand in the order of the draft.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    sequences = []
    for rows in step:
        cache, num_rows = rows.sequence.cache, len(rows.token_ids)
        assert cache is not None
        committed = cache.table.length
        token_ids += rows.token_ids
        parents = rows.parents
        positions += [committed + depth for depth in depths(parents, num_rows)]
        packed_pages = cache.table.packed_pages
        num_pages = pages_for(committed + num_rows) - len(packed_pages)
        sequences.append(
            SequenceRows(
                slot=cache.slot,
                num_rows=num_rows,
                committed=committed,
                pages=cache.table.pages[:num_pages],
                logit_rows=rows.logit_rows,
                num_draft=rows.num_draft,
                packed_pages=packed_pages,
                parents=parents,
            )
        )
    return ForwardBatch(
        token_ids=_numbers(token_ids, device),
        positions=_numbers(positions, device),
        sequences=tuple(sequences),
    )


def _numbers(values: list[int], device: torch.device | str) -> torch.Tensor:
    """Return int64; by way of numpy it takes a third of the time, once a step."""
    return torch.from_numpy(np.array(values, dtype=np.int64)).to(device)
