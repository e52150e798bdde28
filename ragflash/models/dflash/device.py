"""A drafter on a card: its passes captured, its rings in pages, one read of the host a draft."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ragflash.errors import ModelError
from ragflash.models.device.graphs import GraphMemory, StepGraphs
from ragflash.models.device.matrices import RecordLinear, gathered
from ragflash.models.dflash.block_tables import BlockTables, PositionTables
from ragflash.models.dflash.config import DFlashConfig
from ragflash.models.dflash.context import Candidates, DraftContext
from ragflash.models.dflash.fused import FusedDrafter
from ragflash.models.dflash.model import DFlashModel, DFlashParts
from ragflash.models.dflash.paged_ring import PagedRing, PagedRings
from ragflash.models.dflash.selector import Table
from ragflash.models.linear import PackedEmbedding
from ragflash_kernels.qmatmul import MAX_ROWS

CONTEXT_ROWS = (1, 2, 4, 8, 16, MAX_ROWS)  # that features of a step are padded to
_HEAD_DIMS = (64, 128, 256)  # that kernels of attention know
_LARGEST_EAGER = 16  # rows: with more, products lose by starting early


class DeviceDFlash:
    """A drafter on a card, shared by all sequences; called from the worker thread only.

    Args:
        model: Loaded with matrices as records.
        device: Where its tensors are.
        max_slots: Sequences of the engine.
        chunk_tokens: Most features that are appended at once.
        workspace: For products of many rows, whose dtype is its; a small one is not used.
        rings: Where keys and values are kept; `None` makes them.

    Raises:
        ModelError: A card cannot run it.
    """

    def __init__(
        self,
        model: DFlashModel,
        device: torch.device,
        *,
        max_slots: int,
        chunk_tokens: int,
        workspace: torch.Tensor,
        rings: PagedRings | None = None,
    ) -> None:
        self.config = config = model.config
        on_card = device.type == "cuda"
        _check(config, model.parts, on_card=on_card)
        self.rings = rings or PagedRings(config, max_slots=max_slots, device=device)
        is_hopper = on_card and torch.cuda.get_device_capability(device)[0] == 9
        eager = is_hopper and config.block_size <= _LARGEST_EAGER
        self._drafter = FusedDrafter(config, _gathering(model.parts), model.target, eager)
        self._chunk_tokens = chunk_tokens
        self._unpacked = _large_enough(workspace, _work_values(model.parts))
        self._block = BlockTables(config, self.rings, device)
        self._few = PositionTables({}, max_rows=MAX_ROWS, rings=self.rings, device=device)
        self._many = PositionTables({}, max_rows=chunk_tokens, rings=self.rings, device=device)
        shape = MAX_ROWS, config.feature_size
        self._features = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        memory = GraphMemory(device)
        self._drafts = StepGraphs(self._draft_block, device, memory)
        self._contexts = StepGraphs(self._append_few, device, memory)
        with torch.inference_mode():
            self._drafts.capture([config.block_size])
            self._contexts.capture(CONTEXT_ROWS[::-1])
            if on_card:  # so that no prompt waits for kernels to be compiled
                self._append_many(self._unpacked.new_zeros(MAX_ROWS + 1, config.feature_size))

    @torch.inference_mode()
    def append(self, features: torch.Tensor, ring: PagedRing) -> None:
        """Append the features `[N, taps · H]` of a sequence's next tokens to its ring."""
        slot = ring.claim()
        for rows in torch.split(features, self._chunk_tokens):
            self._write(rows, slot, ring.end)
            ring.advance(len(rows))

    @torch.inference_mode()
    def draft(self, pending: int, width: int, top_k: int, ring: PagedRing) -> Candidates:
        """See `DraftContext.draft`; whole blocks are computed whatever the width."""
        self._block.describe(pending, ring.claim(), ring)
        found = self._drafts(self.config.block_size).cpu()[:width]
        count = (found.shape[1] - 1) // 2
        if self.config.selector is not None:
            top_k = max(top_k, self.config.selector.top_k)
        token_ids, bits = found[:, :count], found[:, count : 2 * count]
        return Candidates(
            token_ids[:, :top_k].long(),
            bits.view(torch.float32)[:, :top_k],
            tuple(found[:, -1].tolist()),
        )

    def _write(self, features: torch.Tensor, slot: int, position: int) -> None:
        num_rows = len(features)
        if num_rows <= MAX_ROWS:
            self._few.fill(slot, position, num_rows)
            self._features[:num_rows].copy_(features)
            self._contexts(next(count for count in CONTEXT_ROWS if count >= num_rows))
        else:
            self._many.fill(slot, position, num_rows)
            self._append_many(features.to(self._unpacked.dtype))

    def _append_few(self, num_rows: int) -> None:
        self._drafter.context(self._features[:num_rows], self._few)

    def _append_many(self, features: torch.Tensor) -> None:
        self._drafter.context(features, self._many, unpacked=self._unpacked)

    def _draft_block(self, _: int) -> torch.Tensor:
        return self._drafter.candidates(self._block)


class DeviceSequence(DraftContext):
    """Kept on a card.

    Args:
        model: The drafter.
        slot: Returns the sequence's slot, which it has while it runs.
    """

    def __init__(self, model: DeviceDFlash, slot: Callable[[], int]) -> None:
        self._model = model
        self._ring = PagedRing(model.rings, slot)
        super().__init__(model.config, self._ring)

    def _append(self, features: torch.Tensor) -> None:
        self._model.append(features, self._ring)

    def _draft(self, pending: int, width: int, top_k: int) -> Candidates:
        return self._model.draft(pending, width, top_k, self._ring)


def _check(config: DFlashConfig, parts: DFlashParts, *, on_card: bool) -> None:
    if not isinstance(parts.features, RecordLinear):
        raise ModelError("a card drafts from a GGUF file: convert the drafter's safetensors to one")
    if config.block_size > MAX_ROWS:
        raise ModelError(f"blocks of {config.block_size} rows: a card drafts {MAX_ROWS} at most")
    if on_card and config.head_dim not in _HEAD_DIMS:
        raise ModelError(
            f"the drafter has heads of {config.head_dim} values; a card attends with "
            f"{', '.join(map(str, _HEAD_DIMS))}: choose --device cpu, or another drafter"
        )


def _gathering(parts: DFlashParts) -> DFlashParts:
    """Have a selector read its tables by launches alone."""
    selector = parts.selector
    if selector is None:
        return parts
    tables = _gatherer(selector.before), _gatherer(selector.after)
    return replace(parts, selector=replace(selector, before=tables[0], after=tables[1]))


def _gatherer(table: Table) -> Table:
    assert isinstance(table, PackedEmbedding)
    return partial(gathered, table)


def _work_values(parts: DFlashParts) -> int:
    """Return the values of the largest matrix that rows of a prompt multiply with."""
    matrices = [parts.features, *(layer.attention.key_value for layer in parts.layers)]
    return max(one.largest_values for one in matrices if isinstance(one, RecordLinear))


def _large_enough(workspace: torch.Tensor, num_values: int) -> torch.Tensor:
    return workspace if workspace.numel() >= num_values else workspace.new_empty(num_values)
