"""Products of a few activation rows with a quantised matrix that stays packed.

Activations are rounded to an int8 grid of 32 neighbours a scale, the same for any number of rows:
decoding one row and verifying many multiply the same numbers.
"""

import torch

from ragflash_kernels.backend import Backend, pick_backend
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.qmatmul.activations import MAX_ROWS
from ragflash_kernels.qmatmul.packing import PackedMatrix, pack_matrix, unpack_records
from ragflash_kernels.qmatmul.reference import qmatmul_reference

__all__ = ["MAX_ROWS", "PackedMatrix", "pack_matrix", "qmatmul", "unpack_matrix"]


def qmatmul(
    x: torch.Tensor, weight: PackedMatrix, *, backend: Backend | None = None
) -> torch.Tensor:
    """Return `x · weightᵀ`.

    Sums are float32. On an NVIDIA card a row's result is the same, bit for bit, whatever the
    other rows are and however many. A row with a value that is not finite gives NaN.

    Args:
        x: float32, float16 or bfloat16 `[M, K]`, 1 to `MAX_ROWS` rows, the last dimension
            contiguous; its amplitudes below 2**-100 count as zero.
        weight: `[N, K]`, on the device of `x`.
        backend: None picks by the device of `x`.

    Returns:
        float32 `[M, N]`.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_ROWS or x.shape[1] != weight.columns:
        raise KernelInputError(
            f"x {tuple(x.shape)} is not 1 to {MAX_ROWS} rows of {weight.columns}"
        )
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or x.stride(1) != 1:
        raise KernelInputError(f"x is {x.dtype} with strides {x.stride()}, not contiguous floats")
    if x.device != weight.records.device:
        raise KernelInputError(f"x is on {x.device}, the matrix on {weight.records.device}")
    match backend or pick_backend(x.device):
        case Backend.REFERENCE:
            return qmatmul_reference(x, weight)
        case Backend.TRITON:
            from ragflash_kernels.qmatmul.launch import qmatmul_triton  # noqa: PLC0415 - lazy

            return qmatmul_triton(x, weight)
        case Backend.GLUON:
            from ragflash_kernels.qmatmul.launch import qmatmul_gluon  # noqa: PLC0415

            return qmatmul_gluon(x, weight)


def unpack_matrix(
    weight: PackedMatrix,
    *,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Return the matrix that records stand for, each value rounded once.

    Args:
        weight: `[N, K]`.
        dtype: float32, float16 or bfloat16.
        out: Written and returned when given: `[N, K]` of `dtype`, contiguous, on the same device.
        backend: None picks by the device. There is one kernel; Gluon takes it too.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    expected = (weight.rows, weight.columns)
    device = weight.records.device
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise KernelInputError(f"cannot unpack into {dtype}; use float32, float16 or bfloat16")
    if out is None:
        out = torch.empty(expected, dtype=dtype, device=device)
    elif (
        tuple(out.shape) != expected
        or out.dtype != dtype
        or out.device != device
        or not out.is_contiguous()
    ):
        raise KernelInputError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, "
            f"not {expected} {dtype} on {device}, contiguous"
        )
    if (backend or pick_backend(device)) is Backend.REFERENCE:
        return out.copy_(unpack_records(weight))
    from ragflash_kernels.qmatmul.launch import unpack_triton  # noqa: PLC0415 - lazy

    unpack_triton(weight, out)
    return out
