"""Normalisation of a residual stream in plain Triton.

Many rows occupy a card with a program each, and narrow rows take no longer than a second launch. Of
few wide rows every 256 columns have a program of their own, in two kernels: one program would spend
its time reading the parts of a whole row.
"""

import triton
import triton.language as tl

from ragflash_kernels.columns_kernel import load_columns
from ragflash_kernels.qmatmul.kernel import store_quantized


@triton.jit
def _norm(values, width, eps):
    """Return `[S, 32]` values of one row over their root mean square."""
    return values * tl.rsqrt(tl.sum(tl.sum(values * values, 1), 0) / width + eps)


@triton.jit(do_not_specialize=["blocks", "tiles"])
def add_norm_kernel(
    delta, residual, weight, post_weight, out, scales_out, sums_out, part_stride, row_stride,
    width, blocks, tiles, eps, delta_scale, residual_scale, PARTS: tl.constexpr,
    POST: tl.constexpr, QUANTIZED: tl.constexpr, STEPS: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Add a row of `delta` to `residual` and write the norm of the sum.

    Args:
        delta: Parts that are still to be added, rows `row_stride` apart; read if PARTS is not 0.
        residual: float32 `[N, width]`; written if PARTS is not 0.
        weight: float32 `[width]`.
        post_weight: Likewise, of the norm of `delta`; read if POST.
        out: `[N, width]`, or if QUANTIZED `ActivationBuffers.q` as int8.
        scales_out: As there.
        sums_out: As there.
        part_stride: Elements from one part to the next.
        row_stride: Elements.
        width: Columns.
        blocks: Of the buffers.
        tiles: Of the buffers.
        eps: Added to mean squares.
        delta_scale: Factor of what is added.
        residual_scale: Factor of the sum.
        PARTS: Of `delta`.
        POST: Whether `delta` is normalised.
        QUANTIZED: Whether the result is.
        STEPS: Of 32 columns, a power of two that covers the width, and the buffers.
        EAGER: Let the next kernel start, and wait for the one before once the weight is on its
            way (sm_90).
    """
    row = tl.program_id(0)
    step = tl.arange(0, STEPS)
    column = step[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = column < width
    if EAGER:
        tl.extra.cuda.gdc_launch_dependents()
    factor = tl.load(weight + column, mask=mask, other=0.0)
    if EAGER:
        tl.extra.cuda.gdc_wait()
    at = row.to(tl.int64) * width + column
    total = tl.load(residual + at, mask=mask, other=0.0)
    if PARTS > 0:
        row_start = row.to(tl.int64) * row_stride
        added = load_columns(delta + row_start, part_stride, column, mask, PARTS)
        if POST:
            post_factor = tl.load(post_weight + column, mask=mask, other=0.0)
            added = _norm(added, width, eps) * post_factor
        total = (total + added * delta_scale) * residual_scale
        tl.store(residual + at, total, mask=mask)
    normal = _norm(total, width, eps) * factor
    if QUANTIZED:
        block = step // 8
        store_quantized(
            normal, row, block, step % 8, tiles, out, scales_out, sums_out, block < blocks
        )
    else:
        tl.store(out + at, normal.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def add_parts_kernel(
    delta, residual, squares, part_stride, row_stride, width, blocks, delta_scale, residual_scale,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Add BLOCK columns of a row of `delta` to `residual`, and sum the squares of what results.

    Arguments as in `add_norm_kernel`, and `squares`, float32 `[N, blocks]`.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    if EAGER:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = row.to(tl.int64) * width + column
    total = tl.load(residual + at, mask=mask, other=0.0)
    if PARTS > 0:
        row_start = row.to(tl.int64) * row_stride
        added = load_columns(delta + row_start, part_stride, column, mask, PARTS)
        total = (total + added * delta_scale) * residual_scale
        tl.store(residual + at, total, mask=mask)
    tl.store(squares + row * blocks + block, tl.sum(total * total, 0))


@triton.jit(do_not_specialize=["blocks", "tiles"])
def norm_parts_kernel(
    residual, squares, weight, out, scales_out, sums_out, width, blocks, tiles, eps,
    BLOCKS: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Put the norm of 256 columns of a row on the int8 grid.

    Arguments as in `add_norm_kernel`, and `squares` as `add_parts_kernel` left it; BLOCKS is a
    power of two that covers them.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    step = tl.arange(0, 8)
    column = block * 256 + step[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = column < width
    if EAGER:
        tl.extra.cuda.gdc_launch_dependents()
    factor = tl.load(weight + column, mask=mask, other=0.0)
    if EAGER:
        tl.extra.cuda.gdc_wait()
    each = tl.arange(0, BLOCKS)
    total = tl.sum(tl.load(squares + row * blocks + each, mask=each < blocks, other=0.0), 0)
    values = tl.load(residual + row.to(tl.int64) * width + column, mask=mask, other=0.0)
    normal = values * tl.rsqrt(total / width + eps) * factor
    here = block + step * 0
    store_quantized(normal, row, here, step, tiles, out, scales_out, sums_out, here < blocks)
