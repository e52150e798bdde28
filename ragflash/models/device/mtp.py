"""A block of multi-token prediction on a card: what is committed goes in, and tokens come out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragflash.kvcache.pages import KVPages
from ragflash.models.contract import SequenceRows
from ragflash.models.device.graphs import GraphMemory, StepGraphs, StepKind, step_kinds
from ragflash.models.device.matrices import Activations, RecordLinear
from ragflash.models.device.programme import FusedAttention, FusedBlock, Pending, Programme, normed
from ragflash.models.device.steps import DeviceStep, FewRows, ProductStep, store_inputs
from ragflash.models.device.tables import MAX_ROWS, ChunkTables, DraftRow, DraftTables
from ragflash.models.device.tokens import TokenSender
from ragflash.models.layers import Norm
from ragflash.models.linear import PackedEmbedding
from ragflash.models.mtp import MAX_DEPTH
from ragflash_kernels.columns import Columns
from ragflash_kernels.embedding import gather_rows
from ragflash_kernels.qmatmul import quantize
from ragflash_kernels.rms_norm import add_norm
from ragflash_kernels.sample import largest


@dataclass(frozen=True, slots=True)
class FusedMtp:
    """`MtpHead` of `ragflash.models.mtp`; `mixer` is that of the block."""

    embedding: PackedEmbedding
    embedding_norm: Norm
    hidden_norm: Norm
    join: RecordLinear
    block: FusedBlock
    mixer: FusedAttention
    norm: Norm
    head: RecordLinear
    reads_normed: bool

    def enter(
        self, stream: torch.Tensor, last_norm: Norm, token_ids: torch.Tensor, step: ProductStep
    ) -> tuple[torch.Tensor, Activations]:
        """Join rows of a stream with the tokens after them.

        Args:
            stream: float32 `[N, H]`, of the model or of this block.
            last_norm: The stream's own before a head.
            token_ids: int32 `[N]`.
            step: Of the rows.

        Returns:
            The block's stream, and its first norm.
        """
        if self.reads_normed:
            stream = _floats(stream, last_norm, torch.float32, step)
        table = self.embedding
        embedded = gather_rows(table.blocks, token_ids, table.block_format)
        dtype = torch.float32 if step.quantized else step.dtype
        sides = (
            _floats(embedded, self.embedding_norm, dtype, step),
            _floats(stream, self.hidden_norm, dtype, step),
        )
        joined = torch.cat(sides, dim=-1)
        x = quantize(joined, eager=step.eager) if step.quantized else joined
        residual = step.multiply(self.join, x)[0].sum()
        return residual, normed(Pending(), residual, self.block.mixer_norm, step)

    def logits(self, x: Activations, residual: torch.Tensor, step: DeviceStep) -> torch.Tensor:
        """Compute the block, which leaves its stream in the residual; return float32 `[N, V]`."""
        pending = self.block(x, residual, step)
        return step.multiply(self.head, normed(pending, residual, self.norm, step))[0].sum()


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows whose keys and values are stored, and that attend to nothing; see `ProductStep`.

    Attributes:
        num_rows: Padding included; on the grid at most 32.
        unpacked: Work space for products of rows that are not on the grid.
    """

    num_rows: int
    unpacked: torch.Tensor
    quantized: bool
    dtype: torch.dtype
    eager: bool

    def multiply(self, matrix: RecordLinear, x: Activations) -> tuple[Columns, ...]:
        """See `ProductStep`."""
        return matrix.multiply(x, self.num_rows, unpacked=self.unpacked, eager=self.eager)


class DeviceMtp:
    """Runs the block; see `MtpRunner`.

    What is committed needs the block's keys and values only, so nothing else is computed of it.
    All tokens of a draft come of one graph, whose steps hand token and stream on; they are read
    once, at its end.

    Args:
        block: Lowered.
        programme: Of the model.
        pages: Keys and values of both.
        tables: Describe what is committed; nobody relies on what they hold.
        drafts: Describe what is drafted.
        row_counts: Of captured steps that store rows.
        eager_rows: With more rows products lose by starting early.
        num_tokens: Of the vocabulary.
        unpacked: Work space for products of many rows, of their type.
    """

    def __init__(
        self,
        block: FusedMtp,
        programme: Programme,
        pages: KVPages,
        *,
        tables: ChunkTables,
        drafts: DraftTables,
        row_counts: Sequence[int],
        eager_rows: int,
        num_tokens: int,
        unpacked: torch.Tensor,
    ) -> None:
        self._block = block
        self._programme = programme
        self._pages = pages
        self._tables = tables
        self._drafts = drafts
        self._row_counts = row_counts
        self._eager_rows = eager_rows
        self._num_tokens = num_tokens
        self._unpacked = unpacked
        self._dtype = unpacked.dtype
        device, width = unpacked.device, len(block.norm.weight)
        self._stream = torch.zeros(MAX_ROWS, width, device=device)
        self._nothing = torch.zeros(1, width, dtype=self._dtype, device=device)
        self._sender = TokenSender(MAX_DEPTH, device)
        # Of its own: a step that was begun early has results in the memory of the model's graphs.
        memory = GraphMemory(device)
        self._store_few = StepGraphs(self._store, device, memory)
        self._store_few.capture(sorted(row_counts, reverse=True))
        self._draft_few = StepGraphs(self._draft, device, memory)
        depths = range(1, MAX_DEPTH + 1)
        self._draft_few.capture(step_kinds(depths, may_have_packed=pages.packed is not None))

    @property
    def nothing(self) -> torch.Tensor:
        """See `MtpRunner`."""
        return self._nothing

    @torch.inference_mode()
    def absorb(self, stream: torch.Tensor, token_ids: Sequence[int], rows: SequenceRows) -> None:
        """See `MtpRunner`."""
        num_rows = rows.num_rows
        self._tables.fill(token_ids, rows)
        if num_rows <= MAX_ROWS:
            self._stream[:num_rows].copy_(stream)
            self._store_few(next(count for count in self._row_counts if count >= num_rows))
        else:
            step = StoredRows(num_rows, self._unpacked, False, self._dtype, eager=False)
            self._store_rows(stream.float().contiguous(), step)

    @torch.inference_mode()
    def draft(self, stream: torch.Tensor, token_id: int, rows: SequenceRows) -> list[int]:
        """See `MtpRunner`."""
        self._stream[:1].copy_(stream)
        self._drafts.fill(token_id, rows)
        tokens = self._draft_few(StepKind(rows.num_rows, bool(rows.packed_pages)))
        return self._sender.send(tokens).read()

    def warm_up(self, rows: SequenceRows) -> None:
        """Take rows of a prompt that nobody asked; see `DeviceModel.warm_up`."""
        stream = self._nothing.expand(rows.num_rows, -1)
        self.absorb(stream, [0] * rows.num_rows, rows)

    def _store(self, num_rows: int) -> None:
        eager = num_rows <= self._eager_rows
        step = StoredRows(num_rows, self._unpacked, True, self._dtype, eager)
        self._store_rows(self._stream[:num_rows], step)

    def _store_rows(self, stream: torch.Tensor, step: StoredRows) -> None:
        """Write keys and values of the rows that the tables describe."""
        tables, num_rows, mixer = self._tables, step.num_rows, self._block.mixer
        token_ids = tables["token_ids"][:num_rows]
        angles = self._programme.angles(tables["positions"][:num_rows])[mixer.rotary]
        _, x = self._block.enter(stream, self._programme.norm, token_ids, step)
        inputs, exact = mixer.inputs(x, step), self._pages.exact
        store_inputs(mixer.kv, inputs, mixer.sizes, angles, exact, tables, eager=step.eager)

    def _draft(self, kind: StepKind) -> torch.Tensor:
        """Draft `num_rows` tokens behind the one that the tables describe, int32."""
        token, tokens = self._drafts["token_ids"][:1], []
        stream, last_norm = self._stream[:1], self._programme.norm
        for depth in range(kind.num_rows):
            row = DraftRow(self._drafts, depth)
            step = FewRows(
                1,
                row,
                self._pages,
                self._programme.angles(row["positions"]),
                None,
                has_packed=kind.has_packed,
                eager=self._eager_rows > 0,
            )
            residual, x = self._block.enter(stream, last_norm, token, step)
            logits = self._block.logits(x, residual, step)
            token = largest(logits, self._num_tokens, eager=step.eager)
            tokens.append(token)
            stream, last_norm = residual, self._block.norm
        return torch.cat(tokens)


def _floats(x: torch.Tensor, norm: Norm, dtype: torch.dtype, step: ProductStep) -> torch.Tensor:
    """Return a norm of float32 rows `[N, H]`, not on the grid."""
    rows = add_norm(
        None, x, norm.weight, eps=norm.eps, quantized=False, out_dtype=dtype, eager=step.eager
    )
    assert isinstance(rows, torch.Tensor)
    return rows


def largest_of(block: FusedMtp) -> int:
    """Return the values of the largest matrix that many rows multiply with."""
    return max(block.join.largest_values, block.mixer.projections.largest_values)
