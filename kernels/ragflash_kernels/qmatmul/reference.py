"""Plain torch: the grid values times the unpacked matrix, in float32."""

import torch
from torch import Tensor

from ragflash_kernels.qmatmul.activations import ActivationBuffers
from ragflash_kernels.qmatmul.packing import PackedMatrix, unpack_records


def multiply_reference(x: ActivationBuffers, rows: int, weight: PackedMatrix | Tensor) -> Tensor:
    """Return `grid · weightᵀ`, float32 `[M, N]`."""
    dense = unpack_records(weight) if isinstance(weight, PackedMatrix) else weight.float()
    return torch.mm(x.to_rows(rows, dense.shape[1]), dense.t())
