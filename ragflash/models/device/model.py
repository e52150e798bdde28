"""A model on a card."""

from collections.abc import Callable, Sequence

import torch

from ragflash.errors import ModelError
from ragflash.kvcache.allocator import PAGE_TOKENS, pages_for
from ragflash.kvcache.pages import KVLayout, KVPages
from ragflash.models.contract import (
    ForwardBatch,
    GreedyTappedModel,
    SequenceRows,
    Tapped,
    TappedTokens,
)
from ragflash.models.decoder import Decoder
from ragflash.models.device.chunks import Chunks
from ragflash.models.device.graphs import (
    ROW_COUNTS,
    GraphMemory,
    StepGraphs,
    StepKind,
    step_kinds,
)
from ragflash.models.device.lowering import lower, lower_mtp
from ragflash.models.device.mtp import DeviceMtp, FusedMtp, largest_of
from ragflash.models.device.programme import Hidden
from ragflash.models.device.states import SlotTapes
from ragflash.models.device.steps import FewRows, ManyRows
from ragflash.models.device.tables import (
    MAX_ROWS,
    ChunkTables,
    DraftTables,
    StepTables,
    TableSizes,
    step_groups,
)
from ragflash.models.device.taps import StreamTaps
from ragflash.models.device.tokens import Predictions, StepAhead, TokenSender, next_rows
from ragflash.models.device.workspace import (
    largest_matrix,
    scratch_of,
    states_of,
    windows_of,
)
from ragflash.models.mtp import MAX_DEPTH
from ragflash_kernels.sample import largest

_EAGER_ROWS = 16  # with more, products lose by starting early
_WARM_PAGES = 64  # of history, so many that it is cut like a long one


class DeviceModel(GreedyTappedModel):
    """Runs a decoder's programme: few rows by graphs, more rows of a sequence at once.

    In which way a sequence's rows are computed depends on their number alone, never on what runs
    beside them.

    Args:
        decoder: Loaded with matrices as records.
        device: Where its tensors are.
        pages: Keys and values; graphs know them by address, so a forward takes no others.
        num_tokens: Of the vocabulary; columns of logits from there on are no tokens.
        max_slots: Sequences of a step.
        exact_pages: Most exact pages of a sequence.
        packed_pages: Most packed ones; 0 when there is one form only.
        chunk_tokens: Most rows of a sequence in a forward.
        chunk_counts: Of captured chunks; shorter ones are padded, longer ones launched one by one.
        row_counts: Of captured steps; a step takes the smallest that is enough. With the largest
            alone every row is computed by the same instructions, whatever is computed beside it.
        tap_layers: Whose rows drafters read, beside those of the last; `None` keeps no rows.
        has_mtp: Whether the decoder's block of multi-token prediction is run.
        dtype: Of many rows and the matrices that they are multiplied with.

    Attributes:
        mtp: Runs the block of multi-token prediction, if there is one and it is to be run.

    Raises:
        ModelError: A layer has no fused form, or packed keys have offsets.
    """

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        pages: KVPages,
        *,
        num_tokens: int,
        max_slots: int,
        exact_pages: int,
        packed_pages: int,
        chunk_tokens: int,
        chunk_counts: tuple[int, ...] = (),
        row_counts: tuple[int, ...] = ROW_COUNTS,
        tap_layers: tuple[int, ...] | None = None,
        has_mtp: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if pages.packed is not None and any(o is not None for o in pages.packed.offsets):
            raise ModelError("a card does not add offsets of packed keys to scores yet")
        self._decoder = decoder
        self._device = device
        self._pages = pages
        self._num_tokens = min(num_tokens, decoder.vocab_size)
        self._programme = lower(decoder)
        windows = windows_of(self._programme)
        self._tables = StepTables(TableSizes(max_slots, exact_pages, packed_pages, windows), device)
        states = states_of(self._programme, max_slots, device)
        self._states = SlotTapes(states, max_rows=MAX_ROWS, max_slots=max_slots, device=device)
        self._dtype = dtype
        self._chunk_tokens = chunk_tokens
        block = lower_mtp(decoder.mtp) if has_mtp and decoder.mtp is not None else None
        size = max(largest_matrix(self._programme), 0 if block is None else largest_of(block))
        self._unpacked = torch.empty(size, dtype=dtype, device=device)
        self._scratch = scratch_of(self._programme, chunk_tokens, device)
        self._sender = TokenSender(max_slots * MAX_ROWS, device)
        self._ahead: StepAhead | None = None
        is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        self._eager_rows = _EAGER_ROWS if is_hopper else 0
        self._row_counts = row_counts
        max_rows = max(chunk_tokens, *chunk_counts, MAX_ROWS)
        self._chunk = ChunkTables(max_rows, exact_pages, packed_pages, device)
        self._taps: StreamTaps | None = None
        if tap_layers is not None:
            width = len(self._programme.norm.weight)
            self._taps = StreamTaps(tap_layers, width, max_rows=max_rows, like=self._unpacked)
        memory = GraphMemory(device)
        self._chunks = Chunks(
            self._programme, pages, self._chunk,
            row_counts=() if self.is_recurrent else chunk_counts, unpacked=self._unpacked,
            dtype=dtype, memory=memory, taps=self._taps,
        )  # fmt: skip
        self._graphs = StepGraphs(self._few, device, memory)
        self._graphs.capture(step_kinds(row_counts, may_have_packed=packed_pages > 0))
        self.mtp = None if block is None else self._runner_of(block)

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
    def workspace(self) -> torch.Tensor:
        """What matrices are unpacked into for products of many rows, of their dtype."""
        return self._unpacked

    @property
    def kv_layout(self) -> KVLayout:
        """See `Model`."""
        return self._decoder.kv_layout

    @property
    def is_recurrent(self) -> bool:
        """See `Model`."""
        return self._states.deltas is not None

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pages: KVPages) -> torch.Tensor:
        """See `Model`; logits are overwritten by the next forward."""
        self._check(pages)
        self._ahead = None
        results = self._compute(batch.token_ids.tolist(), batch.sequences)
        if not results:
            return torch.empty((0, self.vocab_size), device=self._device)
        logits = [result.logits for result in results]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    @torch.inference_mode()
    def forward_greedy(
        self,
        batch: ForwardBatch,
        pages: KVPages,
        *,
        goes_on: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[int]:
        """See `GreedyModel`; tokens are read where a graph left them.

        With `goes_on` the step after this one is launched before this one's tokens are waited for,
        so that the card does not wait for the host. It writes behind the committed rows only.
        """
        self._check(pages)
        token_ids, ahead = batch.token_ids.tolist(), self._ahead
        if ahead is not None and (ahead.token_ids, ahead.sequences) == (token_ids, batch.sequences):
            chosen, sent = ahead.chosen, ahead.sent
            if self._taps is not None:
                self._taps.begin(len(token_ids), is_alone=True)
        else:
            results = self._compute(token_ids, batch.sequences)
            if not results:
                self._ahead = None
                meanwhile()
                return []
            tokens = [result.tokens for result in results]
            chosen = tokens[0] if len(tokens) == 1 else torch.cat(tokens)
            sent = self._sender.send(chosen)
        following = next_rows(batch.sequences) if goes_on else None
        if following is None or len(following) > MAX_ROWS:
            self._ahead = None
            meanwhile()
            return sent.read()
        chosen = self._run_ahead(batch.sequences, following, chosen)
        sent_ahead = self._sender.send(chosen)
        meanwhile()
        token_ids = sent.read()
        self._ahead = StepAhead(token_ids, following, chosen, sent_ahead)
        return token_ids

    def forward_tapped(
        self, batch: ForwardBatch, pages: KVPages, tap_layers: Sequence[int]
    ) -> Tapped:
        """See `TappedModel`; the layers are those that the model was made with."""
        taps = self._taps_of(tap_layers)
        logits = self.forward(batch, pages)
        return Tapped(logits, taps.stream, taps.taps)

    def forward_greedy_tapped(
        self,
        batch: ForwardBatch,
        pages: KVPages,
        tap_layers: Sequence[int],
        *,
        goes_on: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> TappedTokens:
        """See `GreedyTappedModel`."""
        taps = self._taps_of(tap_layers)
        tokens = self.forward_greedy(batch, pages, goes_on=goes_on, meanwhile=meanwhile)
        return TappedTokens(tokens, taps.stream, taps.taps)

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
        self._states.warm_up()
        self._pages.exact.move((0,), ((1, 0),))
        if self.mtp is not None:
            self.mtp.warm_up(rows)
        self.reset(0)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """See `Model`."""
        self._states.commit(slot, path)

    def reset(self, slot: int) -> None:
        """See `Model`."""
        self._states.reset(slot)

    def snapshot(self, slot: int) -> tuple[torch.Tensor, ...]:
        """See `Model`; on the host, so that a stored prompt takes nothing of the card but pages."""
        return self._states.snapshot(slot)

    def restore(self, slot: int, state: tuple[torch.Tensor, ...]) -> None:
        """See `Model`."""
        self._states.restore(slot, state)

    def _check(self, pages: KVPages) -> None:
        if pages is not self._pages:
            raise ValueError("a model on a card keeps to the pages that it was made with")

    def _runner_of(self, block: FusedMtp) -> DeviceMtp:
        sizes = self._tables.sizes
        return DeviceMtp(
            block, self._programme, self._pages, tables=self._chunk,
            drafts=DraftTables(MAX_DEPTH, sizes.exact_pages, sizes.packed_pages, self._device),
            row_counts=self._row_counts, eager_rows=self._eager_rows,
            num_tokens=self._num_tokens, unpacked=self._unpacked,
        )  # fmt: skip

    def _taps_of(self, tap_layers: Sequence[int]) -> StreamTaps:
        if self._taps is None or self._taps.layers != tuple(tap_layers):
            raise ValueError("a model on a card keeps rows of the layers that it was made with")
        return self._taps

    def _compute(
        self, token_ids: Sequence[int], sequences: Sequence[SequenceRows]
    ) -> list[Predictions]:
        """Compute the rows of all sequences; return what wanted rows predict, in order."""
        results, first = [], 0
        groups = step_groups(sequences)
        if self._taps is not None:
            self._taps.begin(len(token_ids), is_alone=len(groups) == 1)
        for group in groups:
            end = first + sum(rows.num_rows for rows in group)
            result = self._group(token_ids[first:end], group, is_alone=len(groups) == 1)
            if result is not None:
                results.append(result)
            if self._taps is not None:
                self._taps.collect(first, end)
            first = end
        return results

    def _run_ahead(
        self,
        sequences: Sequence[SequenceRows],
        following: Sequence[SequenceRows],
        chosen: torch.Tensor,
    ) -> torch.Tensor:
        """Launch a step of tokens that the host does not know yet; return those after them.

        Rows that are no drafts become part of a state whatever follows, so they do here.
        """
        for rows in sequences:
            self._states.commit_early(rows.slot, rows.num_rows)
        if self._taps is not None:
            self._taps.hold()
        self._tables.fill([0] * len(following), following)
        self._tables["token_ids"][: len(following)].copy_(chosen)
        return self._replay(following).tokens[: len(following)]

    def _replay(self, group: Sequence[SequenceRows]) -> Predictions:
        """Compute the rows that the tables describe."""
        num_rows = sum(rows.num_rows for rows in group)
        self._states.note({rows.slot for rows in group})
        count = next(count for count in self._row_counts if count >= num_rows)
        return self._graphs(StepKind(count, any(rows.packed_pages for rows in group)))

    def _group(
        self, token_ids: Sequence[int], group: Sequence[SequenceRows], *, is_alone: bool
    ) -> Predictions | None:
        if group[0].num_rows > MAX_ROWS:
            return self._many(token_ids, group[0])
        wanted, first = [], 0
        for rows in group:
            wanted += [first + row for row in rows.logit_rows]
            first += rows.num_rows
        self._tables.fill(token_ids, group)
        result = self._replay(group)
        if not wanted:
            return None
        if is_alone and wanted == [*range(wanted[0], wanted[-1] + 1)]:
            at = slice(wanted[0], wanted[-1] + 1)
            return Predictions(result.logits[at], result.tokens[at])
        rows_wanted = torch.tensor(wanted, device=self._device)
        return Predictions(result.logits[rows_wanted], result.tokens[rows_wanted])

    def _few(self, kind: StepKind) -> Predictions:
        """Compute the rows that the tables describe; the same launches every time."""
        tables, num_rows = self._tables, kind.num_rows
        step = FewRows(
            num_rows,
            tables,
            self._pages,
            self._programme.angles(tables["positions"][:num_rows]),
            self._states.deltas,
            has_packed=kind.has_packed,
            eager=num_rows <= self._eager_rows,
        )
        hidden = self._programme.run(tables["token_ids"][:num_rows], step, self._taps)
        logits = self._programme.logits(hidden, step)
        return Predictions(logits, largest(logits, self._num_tokens, eager=step.eager))

    def _many(self, token_ids: Sequence[int], rows: SequenceRows) -> Predictions | None:
        if rows.parents is not None:
            raise ModelError(f"a tree of {rows.num_rows} rows on a card: {MAX_ROWS} are the most")
        self._states.drop(rows.slot)
        self._chunk.fill(token_ids, rows)
        hidden = self._chunks.run(rows.num_rows) if self._chunks.take(rows) else self._launch(rows)
        wanted = torch.tensor(rows.logit_rows, dtype=torch.int64, device=self._device)
        logits = self._programme.logits_of(hidden, wanted)
        return None if logits is None else Predictions(logits, largest(logits, self._num_tokens))

    def _launch(self, rows: SequenceRows) -> Hidden:
        """Compute the chunk in the tables, kernel by kernel."""
        tables = self._chunk
        step = ManyRows(
            rows,
            tables,
            self._pages,
            self._programme.angles(tables["positions"][: rows.num_rows]),
            self._states.deltas,
            self._unpacked,
            self._scratch,
            self._dtype,
        )
        return self._programme.run(tables["token_ids"][: rows.num_rows], step, self._taps)
