"""Matrices that a model multiplies with, whatever they are stored as."""

from collections.abc import Sequence
from typing import Protocol

import torch

from ragflash_kernels.dequant import dequantize


class Linear(Protocol):
    """`y = x · W + b`; several matrices of a file may stand side by side in one."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `[N, in]`; returns `[N, out]` of the dtype of `x`."""


class DenseLinear:
    """A matrix `[in, out]` and optionally a bias `[out]`, in the dtype that the model computes in.

    A product of few rows, which is what decoding and verification are, is up to twice as fast on a
    CPU when the output dimension is contiguous.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        if self.bias is None:
            return x @ self.weight
        return torch.addmm(self.bias, x, self.weight)


class SideBySide:
    """Matrices that are stored in different ways, as one."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return torch.cat([part(x) for part in self._parts], dim=-1)


class Embedding:
    """The table of token vectors, `[H, V]`: the same tensor as the head's where both are tied."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors `[N, H]` of token ids `[N]`."""
        return self.weight[:, token_ids].t().contiguous()


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
