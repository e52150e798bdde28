"""Feed-forward parts of which each token uses a few (Shazeer et al. 2017, arXiv:1701.06538)."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from ragflash.models.layers import Activation, GatedFFN, silu
from ragflash.models.linear import Linear
from ragflash_kernels.dequant import dequantize


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One matrix an expert, as the file stores them; unpacked when a row needs the expert.

    Attributes:
        blocks: `[experts · out, row bytes]`.
        block_format: Of the blocks.
        out_features: Rows of an expert's matrix.
        dtype: What is computed in.
    """

    blocks: torch.Tensor
    block_format: str
    out_features: int
    dtype: torch.dtype

    def multiply(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Map `[N, in]` to `[N, out]` by one expert's matrix."""
        first = expert * self.out_features
        blocks = self.blocks[first : first + self.out_features]
        weight = dequantize(blocks, block_format=self.block_format, dtype=self.dtype)
        return functional.linear(x, weight)


@dataclass(frozen=True, slots=True)
class Experts:
    """The chosen experts' outputs, weighed by a router.

    Attributes:
        router: Gives one logit an expert.
        gate_up: One matrix of both parts, or two.
        down: Back to the hidden size.
        num_used: Experts of a token.
        activation: Of the gate.
    """

    router: Linear
    gate_up: tuple[ExpertMatrices, ...]
    down: ExpertMatrices
    num_used: int
    activation: Activation = silu

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """Map `[N, H]` to `[N, H]`."""
        shares, chosen = self.route(h)
        out = torch.zeros(h.shape, dtype=torch.float32, device=h.device)
        for expert in sorted({*chosen.flatten().tolist()}):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            weighed = self._run(h[rows], expert).float() * shares[rows, places, None]
            out.index_add_(0, rows, weighed)
        return out.to(h.dtype)

    def route(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen experts' shares, which add up to 1, and numbers, `[N, num_used]`."""
        probabilities = self.router(h).float().softmax(dim=-1)
        shares, chosen = probabilities.topk(self.num_used, dim=-1)
        return shares / shares.sum(dim=-1, keepdim=True), chosen

    def _run(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        both = torch.cat([part.multiply(x, expert) for part in self.gate_up], dim=-1)
        gate, up = both.chunk(2, dim=-1)
        return self.down.multiply(self.activation(gate) * up, expert)


@dataclass(frozen=True, slots=True)
class SharedExpertFFN:
    """Chosen experts and one that every token uses, in a measure of its own.

    Attributes:
        experts: The chosen ones.
        shared: For all tokens.
        shared_gate: `[H]`; the sigmoid of its product with a row weighs `shared`.
    """

    experts: Experts
    shared: GatedFFN
    shared_gate: torch.Tensor

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """Map `[N, H]` to `[N, H]`."""
        measure = (h.float() @ self.shared_gate).sigmoid()[:, None].to(h.dtype)
        return self.experts(h) + measure * self.shared(h)
