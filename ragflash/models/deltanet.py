"""The gated delta rule as a layer (Yang et al. 2024, arXiv:2412.06464), as Qwen3.5 has it."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from ragflash.models.contract import SequenceRows
from ragflash.models.layers import Norm, Step
from ragflash.models.linear import Linear
from ragflash.models.recurrent import LayerRows, StateShape
from ragflash_kernels.conv1d import causal_conv1d
from ragflash_kernels.gated_delta import (
    DeltaRows,
    gated_delta_chunked,
    gated_delta_recurrent,
    gated_delta_tree,
)


@dataclass(frozen=True, slots=True)
class DeltaNetSizes:
    """Heads and what they hold.

    Attributes:
        num_key_heads: Of Q and K; value head `i` reads key head `i mod num_key_heads`.
        num_value_heads: Of V, of the output and of the state.
        key_dim: Values of a head of Q and K.
        value_dim: Values of a head of V.
        conv_width: Rows that the convolution weighs, the newest included.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def keys_size(self) -> int:
        """Values of all heads of K."""
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        """Values of all heads of V."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """What is convolved: Q, K and V."""
        return 2 * self.keys_size + self.values_size

    @property
    def state_shape(self) -> StateShape:
        """State of one layer and sequence."""
        return StateShape(
            (self.conv_width - 1, self.conv_channels),
            (self.num_value_heads, self.key_dim, self.value_dim),
        )


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """A mixer whose memory of a sequence is a state of fixed size.

    Attributes:
        sizes: Its heads.
        layer: Its number among the layers with state.
        projections: Gives Q, K, V (to be convolved), output gate, β and decay side by side.
        conv: Weights of the convolution `[C, K]`.
        decay_rate: `-exp(A)` of each value head, `[Hv]`.
        decay_bias: `[Hv]`.
        norm: Of each output head.
        output: Of the gated heads.
    """

    sizes: DeltaNetSizes
    layer: int
    projections: Linear
    conv: torch.Tensor
    decay_rate: torch.Tensor
    decay_bias: torch.Tensor
    norm: Norm
    output: Linear

    def __call__(self, h: torch.Tensor, step: Step) -> torch.Tensor:
        """Mix the rows of every sequence; see `Mixer`."""
        sizes = self.sizes
        heads = sizes.num_value_heads
        inputs, gate, beta, decay = self.projections(h).split_with_sizes(
            (sizes.conv_channels, sizes.values_size, heads, heads), dim=-1
        )
        beta = beta.float().sigmoid()
        log_decay = self.decay_rate * functional.softplus(decay.float() + self.decay_bias)
        mixed = torch.cat(
            [
                self._mix(inputs[at], log_decay[at], beta[at], rows, step)
                for rows, at in step.sequences()
            ]
        )
        gated = self.norm(mixed) * functional.silu(gate.float()).view_as(mixed)
        return self.output(gated.flatten(1).to(h.dtype))

    def _mix(
        self,
        inputs: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        rows: SequenceRows,
        step: Step,
    ) -> torch.Tensor:
        """Return the heads `[T, Hv, Dv]` float32 of one sequence, and keep what they leave."""
        assert step.states is not None
        tail = step.states.tail(rows.slot, self.layer)
        mixed = causal_conv1d(inputs, tail, self.conv, parents=rows.parents)
        delta = DeltaRows(*self._heads(mixed), log_decay, beta)
        memory = step.states.memory(rows.slot, self.layer)
        num_certain = rows.num_rows - rows.num_draft
        outputs, tape = [], None
        if num_certain:
            form = gated_delta_recurrent if num_certain == 1 else gated_delta_chunked
            out, memory = form(delta[:num_certain], memory)
            outputs.append(out)
        if rows.num_draft:
            parents = None
            if rows.parents is not None:
                parents = [max(p - num_certain, -1) for p in rows.parents[num_certain:]]
            out, tape = gated_delta_tree(delta[num_certain:], memory, parents=parents)
            outputs.append(out)
        step.states.keep(rows.slot, self.layer, LayerRows(inputs, memory, tape))
        return torch.cat(outputs)

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = self.sizes
        q, k, v = x.split_with_sizes((sizes.keys_size, sizes.keys_size, sizes.values_size), dim=-1)
        keys = (len(x), sizes.num_key_heads, sizes.key_dim)
        values = (len(x), sizes.num_value_heads, sizes.value_dim)
        return q.view(keys), k.view(keys), v.view(values)
