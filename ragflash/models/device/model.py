"""A model on a card."""

from collections.abc import Iterable, Sequence

import torch

from ragflash.errors import ModelError
from ragflash.kvcache.allocator import PAGE_TOKENS, pages_for
from ragflash.kvcache.pages import KVLayout, KVPages
from ragflash.models.contract import ForwardBatch, Model, SequenceRows
from ragflash.models.decoder import Decoder
from ragflash.models.device.graphs import ROW_COUNTS, StepGraphs
from ragflash.models.device.lowering import lower
from ragflash.models.device.programme import FusedAttention, FusedDeltaNet, Programme
from ragflash.models.device.steps import FewRows, ManyRows, RowPlaces
from ragflash.models.device.tables import MAX_ROWS, StepTables, TableSizes
from ragflash_kernels.gated_delta import DeltaStates, delta_commit
from ragflash_kernels.prefill_attention import PrefillWorkspace

_EAGER_ROWS = 16  # with more, products lose by starting early
_WARM_PAGES = 64  # of history, so many that it is cut like a long one


class DeviceModel(Model):
    """Runs a decoder's programme: few rows by graphs, more rows of a sequence at once.

    In which way a sequence's rows are computed depends on their number alone, never on what runs
    beside them.

    Args:
        decoder: Loaded with matrices as records.
        device: Where its tensors are.
        pages: Keys and values; graphs know them by address, so a forward takes no others.
        max_slots: Sequences of a step.
        exact_pages: Most exact pages of a sequence.
        packed_pages: Most packed ones; 0 when there is one form only.
        chunk_tokens: Most rows of a sequence in a forward.
        row_counts: Of captured steps; a step takes the smallest that is enough. With the largest
            alone every row is computed by the same instructions, whatever is computed beside it.
        dtype: Of many rows and the matrices that they are multiplied with.

    Raises:
        ModelError: A layer has no fused form, or packed keys have offsets.
    """

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        pages: KVPages,
        *,
        max_slots: int,
        exact_pages: int,
        packed_pages: int,
        chunk_tokens: int,
        row_counts: tuple[int, ...] = ROW_COUNTS,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if pages.packed is not None and any(o is not None for o in pages.packed.offsets):
            raise ModelError("a card does not add offsets of packed keys to scores yet")
        self._decoder = decoder
        self._device = device
        self._pages = pages
        self._programme = lower(decoder)
        windows = tuple(_windows(self._programme)) or (None,)
        self._tables = StepTables(TableSizes(max_slots, exact_pages, packed_pages, windows), device)
        self._states = _states(self._programme, max_slots, device)
        self._dtype = dtype
        self._chunk_tokens = chunk_tokens
        self._unpacked = torch.empty(_largest(self._programme), dtype=dtype, device=device)
        self._scratch = _scratch(self._programme, chunk_tokens, device)
        # Numbers that are there already need no copy.
        self._numbers = torch.arange(max(MAX_ROWS, max_slots) + 1, dtype=torch.int32, device=device)
        self._has_tape: set[int] = set()
        is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        self._eager_rows = _EAGER_ROWS if is_hopper else 0
        self._row_counts = row_counts
        self._graphs = StepGraphs(self._few, device)
        self._graphs.capture(row_counts)

    @property
    def vocab_size(self) -> int:
        """See `Model`."""
        return self._decoder.vocab_size

    @property
    def context_tokens(self) -> int:
        """See `Model`."""
        return self._decoder.context_tokens

    @property
    def compute_dtype(self) -> torch.dtype:
        """What many rows are multiplied in; few rows are on a grid of int8."""
        return self._dtype

    @property
    def kv_layout(self) -> KVLayout:
        """See `Model`."""
        return self._decoder.kv_layout

    @property
    def is_recurrent(self) -> bool:
        """See `Model`."""
        return self._states is not None

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pages: KVPages) -> torch.Tensor:
        """See `Model`; logits are overwritten by the next forward."""
        if pages is not self._pages:
            raise ValueError("a model on a card keeps to the pages that it was made with")
        token_ids = batch.token_ids.tolist()
        results, first = [], 0
        groups = _groups(batch.sequences)
        for group in groups:
            end = first + sum(rows.num_rows for rows in group)
            logits = self._group(token_ids[first:end], group, is_alone=len(groups) == 1)
            if logits is not None:
                results.append(logits)
            first = end
        if not results:
            return torch.empty((0, self.vocab_size), device=self._device)
        return results[0] if len(results) == 1 else torch.cat(results)

    def warm_up(self) -> None:
        """Read prompts that nobody asked, with and without history; overwrites slot 0 and pages.

        Afterwards kernels are compiled and memory is reserved; the plans of cuDNN are made for the
        calling thread alone.
        """
        exact, packed = self._tables.sizes.exact_pages, self._tables.sizes.packed_pages
        num_rows = min(self._chunk_tokens, self._pages.exact.num_pages * PAGE_TOKENS)
        for num_packed in {0, min(packed, _WARM_PAGES)}:
            before = min(exact, self._pages.exact.num_pages) * PAGE_TOKENS - num_rows
            pages = tuple(range(pages_for(before + num_rows)))
            committed = before + num_packed * PAGE_TOKENS
            rows = SequenceRows(
                0, num_rows, committed, pages, (num_rows - 1,), packed_pages=(0,) * num_packed
            )
            ids = torch.zeros(num_rows, dtype=torch.int64)
            self.forward(ForwardBatch(ids, ids, (rows,)), self._pages)
        self.reset(0)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """See `Model`."""
        num_rows = len(path)
        if self._states is None or slot not in self._has_tape:
            return
        self._has_tape.remove(slot)
        if num_rows:
            numbers = self._numbers
            delta_commit(self._states, numbers[slot : slot + 1], numbers[num_rows : num_rows + 1])

    def reset(self, slot: int) -> None:
        """See `Model`."""
        self._has_tape.discard(slot)
        if self._states is not None:
            self._states.memories[:, slot].zero_()
            self._states.tails[:, slot].zero_()

    def snapshot(self, slot: int) -> tuple[torch.Tensor, ...]:
        """See `Model`: tails `[L, K - 1, C]` and memories `[L, Hv, D, Dv]`, on the host.

        A stored prompt then takes nothing of the card but its pages. The copy is done when all that
        was launched before it is; only `restore` may read it earlier.
        """
        if self._states is None:
            return ()
        return _to_host(self._states.tails[:, slot]), _to_host(self._states.memories[:, slot])

    def restore(self, slot: int, state: tuple[torch.Tensor, ...]) -> None:
        """See `Model`."""
        self._has_tape.discard(slot)
        if self._states is not None:
            tails, memories = state
            self._states.tails[:, slot].copy_(tails, non_blocking=True)
            self._states.memories[:, slot].copy_(memories, non_blocking=True)

    def _group(
        self, token_ids: Sequence[int], group: Sequence[SequenceRows], *, is_alone: bool
    ) -> torch.Tensor | None:
        if group[0].num_rows > MAX_ROWS:
            return self._many(token_ids, group[0])
        wanted, first = [], 0
        for rows in group:
            wanted += [first + row for row in rows.logit_rows]
            first += rows.num_rows
        self._tables.fill(token_ids, group)
        logits = self._graphs(next(count for count in self._row_counts if count >= first))
        if self._states is not None:
            self._has_tape.update(rows.slot for rows in group)
        if not wanted:
            return None
        if is_alone and wanted == [*range(wanted[0], wanted[-1] + 1)]:
            return logits[wanted[0] : wanted[-1] + 1]
        return logits[torch.tensor(wanted, device=self._device)]

    def _few(self, num_rows: int) -> torch.Tensor:
        """Compute the rows that the tables describe; the same launches every time."""
        tables = self._tables
        step = FewRows(
            num_rows,
            tables,
            self._pages,
            self._programme.angles(tables["positions"][:num_rows]),
            self._states,
            eager=num_rows <= self._eager_rows,
        )
        logits = self._programme.run(tables["token_ids"][:num_rows], step, None)
        assert logits is not None
        return logits

    def _many(self, token_ids: Sequence[int], rows: SequenceRows) -> torch.Tensor | None:
        def whole(values: object) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32).to(self._device, non_blocking=True)

        self._has_tape.discard(rows.slot)
        positions = whole(range(rows.committed, rows.committed + rows.num_rows))
        step = ManyRows(
            rows,
            self._pages,
            RowPlaces.of(rows, self._device),
            self._programme.angles(positions),
            self._states,
            self._unpacked,
            self._scratch,
            self._dtype,
        )
        wanted = torch.tensor(rows.logit_rows, dtype=torch.int64, device=self._device)
        return self._programme.run(whole(token_ids), step, wanted)


def _to_host(state: torch.Tensor) -> torch.Tensor:
    on_card = state.device.type == "cuda"
    host = torch.empty(state.shape, dtype=state.dtype, pin_memory=on_card)
    return host.copy_(state, non_blocking=on_card)


def _groups(sequences: Sequence[SequenceRows]) -> list[list[SequenceRows]]:
    """Put neighbours together as long as their rows fit one step; many rows stay alone."""
    groups: list[list[SequenceRows]] = []
    room = 0
    for rows in sequences:
        if rows.num_rows > room:
            groups.append([])
            room = MAX_ROWS
        groups[-1].append(rows)
        room -= rows.num_rows
    return groups


def _windows(programme: Programme) -> Iterable[int | None]:
    mixers = [block.mixer for block in programme.blocks]
    return dict.fromkeys(mixer.kv.window for mixer in mixers if isinstance(mixer, FusedAttention))


def _states(programme: Programme, max_slots: int, device: torch.device) -> DeltaStates | None:
    mixers = [block.mixer for block in programme.blocks]
    deltas = [mixer for mixer in mixers if isinstance(mixer, FusedDeltaNet)]
    if not deltas:
        return None
    return DeltaStates.allocate(deltas[0].sizes, layers=len(deltas), slots=max_slots, device=device)


def _scratch(
    programme: Programme, chunk_tokens: int, device: torch.device
) -> PrefillWorkspace | None:
    mixers = [block.mixer for block in programme.blocks]
    attentions = [mixer for mixer in mixers if isinstance(mixer, FusedAttention)]
    if not attentions:
        return None
    return PrefillWorkspace(
        max_rows=chunk_tokens,
        num_heads=max(mixer.num_heads for mixer in attentions),
        num_kv_heads=max(mixer.num_kv_heads for mixer in attentions),
        head_dim=max(mixer.sizes.head_dim for mixer in attentions),
        device=device,
    )


def _largest(programme: Programme) -> int:
    """Return the values of the largest matrix that many rows multiply with."""
    largest = 0
    for block in programme.blocks:
        mixer = block.mixer
        matrices = [block.ffn.gate_up, block.ffn.down]
        if isinstance(mixer, FusedAttention | FusedDeltaNet):
            matrices += [mixer.projections, mixer.output]
        largest = max(largest, *(matrix.largest_values for matrix in matrices))
    return largest
