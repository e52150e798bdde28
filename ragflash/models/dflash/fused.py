"""A drafter's passes as fused operations on a float32 residual stream, as a card runs a model.

What a layer adds is added by the norm before the next product, as in `models.device.programme`.
Every pass launches the same kernels whatever its tables hold, so that it can be captured.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ragflash.models.device.matrices import Activations, RecordLinear
from ragflash.models.dflash.block_tables import BlockTables, PositionTables
from ragflash.models.dflash.config import MAX_CANDIDATES, DFlashConfig, Target
from ragflash.models.dflash.conv import DynamicConv
from ragflash.models.dflash.layers import DraftAttention
from ragflash.models.dflash.model import DFlashParts
from ragflash.models.layers import Angles, GatedFFN, Norm
from ragflash.models.linear import Linear
from ragflash_kernels.attention_inputs import attention_inputs
from ragflash_kernels.columns import Columns
from ragflash_kernels.gated_ffn import gated
from ragflash_kernels.paged_attention import KvPart, attend_parts
from ragflash_kernels.qmatmul import quantize
from ragflash_kernels.rms_norm import add_norm

Part = Callable[[Activations], Columns]


@dataclass(frozen=True, slots=True)
class FusedDrafter:
    """A drafter whose matrices are records.

    Attributes:
        config: Its sizes.
        parts: Its weights.
        target: Whose tokens it drafts; what it gives is computed by launches alone.
        eager: Whether kernels of a block may start before the one before has ended (sm_90).
    """

    config: DFlashConfig
    parts: DFlashParts
    target: Target
    eager: bool

    def context(
        self,
        features: torch.Tensor,
        tables: PositionTables,
        *,
        unpacked: torch.Tensor | None = None,
    ) -> None:
        """Write keys and values of the target's tokens to their places.

        Args:
            features: Taps of the tokens that the tables describe, and of padding, `[N, taps · H]`.
            tables: Of the tokens.
            unpacked: Work space for products of many rows, of the dtype of `features`; `None` puts
                at most 32 rows on the int8 grid.
        """
        num_rows, few = len(features), unpacked is None
        x = quantize(features) if few else features
        joined = _records(self.parts.features).multiply(x, num_rows, unpacked=unpacked)[0]
        norm, shape = self.parts.features_norm, (num_rows, self.config.hidden_size)
        stream = torch.zeros(shape, dtype=torch.float32, device=features.device)
        rows = add_norm(
            joined, stream, norm.weight, eps=norm.eps, quantized=few, out_dtype=features.dtype
        )
        angles = self._angles(tables, num_rows)
        for layer in self.parts.layers:
            attention = layer.attention
            matrix = _records(attention.key_value)
            k, v = matrix.multiply(rows, num_rows, unpacked=unpacked)
            no_queries = Columns(k.partials, k.start, 0)
            _store(attention, no_queries, k, v, angles, tables, num_rows)

    def candidates(self, tables: BlockTables) -> torch.Tensor:
        """Run a block; return what it says of each slot.

        Returns:
            int32 `[S, 2 K + 1]`: the K most probable tokens, the best first, the bits of their
            float32 log-probabilities, and the token of the chain.
        """
        ids = tables["token_ids"]
        stream = self.target.embed(ids).float() * self.config.embedding_scale
        angles, pending = self._angles(tables, len(ids)), None
        for layer in self.parts.layers:
            attend = self._attend(layer.attention, angles, tables)
            pending = self._mixed(
                layer.attention_norm, layer.attention_conv, attend, pending, stream
            )
            ffn = self._ffn(layer.ffn, len(ids))
            pending = self._mixed(layer.ffn_norm, layer.ffn_conv, ffn, pending, stream)
        rows = self._normed(self.parts.norm, pending, stream)[1:]
        logits = self.target.logits(rows * self.config.output_scale)
        best, token_ids = logits.topk(min(MAX_CANDIDATES, logits.shape[1]), dim=-1)
        log_probs = best - logits.logsumexp(dim=-1, keepdim=True)
        selector, chain = self.parts.selector, token_ids[:, 0]
        if selector is not None:
            chain = selector.choose(ids[:1].long(), rows, token_ids, log_probs)
        bits = log_probs.view(torch.int32)
        return torch.cat((token_ids.int(), bits, chain.int()[:, None]), dim=1)

    def _mixed(
        self,
        norm: Norm,
        conv: DynamicConv | None,
        part: Part,
        pending: Columns | None,
        stream: torch.Tensor,
    ) -> Columns:
        """Return what a part of a layer adds to the stream, to which `pending` is added first."""
        if conv is None:
            x = add_norm(
                pending, stream, norm.weight, eps=norm.eps, quantized=True, eager=self.eager
            )
            return part(x)
        rows = self._normed(norm, pending, stream)
        return Columns.whole(conv(rows, lambda x: part(quantize(x)).sum())[None])

    def _normed(self, norm: Norm, pending: Columns | None, stream: torch.Tensor) -> torch.Tensor:
        rows = add_norm(
            pending, stream, norm.weight, eps=norm.eps, quantized=False, out_dtype=torch.float32,
            eager=self.eager,
        )  # fmt: skip
        assert isinstance(rows, torch.Tensor)
        return rows

    def _attend(self, attention: DraftAttention, angles: Angles, tables: BlockTables) -> Part:
        rings, num_rows = tables.rings, len(tables["token_ids"])

        def part(x: Activations) -> Columns:
            (q,) = self._multiply(attention.query, x, num_rows)
            k, v = self._multiply(attention.key_value, x, num_rows)
            heads = _store(attention, q, k, v, angles, tables, num_rows, eager=self.eager)
            seen = tables.visibility((attention.window, attention.is_causal))
            layer = attention.index
            mixed = attend_parts(
                heads, KvPart(rings.keys(layer), rings.values(layer), seen), None,
                scale=attention.head_dim**-0.5, gate=None, quantized=True, eager=self.eager,
            )  # fmt: skip
            return self._multiply(attention.output, mixed, num_rows)[0]

        return part

    def _ffn(self, ffn: GatedFFN, num_rows: int) -> Part:
        def part(x: Activations) -> Columns:
            gate, up = self._multiply(ffn.gate_up, x, num_rows)
            rows = gated(gate, up, "silu", quantized=True, eager=self.eager)
            return self._multiply(ffn.down, rows, num_rows)[0]

        return part

    def _multiply(self, matrix: Linear, x: Activations, num_rows: int) -> tuple[Columns, ...]:
        return _records(matrix).multiply(x, num_rows, unpacked=None, eager=self.eager)

    def _angles(self, tables: PositionTables, num_rows: int) -> Angles:
        angles = tables["positions"][:num_rows, None].float() * self.parts.frequencies
        return angles.cos(), angles.sin()


def _store(
    attention: DraftAttention,
    q: Columns,
    k: Columns,
    v: Columns,
    angles: Angles,
    tables: PositionTables,
    num_rows: int,
    *,
    eager: bool = False,
) -> torch.Tensor:
    """Write keys and values to their places; return the heads of queries, `[N, Hq, D]`."""
    rings, layer = tables.rings, attention.index
    return attention_inputs(
        q, k, v, head_dim=attention.head_dim, q_norm=attention.q_norm.weight,
        k_norm=attention.k_norm.weight, eps=attention.k_norm.eps, cos=angles[0], sin=angles[1],
        keys=rings.keys(layer), values=rings.values(layer),
        row_pages=tables["row_pages"][:num_rows], row_places=tables["row_places"][:num_rows],
        eager=eager,
    )  # fmt: skip


def _records(linear: Linear) -> RecordLinear:
    assert isinstance(linear, RecordLinear)
    return linear
