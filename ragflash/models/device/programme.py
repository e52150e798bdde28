"""A decoder as a chain of fused operations on a float32 residual stream.

What a layer adds is not added by itself: the norm before the next product does it, adds up the
parts that the product was split into, and puts the rows on the grid that the next matrix takes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ragflash.models.device.matrices import Activations, RecordLinear
from ragflash.models.device.steps import (
    DeltaWeights,
    DeviceStep,
    HeadInputs,
    HeadRows,
    HeadSizes,
    ProductStep,
)
from ragflash.models.device.tables import MAX_ROWS
from ragflash.models.device.taps import StreamTaps
from ragflash.models.layers import Norm, PagedKV
from ragflash.models.linear import PackedEmbedding
from ragflash_kernels.columns import Columns
from ragflash_kernels.embedding import gather_rows
from ragflash_kernels.gated_delta import DeltaSizes, gated_norm
from ragflash_kernels.gated_ffn import gated
from ragflash_kernels.rms_norm import add_norm

FusedMixer = Callable[[Activations, DeviceStep], Columns]


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """`Attention`, and with `is_gated` `GatedAttention`, of `ragflash.models`.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Heads of K, and of V.
        projections: Gives Q, with `is_gated` the gates of its values in the same columns, K and V.
        output: Of the mixed heads.
        kv: Its pages.
        sizes: Of its heads.
        rotary: Which angles of the step it takes.
        is_gated: Whether the output is gated value by value.
    """

    num_heads: int
    num_kv_heads: int
    projections: RecordLinear
    output: RecordLinear
    kv: PagedKV
    sizes: HeadSizes
    rotary: int
    is_gated: bool

    def __call__(self, x: Activations, step: DeviceStep) -> Columns:
        """Mix the rows of every sequence."""
        mixed = step.attend(self.kv, self.inputs(x, step), self.sizes, self.rotary)
        return step.multiply(self.output, mixed)[0]

    def inputs(self, x: Activations, step: ProductStep) -> HeadInputs:
        """Return what rows give to be attended with."""
        q, k, v = step.multiply(self.projections, x)
        gate = None
        if self.is_gated:
            q, gate = q.split(q.width // 2, q.width // 2)
        return HeadInputs(q, k, v, gate)


@dataclass(frozen=True, slots=True)
class FusedDeltaNet:
    """`GatedDeltaNet` of `ragflash.models.deltanet`.

    Attributes:
        layer: Its number among the layers with state.
        sizes: Of its heads.
        projections: Gives Q, K, V (to be convolved), output gate, β and decay.
        weights: Of convolution and decay.
        norm: Of each output head.
        output: Of the gated heads.
    """

    layer: int
    sizes: DeltaSizes
    projections: RecordLinear
    weights: DeltaWeights
    norm: Norm
    output: RecordLinear

    def __call__(self, x: Activations, step: DeviceStep) -> Columns:
        """Mix the rows of every sequence."""
        qkv, z, beta, alpha = step.multiply(self.projections, x)
        heads = step.delta(self.layer, qkv, beta, alpha, self.weights)
        gated_heads = gated_norm(
            heads, z, self.norm.weight, eps=self.norm.eps, quantized=step.quantized,
            out_dtype=step.dtype, eager=step.eager,
        )  # fmt: skip
        return step.multiply(self.output, gated_heads)[0]


@dataclass(frozen=True, slots=True)
class FusedFFN:
    """`GatedFFN` of `ragflash.models.layers`."""

    gate_up: RecordLinear
    down: RecordLinear
    activation: Literal["silu", "gelu_tanh"]

    def __call__(self, x: Activations, step: DeviceStep) -> Columns:
        """Map each row alone."""
        gate, up = step.multiply(self.gate_up, x)
        rows = gated(
            gate, up, self.activation, quantized=step.quantized, out_dtype=step.dtype,
            eager=step.eager,
        )  # fmt: skip
        return step.multiply(self.down, rows)[0]


@dataclass(frozen=True, slots=True)
class FusedBlock:
    """`Block` or `SandwichBlock` of `ragflash.models.layers`; post norms are `None` in the first.

    Attributes:
        scale: Factor of the residual after the block.
    """

    mixer_norm: Norm
    mixer: FusedMixer
    mixer_post_norm: Norm | None
    ffn_norm: Norm
    ffn: FusedFFN
    ffn_post_norm: Norm | None
    scale: float

    def __call__(self, x: Activations, residual: torch.Tensor, step: DeviceStep) -> "Pending":
        """Compute the block of rows behind its first norm; the residual gets the mixer's part."""
        mixed = Pending(self.mixer(x, step), self.mixer_post_norm)
        x = normed(mixed, residual, self.ffn_norm, step)
        return Pending(self.ffn(x, step), self.ffn_post_norm, self.scale)


@dataclass(frozen=True, slots=True)
class Pending:
    """What the last layer gave and the next norm adds."""

    delta: Columns | None = None
    post_norm: Norm | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Hidden:
    """Rows behind the last layer.

    Attributes:
        residual: float32 `[N, H]`.
        pending: What is still to be added.
    """

    residual: torch.Tensor
    pending: Pending

    def rows(self, wanted: torch.Tensor) -> "Hidden":
        """Copy some rows."""
        pending, delta = self.pending, self.pending.delta
        if delta is not None:
            delta = Columns(delta.partials[:, wanted], delta.start, delta.width)
        return Hidden(self.residual[wanted], replace(pending, delta=delta))


@dataclass(frozen=True, slots=True)
class Programme:
    """Everything between token ids and logits; the fields are those of `DecoderParts`."""

    embedding: PackedEmbedding
    blocks: tuple[FusedBlock, ...]
    norm: Norm
    head: RecordLinear
    frequencies: tuple[torch.Tensor, ...]
    embedding_scale: float
    soft_cap: float | None

    def angles(self, positions: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Return cosines and sines `[N, F]` of each set of frequencies."""
        of_all = (positions[:, None].float() * frequencies for frequencies in self.frequencies)
        return tuple((angles.cos(), angles.sin()) for angles in of_all)

    def run(
        self, token_ids: torch.Tensor, step: DeviceStep, taps: StreamTaps | None = None
    ) -> Hidden:
        """Compute a step's rows up to the last layer.

        Args:
            token_ids: int32 `[N]` on the card.
            step: Of the rows.
            taps: Gets what stands in the stream of all rows; `None` where nobody reads it.
        """
        residual = gather_rows(
            self.embedding.blocks, token_ids, self.embedding.block_format,
            scale=self.embedding_scale,
        )  # fmt: skip
        pending = Pending()
        for layer, block in enumerate(self.blocks):
            x = normed(pending, residual, block.mixer_norm, step)
            if taps is not None:  # what the layer before gave has just been added
                taps.keep(layer - 1, residual)
            pending = block(x, residual, step)
        if taps is None:
            return Hidden(residual, pending)
        normed(pending, residual, self.norm, step)  # only this adds for all rows
        taps.keep(len(self.blocks) - 1, residual)
        taps.keep_last(residual)
        return Hidden(residual, Pending())

    def logits(self, hidden: Hidden, step: ProductStep) -> torch.Tensor:
        """Return float32 `[N, V]` of at most 32 rows."""
        x = normed(hidden.pending, hidden.residual, self.norm, step)
        logits = step.multiply(self.head, x)[0].sum()
        cap = self.soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def logits_of(self, hidden: Hidden, wanted: torch.Tensor) -> torch.Tensor | None:
        """Return float32 `[R, V]` of some rows, whose numbers are int64; `None` of no rows."""
        parts = [
            self.logits(hidden.rows(rows), HeadRows(len(rows)))
            for rows in torch.split(wanted, MAX_ROWS)
            if len(rows)
        ]
        return torch.cat(parts) if parts else None


def normed(pending: Pending, residual: torch.Tensor, norm: Norm, step: ProductStep) -> Activations:
    """Add what is pending to the residual, and return the norm as the next matrix takes it."""
    post = pending.post_norm
    return add_norm(
        pending.delta, residual, norm.weight, eps=norm.eps,
        post_weight=None if post is None else post.weight, residual_scale=pending.scale,
        quantized=step.quantized, out_dtype=step.dtype, eager=step.eager,
    )  # fmt: skip
