"""Matrices of a model as a card multiplies them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from ragflash.models.linear import PackedEmbedding
from ragflash_kernels.columns import Columns
from ragflash_kernels.dequant import dequantize
from ragflash_kernels.embedding import gather_rows
from ragflash_kernels.qmatmul import (
    ActivationBuffers,
    PackedMatrix,
    multiply,
    pack_matrix,
    quantize,
)
from ragflash_kernels.qmatmul.formats import RECORD_FORMATS

Matrix = PackedMatrix | torch.Tensor  # a tensor is `[out, in]`, of a format that has no records
Activations = ActivationBuffers | torch.Tensor

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks of a file, uint8 `[out, row bytes]`, and their format."""

    blocks: torch.Tensor
    block_format: str

    def matrix(self) -> Matrix:
        """Repack them; formats without records are unpacked."""
        if self.block_format in RECORD_FORMATS:
            return pack_matrix(self.blocks, block_format=self.block_format)
        dtype = _FLOATS.get(self.block_format, torch.bfloat16)
        return dequantize(self.blocks, block_format=self.block_format, dtype=dtype)


@dataclass(frozen=True, slots=True)
class RecordLinear:
    """Matrices that share their input, those of one format joined.

    Attributes:
        matrices: In order of columns.
        widths: Columns of each matrix of the file, in the same order.
        bias: float32 `[out]`, added to the products.
    """

    matrices: tuple[Matrix, ...]
    widths: tuple[int, ...]
    bias: torch.Tensor | None = None

    @classmethod
    def of(
        cls, stored: Sequence[Stored], widths: Sequence[int], bias: torch.Tensor | None = None
    ) -> Self:
        """Repack what a file stores."""
        return cls(tuple(one.matrix() for one in stored), tuple(widths), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply up to 32 rows and add all parts up; see `Linear`."""
        products = self.multiply(quantize(x), len(x), unpacked=None)
        return torch.cat([columns.sum() for columns in products], dim=-1).to(x.dtype)

    @property
    def largest_values(self) -> int:
        """Values of the largest matrix that is unpacked for many rows."""
        sizes = [one.rows * one.columns for one in self.matrices if isinstance(one, PackedMatrix)]
        return max(sizes, default=0)

    def multiply(
        self, x: Activations, num_rows: int, *, unpacked: torch.Tensor | None, eager: bool = False
    ) -> tuple[Columns, ...]:
        """Return the products, one entry for each of `widths`.

        Args:
            x: `num_rows` rows on the int8 grid, or bfloat16.
            num_rows: At most 32 on the grid.
            unpacked: bfloat16 work space of `largest_values` or more, for rows in bfloat16.
            eager: Start before the kernel before has ended (sm_90).
        """
        products = [
            multiply(x, num_rows, matrix, unpacked=unpacked, eager=eager)
            for matrix in self.matrices
        ]
        if self.bias is not None:
            first = 0
            for product in products:
                product[0] += self.bias[first : first + product.shape[2]]
                first += product.shape[2]
        return tuple(_cut(products, self.widths))


def gathered(table: PackedEmbedding, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the float32 rows of a table, in one launch, where the token ids `[N]` are."""
    return gather_rows(table.blocks, token_ids, table.block_format)


def _cut(products: Sequence[torch.Tensor], widths: Sequence[int]) -> list[Columns]:
    columns, at, start = [], 0, 0
    for width in widths:
        if start == products[at].shape[2]:
            at, start = at + 1, 0
        columns.append(Columns(products[at], start, width))
        start += width
    return columns
