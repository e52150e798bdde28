"""The model and its pages: the only place where the engine touches either."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Run
from typing import cast

import torch

from ragflash.engine.batch import Rows, build_batch
from ragflash.engine.chooser import Predicted
from ragflash.engine.row_drafters import RowDrafting, export_parts, load_parts
from ragflash.engine.sequence import Cache, Sequence
from ragflash.kvcache.allocator import PAGE_TOKENS, PageForm
from ragflash.kvcache.pages import KVPages
from ragflash.kvcache.segments import PendingSegment, StoredSegment
from ragflash.models.contract import GreedyModel, Model


class Runner:
    """Runs forwards and keeps cache and recurrent state in step; for the worker thread only.

    Args:
        model: Loaded.
        pages: Its keys and values.
        vocab_size: Of the tokenizer.
        device: Of the model.
        row_drafting: Drafters that read rows of the model; `None` for none.

    Attributes:
        num_forwards: Calls of the model so far.
        num_rows: Rows that they computed.
    """

    def __init__(
        self,
        model: Model,
        pages: KVPages,
        *,
        vocab_size: int,
        device: torch.device | str = "cpu",
        row_drafting: RowDrafting | None = None,
    ) -> None:
        self._model = model
        self._greedy = model if isinstance(model, GreedyModel) else None
        self._pages = pages
        self._vocab_size = vocab_size
        self._device = device
        self._row_drafting = row_drafting
        self.num_forwards = 0
        self.num_rows = 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether the model computes while this thread does something else."""
        return self._greedy is not None

    @torch.inference_mode()
    def forward(self, step: Run[Rows], meanwhile: Callable[[], None] = lambda: None) -> Predicted:
        """Compute the rows of a step; return what its wanted rows predict, in order.

        Tokens come from a model that can choose them, if no sequence needs logits; else logits
        without those beyond the tokenizer's vocabulary, which some files are padded with.

        Args:
            step: Rows of all sequences.
            meanwhile: Called once; while the rows are computed, where that is elsewhere.
        """
        batch = build_batch(step, self._device)
        self.num_forwards += 1
        for rows in step:
            self.num_rows += len(rows.token_ids)
            rows.sequence.counters.forward_rows += len(rows.token_ids)
        told = self._row_drafting
        if self._greedy is not None and all(map(_is_greedy, step)):
            goes_on = all(map(_goes_on, step))
            if told is not None:
                return told.forward_greedy(batch, goes_on=goes_on, meanwhile=meanwhile)
            return self._greedy.forward_greedy(
                batch, self._pages, goes_on=goes_on, meanwhile=meanwhile
            )
        logits = self._model.forward(batch, self._pages) if told is None else told.forward(batch)
        meanwhile()
        return logits[:, : self._vocab_size]

    def commit(self, rows: Rows, path: Run[int]) -> None:
        """Make rows of the last forward, a path, part of a sequence; pack what got old by it."""
        cache = rows.sequence.cache
        assert cache is not None
        table = cache.table
        self._model.commit(cache.slot, path)
        first = table.length - PAGE_TOKENS * len(table.packed_pages)
        moves = [(first + row, first + at) for at, row in enumerate(path) if row != at]
        self._pages.exact.move(table.pages, moves)
        if self._row_drafting is not None:  # while its pages are as they were computed
            self._row_drafting.tell(rows, path)
        self._pages.convert(table.advance(len(path)))

    def prepare(self, sequence: Sequence) -> None:
        """Give a new sequence the drafters that are told its rows."""
        if self._row_drafting is not None:
            sequence.row_drafters = self._row_drafting.drafters(sequence)

    def start(self, sequence: Sequence) -> None:
        """Give an admitted sequence the cache and the state that it begins with."""
        cache = sequence.cache
        assert cache is not None
        if cache.opened is None:
            self._model.reset(cache.slot)
            return
        self._pages.copy(cache.opened.copies)
        state = cast("tuple[torch.Tensor, ...]", cache.opened.state)
        self._model.restore(cache.slot, state)
        load_parts(sequence, cache.opened.segment.parts)

    def snapshot(self, cache: Cache) -> tuple[torch.Tensor, ...]:
        """Copy a sequence's recurrent state."""
        return self._model.snapshot(cache.slot)

    def parts(self, sequence: Sequence) -> Mapping[str, bytes]:
        """Copy the state of the drafters that are told a sequence's rows."""
        return export_parts(sequence)

    def fill(self, pending: PendingSegment) -> None:
        """Copy what a segment that is being stored needs pages of its own for."""
        self._pages.copy(pending.copies)

    def segment_bytes(self, segment: StoredSegment, parent: StoredSegment | None) -> int:
        """Count the bytes of pages, state and parts that a segment has beyond the one before it."""
        size = sum(state.nbytes for state in segment.state if isinstance(state, torch.Tensor))
        size += sum(map(len, segment.parts.values()))
        exact = set(segment.pages).difference(parent.pages if parent else ())
        packed = set(segment.packed_pages).difference(parent.packed_pages if parent else ())
        for form, own in ((PageForm.EXACT, exact), (PageForm.PACKED, packed)):
            if own:
                size += len(own) * self._pages.page(form, 0).nbytes
        return size

    def state_shapes(self) -> tuple[torch.Tensor, ...]:
        """Return tensors like those of a snapshot; for a model that computes nothing yet."""
        self._model.reset(0)
        return tuple(torch.empty_like(state, device="cpu") for state in self._model.snapshot(0))


def _is_greedy(rows: Rows) -> bool:
    return not rows.logit_rows or rows.sequence.takes_largest


def _goes_on(rows: Rows) -> bool:
    """Tell whether the token that rows give will most likely be the next step's only row."""
    sequence = rows.sequence
    output = sequence.output
    if output is None or output.num_left <= 1:
        return False
    return sequence.drafter is None or (rows.draft is not None and rows.draft.goes_on)
