"""Matrices that a model multiplies with, whatever they are stored as."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional

from ragflash_kernels.dequant import dequantize

_FEW_ROWS, _FEW_ROWS_OF_WIDE = 8, 4
_WIDEST = 8  # outputs an input; turned, still wider ones (heads) cost many rows too much


class Linear(Protocol):
    """`y = x · Wᵀ + b`; several matrices of a file may stand side by side in one."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `[N, in]`; returns `[N, out]` of the dtype of `x`."""


class DenseLinear:
    """A matrix `[out, in]` and optionally a bias `[out]`, in the dtype that the model computes in.

    Float32 on a CPU is multiplied as costs the least processor time for so many rows. A wide matrix
    is turned for that, since one row's product with it is bound by reading, and reads a turned one
    half as fast again. Few rows are columns behind a matrix that is not wide. More rows take
    oneDNN's product, which torch itself calls for smaller types only.

    Args:
        weight: `[out, in]`.
        bias: `[out]`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        is_float32 = weight.is_cpu and weight.dtype == torch.float32
        is_wide = is_float32 and 1 < len(weight) / weight.shape[1] <= _WIDEST
        self._weight = weight.t().contiguous().t() if is_wide else weight
        self._bias = bias
        self._has_onednn = is_float32 and torch._C._has_mkldnn
        self._few_rows = _FEW_ROWS_OF_WIDE if is_wide else _FEW_ROWS
        self._takes_columns = is_float32 and not is_wide

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        if len(x) > self._few_rows and self._has_onednn:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return product
        if self._takes_columns and 1 < len(x) <= self._few_rows:
            y = self._weight @ x.t()
            return (y if self._bias is None else y + self._bias[:, None]).t().contiguous()
        return functional.linear(x, self._weight, self._bias)


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
