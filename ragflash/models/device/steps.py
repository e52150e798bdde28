"""How rows meet pages and states: few rows by tables, many rows of one sequence at once."""

from dataclasses import dataclass
from typing import Protocol

import torch

from ragflash.kvcache.pages import KVPages, PagePool
from ragflash.models.contract import SequenceRows
from ragflash.models.device.matrices import Activations, RecordLinear
from ragflash.models.device.tables import ChunkTables, RowTables, SequenceTables
from ragflash.models.layers import Angles, PagedKV
from ragflash_kernels.attention_inputs import attention_inputs
from ragflash_kernels.columns import Columns
from ragflash_kernels.gated_delta import DeltaStates, delta_prefill, delta_step
from ragflash_kernels.paged_attention import KvPart, attend_parts
from ragflash_kernels.prefill_attention import PackedHistory, PrefillWorkspace, prefill_attention


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """What attention makes of a row's columns before it attends.

    Attributes:
        q: Columns of queries.
        k: Of keys.
        v: Of values.
        gate: Of what the output is multiplied with after a sigmoid; `None` leaves it.
    """

    q: Columns
    k: Columns
    v: Columns
    gate: Columns | None


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """What a layer of linear attention has beside its matrices, float32.

    Attributes:
        conv: Of the convolution, `[C, K]`.
        decay_rate: `-exp(A)` of each value head, `[Hv]`.
        decay_bias: `[Hv]`.
    """

    conv: torch.Tensor
    decay_rate: torch.Tensor
    decay_bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Shape and norms of heads.

    Attributes:
        head_dim: Values a head.
        q_norm: Weight `[D]` float32 of queries; `None` leaves them.
        k_norm: Of keys.
        eps: Of both norms.
    """

    head_dim: int
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float


class ProductStep(Protocol):
    """Rows that are multiplied with matrices."""

    @property
    def quantized(self) -> bool:
        """Whether matrices take rows on the int8 grid."""

    @property
    def dtype(self) -> torch.dtype:
        """What matrices take otherwise."""

    @property
    def eager(self) -> bool:
        """Whether kernels may start before the one before has ended."""

    def multiply(self, matrix: RecordLinear, x: Activations) -> tuple[Columns, ...]:
        """Return a product, one entry for each of the matrix's `widths`."""


class DeviceStep(ProductStep, Protocol):
    """Rows of one forward."""

    def attend(self, kv: PagedKV, inputs: HeadInputs, sizes: HeadSizes, rotary: int) -> Activations:
        """Store keys and values, and return what the queries see, `[N, Hq · D]`."""

    def delta(
        self, layer: int, qkv: Columns, beta: Columns, alpha: Columns, weights: DeltaWeights
    ) -> torch.Tensor:
        """Return the heads `[N, Hv, Dv]` of a layer of linear attention."""


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows that only meet a matrix.

    Attributes:
        num_rows: At most 32.
    """

    num_rows: int
    quantized: bool = True
    eager: bool = False
    dtype: torch.dtype = torch.bfloat16

    def multiply(self, matrix: RecordLinear, x: Activations) -> tuple[Columns, ...]:
        """See `ProductStep`."""
        return matrix.multiply(x, self.num_rows, unpacked=None, eager=self.eager)


def store_inputs(
    kv: PagedKV,
    inputs: HeadInputs,
    sizes: HeadSizes,
    angles: Angles,
    exact: PagePool,
    tables: RowTables,
    *,
    eager: bool = False,
) -> torch.Tensor:
    """Store the keys and values of a layer's rows; return their queries, float16 `[N, Hq, D]`."""
    (cos, sin), num_rows = angles, len(angles[0])
    return attention_inputs(
        inputs.q, inputs.k, inputs.v, head_dim=sizes.head_dim, q_norm=sizes.q_norm,
        k_norm=sizes.k_norm, eps=sizes.eps, cos=cos, sin=sin, keys=exact.keys(kv.layer),
        values=exact.values(kv.layer), row_pages=tables["row_pages"][:num_rows],
        row_places=tables["row_places"][:num_rows], eager=eager,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FewRows:
    """At most 32 rows of several sequences, described by tables alone.

    A forward of so many rows launches the same kernels with the same arguments whatever the tables
    hold, so it can be captured.

    Attributes:
        num_rows: Rows, padding included.
        tables: Of the sequences.
        pages: Keys and values.
        angles: Of the rows' positions, one entry for each set of frequencies.
        states: Of recurrent layers; `None` when there are none.
        has_packed: Whether to attend to packed pages. The result is the same, bit for bit, where no
            sequence has any.
        eager: See `ProductStep`.
    """

    num_rows: int
    tables: SequenceTables
    pages: KVPages
    angles: tuple[Angles, ...]
    states: DeltaStates | None
    has_packed: bool
    eager: bool
    quantized: bool = True
    dtype: torch.dtype = torch.bfloat16

    def multiply(self, matrix: RecordLinear, x: Activations) -> tuple[Columns, ...]:
        """See `ProductStep`."""
        return matrix.multiply(x, self.num_rows, unpacked=None, eager=self.eager)

    def attend(self, kv: PagedKV, inputs: HeadInputs, sizes: HeadSizes, rotary: int) -> Activations:
        """See `DeviceStep`."""
        tables, exact = self.tables, self.pages.exact
        q = store_inputs(kv, inputs, sizes, self.angles[rotary], exact, tables, eager=self.eager)
        packed = self.pages.packed
        return attend_parts(
            q,
            KvPart(
                exact.keys(kv.layer),
                exact.values(kv.layer),
                tables.exact(kv.window, self.num_rows),
            ),
            None
            if packed is None or not self.has_packed
            else KvPart(
                packed.keys(kv.layer),
                packed.values(kv.layer),
                tables.packed(kv.window, self.num_rows),
                packed.kv_format,
                packed.kv_format,
            ),
            scale=kv.scale,
            gate=inputs.gate,
            quantized=self.quantized,
            eager=self.eager,
        )

    def delta(
        self, layer: int, qkv: Columns, beta: Columns, alpha: Columns, weights: DeltaWeights
    ) -> torch.Tensor:
        """See `DeviceStep`."""
        assert self.states is not None
        return delta_step(
            qkv, beta, alpha, conv=weights.conv, decay_rate=weights.decay_rate,
            decay_bias=weights.decay_bias, states=self.states.layer(layer),
            first_rows=self.tables["first_rows"], slots=self.tables["slots"],
            max_rows=self.num_rows, parents=self.tables["parents"],
            eager=self.eager and self.num_rows == 1,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ManyRows:
    """A chunk of one sequence's prompt, more rows than a step by tables takes.

    Attributes:
        rows: The sequence's rows.
        tables: Which describe them.
        pages: Keys and values.
        angles: Of the rows' positions, one entry for each set of frequencies.
        states: Of recurrent layers; `None` when there are none.
        unpacked: Work space for products.
        scratch: For attention.
        dtype: See `ProductStep`.
    """

    rows: SequenceRows
    tables: ChunkTables
    pages: KVPages
    angles: tuple[Angles, ...]
    states: DeltaStates | None
    unpacked: torch.Tensor
    scratch: PrefillWorkspace | None
    dtype: torch.dtype
    quantized: bool = False
    eager: bool = False

    def multiply(self, matrix: RecordLinear, x: Activations) -> tuple[Columns, ...]:
        """See `ProductStep`."""
        return matrix.multiply(x, self.rows.num_rows, unpacked=self.unpacked)

    def attend(self, kv: PagedKV, inputs: HeadInputs, sizes: HeadSizes, rotary: int) -> Activations:
        """See `DeviceStep`."""
        exact, packed = self.pages.exact, self.pages.packed
        rows, tables = self.rows, self.tables
        q = store_inputs(kv, inputs, sizes, self.angles[rotary], exact, tables)
        history = None
        if packed is not None and rows.packed_pages:
            history = PackedHistory(
                packed.keys(kv.layer),
                packed.values(kv.layer),
                tables["packed_pages"][: len(rows.packed_pages)],
                packed.kv_format,
                packed.kv_format,
            )
        return prefill_attention(
            q,
            exact.keys(kv.layer),
            exact.values(kv.layer),
            tables["exact_pages"][: len(rows.pages)],
            rows.committed - rows.num_packed,
            history,
            scale=kv.scale,
            window=kv.window,
            gate=inputs.gate,
            out_dtype=self.dtype,
            workspace=self.scratch,
        ).flatten(1)

    def delta(
        self, layer: int, qkv: Columns, beta: Columns, alpha: Columns, weights: DeltaWeights
    ) -> torch.Tensor:
        """See `DeviceStep`."""
        assert self.states is not None
        return delta_prefill(
            qkv, beta, alpha, conv=weights.conv, decay_rate=weights.decay_rate,
            decay_bias=weights.decay_bias, states=self.states.layer(layer), slot=self.rows.slot,
            keep=self.rows.num_draft == 0,
        )  # fmt: skip
