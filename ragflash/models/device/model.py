"""A model on a card."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragflash.errors import ModelError
from ragflash.kvcache.allocator import PAGE_TOKENS, pages_for
from ragflash.kvcache.pages import KVLayout, KVPages
from ragflash.models.contract import ForwardBatch, GreedyModel, SequenceRows
from ragflash.models.decoder import Decoder
from ragflash.models.device.chunks import Chunks
from ragflash.models.device.graphs import (
    ROW_COUNTS,
    GraphMemory,
    StepGraphs,
    StepKind,
    step_kinds,
)
from ragflash.models.device.lowering import lower
from ragflash.models.device.programme import Hidden
from ragflash.models.device.steps import FewRows, ManyRows
from ragflash.models.device.tables import MAX_ROWS, ChunkTables, StepTables, TableSizes
from ragflash.models.device.tokens import StepAhead, TokenSender, next_rows
from ragflash.models.device.workspace import (
    largest_matrix,
    scratch_of,
    states_of,
    windows_of,
)
from ragflash_kernels.gated_delta import delta_commit
from ragflash_kernels.sample import largest

_EAGER_ROWS = 16  # with more, products lose by starting early
_WARM_PAGES = 64  # of history, so many that it is cut like a long one


@dataclass(frozen=True, slots=True)
class Predictions:
    """What rows predict.

    Attributes:
        logits: float32 `[R, V]`.
        tokens: int32 `[R]`, where the first largest of each is.
    """

    logits: torch.Tensor
    tokens: torch.Tensor


class DeviceModel(GreedyModel):
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
        num_tokens: int,
        max_slots: int,
        exact_pages: int,
        packed_pages: int,
        chunk_tokens: int,
        chunk_counts: tuple[int, ...] = (),
        row_counts: tuple[int, ...] = ROW_COUNTS,
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
        self._states = states_of(self._programme, max_slots, device)
        self._dtype = dtype
        self._chunk_tokens = chunk_tokens
        self._unpacked = torch.empty(largest_matrix(self._programme), dtype=dtype, device=device)
        self._scratch = scratch_of(self._programme, chunk_tokens, device)
        # Numbers that are there already need no copy.
        self._numbers = torch.arange(max(MAX_ROWS, max_slots) + 1, dtype=torch.int32, device=device)
        self._has_tape: set[int] = set()
        self._early: set[int] = set()  # slots whose last rows are part of their state already
        self._sender = TokenSender(max_slots * MAX_ROWS, device)
        self._ahead: StepAhead | None = None
        is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        self._eager_rows = _EAGER_ROWS if is_hopper else 0
        self._row_counts = row_counts
        max_rows = max(chunk_tokens, *chunk_counts, 0)
        self._chunk = ChunkTables(max_rows, exact_pages, packed_pages, device)
        memory = GraphMemory(device)
        self._chunks = Chunks(
            self._programme,
            pages,
            self._chunk,
            row_counts=() if self._states is not None else chunk_counts,
            unpacked=self._unpacked,
            dtype=dtype,
            memory=memory,
        )
        self._graphs = StepGraphs(self._few, device, memory)
        self._graphs.capture(step_kinds(row_counts, may_have_packed=packed_pages > 0))

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
        self._check(pages)
        self._ahead = None
        results = self._compute(batch.token_ids.tolist(), batch.sequences)
        if not results:
            return torch.empty((0, self.vocab_size), device=self._device)
        logits = [result.logits for result in results]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    @torch.inference_mode()
    def forward_greedy(
        self, batch: ForwardBatch, pages: KVPages, *, goes_on: bool = False
    ) -> list[int]:
        """See `GreedyModel`; tokens are read where a graph left them.

        With `goes_on` the step after this one is launched before this one's tokens are waited for,
        so that the card does not wait for the host. It writes behind the committed rows only.
        """
        self._check(pages)
        token_ids, ahead = batch.token_ids.tolist(), self._ahead
        if ahead is not None and (ahead.token_ids, ahead.sequences) == (token_ids, batch.sequences):
            chosen, sent = ahead.chosen, ahead.sent
        else:
            results = self._compute(token_ids, batch.sequences)
            if not results:
                self._ahead = None
                return []
            tokens = [result.tokens for result in results]
            chosen = tokens[0] if len(tokens) == 1 else torch.cat(tokens)
            sent = self._sender.send(chosen)
        following = next_rows(batch.sequences) if goes_on else None
        if following is None or len(following) > MAX_ROWS:
            self._ahead = None
            return sent.read()
        chosen = self._run_ahead(batch.sequences, following, chosen)
        sent_ahead = self._sender.send(chosen)
        token_ids = sent.read()
        self._ahead = StepAhead(token_ids, following, chosen, sent_ahead)
        return token_ids

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
        for path in ((0,), (1,)):  # of a chain and of a tree
            self._has_tape.add(0)
            self._apply_tape(0, path)
        self._pages.exact.move((0,), ((1, 0),))
        self.reset(0)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """See `Model`."""
        if slot in self._early:
            self._early.remove(slot)
        else:
            self._apply_tape(slot, path)

    def reset(self, slot: int) -> None:
        """See `Model`."""
        self._forget(slot)
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
        self._forget(slot)
        if self._states is not None:
            tails, memories = state
            self._states.tails[:, slot].copy_(tails, non_blocking=True)
            self._states.memories[:, slot].copy_(memories, non_blocking=True)

    def _check(self, pages: KVPages) -> None:
        if pages is not self._pages:
            raise ValueError("a model on a card keeps to the pages that it was made with")

    def _forget(self, slot: int) -> None:
        self._has_tape.discard(slot)
        self._early.discard(slot)

    def _apply_tape(self, slot: int, path: Sequence[int]) -> None:
        if self._states is None or slot not in self._has_tape:
            return
        self._has_tape.remove(slot)
        if path:
            slots, counts = self._numbers[slot : slot + 1], self._numbers[len(path) : len(path) + 1]
            delta_commit(self._states, slots, counts, paths=_paths(path, self._device))

    def _compute(
        self, token_ids: Sequence[int], sequences: Sequence[SequenceRows]
    ) -> list[Predictions]:
        """Compute the rows of all sequences; return what wanted rows predict, in order."""
        results, first = [], 0
        groups = _groups(sequences)
        for group in groups:
            end = first + sum(rows.num_rows for rows in group)
            result = self._group(token_ids[first:end], group, is_alone=len(groups) == 1)
            if result is not None:
                results.append(result)
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
            self._apply_tape(rows.slot, range(rows.num_rows))
            self._early.add(rows.slot)
        self._tables.fill([0] * len(following), following)
        self._tables["token_ids"][: len(following)].copy_(chosen)
        return self._replay(following).tokens[: len(following)]

    def _replay(self, group: Sequence[SequenceRows]) -> Predictions:
        """Compute the rows that the tables describe."""
        num_rows = sum(rows.num_rows for rows in group)
        if self._states is not None:
            self._has_tape.update(rows.slot for rows in group)
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
            self._states,
            has_packed=kind.has_packed,
            eager=num_rows <= self._eager_rows,
        )
        hidden = self._programme.run(tables["token_ids"][:num_rows], step)
        logits = self._programme.logits(hidden, step)
        return Predictions(logits, largest(logits, self._num_tokens, eager=step.eager))

    def _many(self, token_ids: Sequence[int], rows: SequenceRows) -> Predictions | None:
        if rows.parents is not None:
            raise ModelError(f"a tree of {rows.num_rows} rows on a card: {MAX_ROWS} are the most")
        self._has_tape.discard(rows.slot)
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
            self._states,
            self._unpacked,
            self._scratch,
            self._dtype,
        )
        return self._programme.run(tables["token_ids"][: rows.num_rows], step)


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


def _paths(path: Sequence[int], device: torch.device) -> torch.Tensor | None:
    """Return rows as the one path of `delta_commit`; `None` where they are the first ones."""
    if path[-1] == len(path) - 1:
        return None
    rows = torch.tensor([path], dtype=torch.int32)
    return (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)
