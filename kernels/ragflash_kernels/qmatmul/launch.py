"""Grids and arguments of the kernels.

A sum over columns is cut into splits, so that a matrix occupies the whole card; the kernels write
one partial sum a split, which `sum_splits` adds in order.
"""

from functools import cache

import torch
import triton

from ragflash_kernels.qmatmul.activations import ROWS_PER_TILE, ActivationBuffers
from ragflash_kernels.qmatmul.formats import IQ4_VALUES, RecordFormat
from ragflash_kernels.qmatmul.gluon_kernel import qmatmul_gluon_kernel, unpack_gluon_kernel
from ragflash_kernels.qmatmul.kernel import (
    dense_kernel,
    qmatmul_kernel,
    quantize_rows_kernel,
    sum_splits_kernel,
    unpack_kernel,
)
from ragflash_kernels.qmatmul.packing import PackedMatrix

_RING_BYTES = 48 * 1024  # of shared memory that a program may reserve
_HEAD_TILES = 4096  # of a matrix as tall as a vocabulary
_MANY_RECORDS = 8192
_DENSE_WIDTH = 32  # rows of a float matrix that a program multiplies
_DENSE_PROGRAMS = 1024  # at least, where the columns allow as many
_MAX_DENSE_SPLITS = 20


def quantize_rows_triton(x: torch.Tensor, *, eager: bool = False) -> ActivationBuffers:
    """Quantise float rows `[M, K]`, the last dimension contiguous, into new buffers."""
    rows, columns = x.shape
    buffers = ActivationBuffers.allocate(rows, columns, x.device)
    quantize_rows_kernel[rows, buffers.q.shape[0]](
        x, buffers.q.view(torch.int8), buffers.scales, buffers.sums, x.stride(0), columns,
        buffers.q.shape[1], EAGER=eager, num_warps=1, launch_pdl=eager,
        enable_fp_fusion=False,  # the reference rounds the product before it rounds to an integer
    )  # fmt: skip
    return buffers


def qmatmul_triton(x: torch.Tensor, weight: PackedMatrix) -> torch.Tensor:
    """Return `grid(x) · weightᵀ`, float32 `[M, N]`, of at most 32 rows."""
    partial = multiply_plain(quantize_rows_triton(x), x.shape[0], weight)
    return sum_splits(partial, weight.rows)


def multiply_plain(buffers: ActivationBuffers, rows: int, weight: PackedMatrix) -> torch.Tensor:
    """Return the parts of the product, float32 `[splits, M, N]`, by plain Triton."""
    tiles, num_records, _ = weight.records.shape
    device = weight.records.device
    splits = min(num_records, max(1, 512 // tiles))
    per_split = -(-num_records // splits)
    splits = -(-num_records // per_split)
    partial = torch.empty((splits, rows, weight.rows), device=device)
    qmatmul_kernel[tiles, splits](
        weight.records, _levels(device), buffers.q.view(torch.int8), buffers.scales, buffers.sums,
        partial, rows, weight.rows, num_records, per_split, buffers.q.shape[1],
        SIGN=sign_bit(weight.layout), M=16 if rows <= 16 else 32, num_warps=1,
        **record_constants(weight.layout, weight.steps),
    )  # fmt: skip
    return partial


def multiply_dense(
    buffers: ActivationBuffers, rows: int, weight: torch.Tensor, *, eager: bool = False
) -> torch.Tensor:
    """Return the parts of `grid · weightᵀ`, float32 `[splits, M, N]`, for floats `[N, K]`."""
    out_columns, columns = weight.shape
    num_blocks, tiles = buffers.q.shape[:2]
    groups = triton.cdiv(out_columns, _DENSE_WIDTH)
    wanted = triton.cdiv(_DENSE_PROGRAMS, groups)
    per_split = triton.cdiv(num_blocks, min(_MAX_DENSE_SPLITS, wanted))
    splits = triton.cdiv(num_blocks, per_split)
    partial = torch.empty((splits, rows, out_columns), device=weight.device)
    dense_kernel[groups, splits](
        weight, buffers.q.view(torch.int8), buffers.scales, partial, rows, out_columns, columns,
        num_blocks, per_split, tiles, M=16 if rows <= 16 else 32, WIDTH=_DENSE_WIDTH, EAGER=eager,
        num_warps=2, launch_pdl=eager,
    )  # fmt: skip
    return partial


def unpack_triton(weight: PackedMatrix, out: torch.Tensor) -> None:
    """Unpack into contiguous floats `[rows, columns]`."""
    tiles, num_records, _ = weight.records.shape
    unpack_kernel[tiles, num_records](
        weight.records, _levels(out.device), out, weight.rows, weight.columns, num_records,
        SIGN=sign_bit(weight.layout), num_warps=1, enable_fp_fusion=False,
        **record_constants(weight.layout, weight.steps),
    )  # fmt: skip


def unpack_gluon(weight: PackedMatrix, out: torch.Tensor, *, warps: int = 4) -> None:
    """Unpack into contiguous bfloat16 or float16 `[rows, columns]`."""
    tiles, num_records, _ = weight.records.shape
    units = tiles * num_records
    unpack_gluon_kernel[(triton.cdiv(units, warps),)](
        weight.records, out, weight.rows, weight.columns, num_records, units, WARPS=warps,
        BFLOAT16=out.dtype == torch.bfloat16, num_warps=warps, enable_fp_fusion=False,
        **record_constants(weight.layout, weight.steps),
    )  # fmt: skip


def sign_bit(layout: RecordFormat) -> int:
    """Return the sign bit of a code, 0 if codes have none."""
    return 0 if layout.minima else 1 << (layout.code_bits - 1)


def record_constants(layout: RecordFormat, steps: int) -> dict[str, int]:
    """Return the constants that both kernels are compiled for."""
    offsets = layout.offsets(steps)
    return {
        "RECORD_BYTES": offsets.size,
        "HIGH": offsets.high,
        "SCALES": offsets.scales,
        "MINIMA": offsets.minima,
        "FACTORS": offsets.factors,
        "STEPS": steps,
        "LOW_BITS": layout.low_bits,
        "HIGH_BITS": layout.high_bits,
        "TABLE": layout.table,
        "KIND": int(layout.scales),
        "HAS_MINIMA": layout.minima,
    }


@cache
def _levels(device: torch.device) -> torch.Tensor:
    return torch.tensor(IQ4_VALUES, dtype=torch.int8, device=device)


def sum_splits(partial: torch.Tensor, columns: int, *, eager: bool = False) -> torch.Tensor:
    """Add partial sums `[splits, M, ≥ columns]` in order: float32 `[M, columns]`."""
    splits, rows, partial_columns = partial.shape
    if splits == 1 and partial_columns == columns:
        return partial[0]
    out = torch.empty((rows, columns), device=partial.device)
    width = 256
    sum_splits_kernel[rows, triton.cdiv(columns, width)](
        partial, out, rows, columns, partial_columns, SPLITS=splits, WIDTH=width, EAGER=eager,
        num_warps=2, launch_pdl=eager,
    )  # fmt: skip
    return out


def qmatmul_gluon(x: torch.Tensor, weight: PackedMatrix, *, eager: bool = False) -> torch.Tensor:
    """Return `grid(x) · weightᵀ`, float32 `[M, N]`, of at most 32 rows."""
    buffers = quantize_rows_triton(x, eager=eager)
    return multiply_quantized(buffers, x.shape[0], weight, eager=eager)


def multiply_quantized(
    buffers: ActivationBuffers,
    rows: int,
    weight: PackedMatrix,
    *,
    eager: bool = False,
    records_per_split: int | None = None,
    warps: int = 4,
    prefetch: bool | None = None,
    staged: bool = False,
    max_registers: int | None = None,
) -> torch.Tensor:
    """Return the sum of `multiply_into_splits`; arguments as there."""
    partial = multiply_into_splits(
        buffers, rows, weight, eager=eager, records_per_split=records_per_split, warps=warps,
        prefetch=prefetch, staged=staged, max_registers=max_registers,
    )  # fmt: skip
    return sum_splits(partial, weight.rows, eager=eager)


def multiply_into_splits(
    buffers: ActivationBuffers,
    rows: int,
    weight: PackedMatrix,
    *,
    eager: bool = False,
    records_per_split: int | None = None,
    warps: int = 4,
    prefetch: bool | None = None,
    staged: bool | None = None,
    max_registers: int | None = None,
) -> torch.Tensor:
    """Multiply quantised rows, split by split along the columns of the matrix.

    Args:
        buffers: Of `rows` rows.
        rows: 1 to `MAX_ROWS`.
        weight: The matrix.
        eager: Programmatic dependent launch (sm_90): weights are loaded before the kernel that
            writes the buffers has ended.
        records_per_split: None for what was found best; it decides the order of sums.
        warps: Of a program.
        prefetch: Ask the second-level cache for the next record; None for what was found best.
        staged: Copy two records ahead into shared memory; None for what was found best.
        max_registers: A thread may use; None for what was found best.

    Returns:
        float32 `[splits, M, N]`, to be added in order.
    """
    tiles, num_records, _ = weight.records.shape
    if prefetch is None:
        prefetch = 1 < rows <= 16 or rows > 24
    if staged is None:
        staged = _is_hopper(weight.records.device) and pick_staging(
            weight.layout, rows, tiles, tiles * num_records
        )
    if max_registers is None and not eager and _is_hopper(weight.records.device):
        max_registers = pick_registers(weight.layout, rows)
    if staged:
        warps = min(warps, 4 if 8 * weight.records.shape[2] <= _RING_BYTES else 2)
    per_split = records_per_split or _records_per_split(tiles, num_records, weight.steps)
    splits = triton.cdiv(num_records, per_split)
    partial = torch.empty((splits, rows, weight.rows), device=weight.records.device)
    qmatmul_gluon_kernel[triton.cdiv(tiles, warps), splits](
        weight.records, buffers.q, buffers.scales, buffers.sums, partial, rows, weight.rows, tiles,
        num_records, per_split, TILES=triton.cdiv(rows, ROWS_PER_TILE), ONE=rows == 1,
        WARPS=warps, PREFETCH=prefetch, STAGED=staged, EAGER=eager, num_warps=warps,
        maxnreg=max_registers, launch_pdl=eager, **record_constants(weight.layout, weight.steps),
    )  # fmt: skip
    return partial


def pick_registers(layout: RecordFormat, rows: int) -> int | None:
    """Return the registers of a thread that are best on an H200; None for no limit.

    Four warps more on an SM take a fifth off, unless codes of more bits spill for it.
    """
    return 128 if rows > 24 and layout.high_bits == 0 else None


def pick_staging(layout: RecordFormat, rows: int, tiles: int, num_records: int) -> bool:
    """Return whether records come through shared memory, by what was faster on an H200.

    One row of Q6_K 25.5 → 21.7 µs and of a small Q4_K matrix 7.8 → 7.0; 16 rows of Q4_K 26.1 → 20.8
    and 46.3 → 42.7. All other products lost by it.
    """
    is_small = num_records < _MANY_RECORDS
    if rows == 1:
        return tiles < _HEAD_TILES and (layout.high_bits == 2 or is_small)
    return 8 < rows <= 16 and layout.high_bits == 0 and not is_small


def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _records_per_split(tiles: int, num_records: int, steps: int) -> int:
    """Return how many records a warp works through, by the matrix alone.

    Found on an H200 with matrices of a 27B model: 3 blocks of 256 columns of 5,120 and 6,144, 6 of
    17,408, all of a vocabulary's.
    """
    if tiles >= _HEAD_TILES:
        return num_records
    blocks = num_records * steps // 8
    per_split = min(tiles * blocks // 1280, max(3, blocks // 11))
    return max(1, per_split * 8 // steps)
