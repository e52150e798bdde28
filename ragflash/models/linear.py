"""Matrices that a model multiplies with, whatever they are stored as."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional

from ragflash_kernels.dequant import dequantize

_FEW_ROWS = 8


class Linear(Protocol):
    """`y = x · Wᵀ + b`; several matrices of a file may stand side by side in one."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `[N, in]`; returns `[N, out]` of the dtype of `x`."""


class DenseLinear:
    """A matrix `[out, in]` and optionally a bias `[out]`, in the dtype that the model computes in.

    Few rows of float32 on a CPU, which are what drafts are verified with, cost the least processor
    time as columns of a product with the whole matrix; more rows do with oneDNN's product, which
    torch itself calls for smaller types only.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        is_float32 = weight.is_cpu and weight.dtype == torch.float32
        self._few_rows = _FEW_ROWS if is_float32 else 0
        self._has_onednn = is_float32 and torch._C._has_mkldnn

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        if 1 < len(x) <= self._few_rows:
            y = self.weight @ x.t()
            return (y if self.bias is None else y + self.bias[:, None]).t().contiguous()
        if len(x) > self._few_rows and self._has_onednn:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.weight, self.bias, "none", [], ""
            )
            return product
        return functional.linear(x, self.weight, self.bias)


class SideBySide:
    """Matrices that are stored in different ways, as one."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return torch.cat([part(x) for part in self._parts], dim=-1)


class Embedding:
    """The table of token vectors, `[V, H]`: the same tensor as the head's where both are tied."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors `[N, H]` of token ids `[N]`."""
        return self.weight[token_ids]


class PackedEmbedding:
    """A table of token vectors as the file stores it; rows are unpacked when they are wanted.

    Args:
        blocks: `[V, row bytes]`.
        block_format: Of the blocks.
        dtype: Of the vectors that are returned.
    """

    def __init__(self, blocks: torch.Tensor, block_format: str, dtype: torch.dtype) -> None:
        self.blocks = blocks
        self.block_format = block_format
        self._dtype = dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors `[N, H]` of token ids `[N]`."""
        blocks = self.blocks[token_ids]
        return dequantize(blocks, block_format=self.block_format, dtype=self._dtype)
