"""Plain torch: the grid values times the unpacked matrix, in float32."""

import torch
from torch import Tensor

from ragflash_kernels.qmatmul.activations import quantize_rows
from ragflash_kernels.qmatmul.formats import COLUMNS_PER_STEP
from ragflash_kernels.qmatmul.packing import PackedMatrix, unpack_records


def qmatmul_reference(x: Tensor, weight: PackedMatrix) -> Tensor:
    """Return `grid(x) · weightᵀ`, float32 `[M, N]`."""
    q, scales = quantize_rows(x)
    grid = q.float().view(*scales.shape, COLUMNS_PER_STEP) * scales[..., None]
    return torch.mm(grid.flatten(1), unpack_records(weight).t())
