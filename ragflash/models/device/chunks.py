"""Chunks of a prompt as captured launches: padded to a few sizes, their lengths in tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragflash.kvcache.pages import KVPages
from ragflash.models.contract import SequenceRows
from ragflash.models.device.graphs import GraphMemory, StepGraphs
from ragflash.models.device.matrices import Activations, RecordLinear
from ragflash.models.device.programme import Hidden, Programme
from ragflash.models.device.steps import DeltaWeights, HeadInputs, HeadSizes, store_inputs
from ragflash.models.device.tables import ChunkTables
from ragflash.models.device.taps import StreamTaps
from ragflash.models.layers import Angles, PagedKV
from ragflash_kernels.chunk_attention import chunk_attention
from ragflash_kernels.columns import Columns


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """A chunk of one sequence's prompt, described by tables alone.

    Attributes:
        num_rows: Padding included.
        tables: Of the chunk.
        pages: Keys and values.
        angles: Of the rows' positions, one entry for each set of frequencies.
        unpacked: Work space for products.
        dtype: See `ProductStep`.
    """

    num_rows: int
    tables: ChunkTables
    pages: KVPages
    angles: tuple[Angles, ...]
    unpacked: torch.Tensor
    dtype: torch.dtype
    quantized: bool = False
    eager: bool = False

    def multiply(self, matrix: RecordLinear, x: Activations) -> tuple[Columns, ...]:
        """See `ProductStep`."""
        return matrix.multiply(x, self.num_rows, unpacked=self.unpacked)

    def attend(self, kv: PagedKV, inputs: HeadInputs, sizes: HeadSizes, rotary: int) -> Activations:
        """See `DeviceStep`."""
        exact, tables = self.pages.exact, self.tables
        keys, values = exact.keys(kv.layer), exact.values(kv.layer)
        q = store_inputs(kv, inputs, sizes, self.angles[rotary], exact, tables)
        return chunk_attention(
            q, keys, values, tables["exact_pages"], tables["counts"][:2], scale=kv.scale,
            window=kv.window, out_dtype=self.dtype,
        ).flatten(1)  # fmt: skip

    def delta(
        self, layer: int, qkv: Columns, beta: Columns, alpha: Columns, weights: DeltaWeights
    ) -> torch.Tensor:
        """See `DeviceStep`."""
        raise AssertionError("chunks of models with recurrent layers are not captured")


class Chunks:
    """Runs captured chunks.

    Args:
        programme: Of the model.
        pages: Keys and values.
        tables: Where chunks are described; `run` expects one there.
        row_counts: Rows that chunks are padded to; none captures nothing.
        unpacked: Work space for products.
        dtype: Of rows and matrices.
        memory: Of the graphs.
        taps: See `Programme.run`.
    """

    def __init__(
        self,
        programme: Programme,
        pages: KVPages,
        tables: ChunkTables,
        *,
        row_counts: Sequence[int],
        unpacked: torch.Tensor,
        dtype: torch.dtype,
        memory: GraphMemory,
        taps: StreamTaps | None = None,
    ) -> None:
        self._programme = programme
        self._taps = taps
        self._pages = pages
        self._row_counts = sorted(row_counts)
        self._unpacked = unpacked
        self._dtype = dtype
        self._tables = tables
        self._graphs = StepGraphs(self._step, unpacked.device, memory)
        self._graphs.capture(self._row_counts[::-1])

    def take(self, rows: SequenceRows) -> bool:
        """Tell whether rows are computed here; only their number and place decide."""
        most = self._row_counts[-1] if self._row_counts else 0
        return rows.num_rows <= most and not rows.packed_pages

    def run(self, num_rows: int) -> Hidden:
        """Compute the chunk in the tables; padding follows its rows, the next overwrites all."""
        return self._graphs(next(count for count in self._row_counts if count >= num_rows))

    def _step(self, num_rows: int) -> Hidden:
        tables = self._tables
        angles = self._programme.angles(tables["positions"][:num_rows])
        step = ChunkRows(num_rows, tables, self._pages, angles, self._unpacked, self._dtype)
        return self._programme.run(tables["token_ids"][:num_rows], step, self._taps)
