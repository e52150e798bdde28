"""Products of a few activation rows with a quantised matrix that stays packed.

Activations are rounded to an int8 grid of 32 neighbours a scale, the same for any number of rows:
decoding one row and verifying many multiply the same numbers.
"""

import torch

from ragflash_kernels.backend import Backend, pick_backend
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.qmatmul.activations import MAX_ROWS, ActivationBuffers
from ragflash_kernels.qmatmul.formats import BLOCK_COLUMNS
from ragflash_kernels.qmatmul.packing import PackedMatrix, pack_matrix, unpack_records
from ragflash_kernels.qmatmul.reference import multiply_reference

__all__ = [
    "MAX_ROWS",
    "ActivationBuffers",
    "PackedMatrix",
    "multiply",
    "pack_matrix",
    "qmatmul",
    "quantize",
    "unpack_matrix",
]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


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
    _check_rows(x)
    if x.shape[1] != weight.columns:
        raise KernelInputError(f"x {tuple(x.shape)} is not rows of {weight.columns}")
    if x.device != weight.records.device:
        raise KernelInputError(f"x is on {x.device}, the matrix on {weight.records.device}")
    match backend or pick_backend(x.device):
        case Backend.REFERENCE:
            return multiply_reference(ActivationBuffers.from_rows(x), len(x), weight)
        case Backend.TRITON:
            from ragflash_kernels.qmatmul.launch import qmatmul_triton  # noqa: PLC0415 - lazy

            return qmatmul_triton(x, weight)
        case Backend.GLUON:
            from ragflash_kernels.qmatmul.launch import qmatmul_gluon  # noqa: PLC0415

            return qmatmul_gluon(x, weight)


def quantize(
    x: torch.Tensor, *, eager: bool = False, backend: Backend | None = None
) -> ActivationBuffers:
    """Round rows to their grid; see `qmatmul` for `x`, `multiply` for the rest."""
    _check_rows(x)
    if (backend or pick_backend(x.device)) is Backend.REFERENCE:
        return ActivationBuffers.from_rows(x)
    from ragflash_kernels.qmatmul.launch import quantize_rows_triton  # noqa: PLC0415 - lazy

    return quantize_rows_triton(x, eager=eager)


def multiply(
    x: ActivationBuffers | torch.Tensor,
    rows: int,
    weight: PackedMatrix | torch.Tensor,
    *,
    unpacked: torch.Tensor | None = None,
    eager: bool = False,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Return the parts of `x · weightᵀ`, `[P, M, N]`; the product is their sum in order.

    Args:
        x: Rows on the grid, or floats `[M, K]`.
        rows: M; at most `MAX_ROWS` on the grid.
        weight: `[N, K]`, packed or contiguous floats.
        unpacked: Work space of at least N · K values of the type of `x`, contiguous, for floats
            times a packed matrix; None takes new memory.
        eager: Programmatic dependent launch (sm_90), of rows on the grid.
        backend: None picks by the device.

    Returns:
        Float32 for rows on the grid: on an NVIDIA card a row's parts are the same, bit for bit,
        whatever the other rows are. For floats one part of their type.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    device = weight.records.device if isinstance(weight, PackedMatrix) else weight.device
    backend = backend or pick_backend(device)
    _check_factors(x, rows, weight)
    if isinstance(x, torch.Tensor):
        return _multiply_floats(x, weight, unpacked, backend)
    if backend is Backend.REFERENCE:
        return multiply_reference(x, rows, weight)[None]
    from ragflash_kernels.qmatmul import launch  # noqa: PLC0415 - lazy

    if isinstance(weight, torch.Tensor):
        return launch.multiply_dense(x, rows, weight, eager=eager)
    if backend is Backend.TRITON:
        return launch.multiply_plain(x, rows, weight)
    return launch.multiply_into_splits(x, rows, weight, eager=eager)


def _multiply_floats(
    x: torch.Tensor,
    weight: PackedMatrix | torch.Tensor,
    unpacked: torch.Tensor | None,
    backend: Backend,
) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        dense = weight.to(x.dtype)
    else:
        if unpacked is not None:
            size = weight.rows * weight.columns
            if unpacked.numel() < size:
                raise KernelInputError(f"unpacked holds {unpacked.numel()} values, not {size}")
            unpacked = unpacked.view(-1)[:size].view(weight.rows, weight.columns)
        dense = unpack_matrix(weight, dtype=x.dtype, out=unpacked, backend=backend)
    return torch.mm(x, dense.t())[None]


def _check_rows(x: torch.Tensor) -> None:
    if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_ROWS:
        raise KernelInputError(f"x {tuple(x.shape)} is not 1 to {MAX_ROWS} rows")
    if x.dtype not in _FLOATS or x.stride(1) != 1:
        raise KernelInputError(f"x is {x.dtype} with strides {x.stride()}, not contiguous floats")


def _check_factors(
    x: ActivationBuffers | torch.Tensor, rows: int, weight: PackedMatrix | torch.Tensor
) -> None:
    if isinstance(weight, PackedMatrix):
        columns = weight.columns
    elif weight.dim() == 2 and weight.dtype in _FLOATS and weight.is_contiguous():
        columns = weight.shape[1]
    else:
        raise KernelInputError(f"weight {weight.dtype} {tuple(weight.shape)} is not floats [N, K]")
    if isinstance(x, torch.Tensor):
        if tuple(x.shape) != (rows, columns) or x.dtype not in _FLOATS:
            raise KernelInputError(
                f"x {tuple(x.shape)} {x.dtype} is not floats [{rows}, {columns}]"
            )
        return
    blocks, tiles = x.q.shape[:2]
    if not 1 <= rows <= min(8 * tiles, MAX_ROWS) or blocks != -(-columns // BLOCK_COLUMNS):
        raise KernelInputError(
            f"buffers of {8 * tiles} rows and {blocks} blocks of {BLOCK_COLUMNS} columns do not "
            f"hold {rows} rows of {columns}"
        )


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
        backend: None picks by the device. Gluon has a kernel for types of 16 bits, and takes the
            plain one for float32.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    expected = (weight.rows, weight.columns)
    device = weight.records.device
    if dtype not in _FLOATS:
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
    backend = backend or pick_backend(device)
    if backend is Backend.REFERENCE:
        return out.copy_(unpack_records(weight))
    from ragflash_kernels.qmatmul import launch  # noqa: PLC0415 - lazy

    if backend is Backend.GLUON and dtype != torch.float32:
        launch.unpack_gluon(weight, out)
    else:
        launch.unpack_triton(weight, out)
    return out
