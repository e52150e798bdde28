"""Normalisation of a residual stream in plain Triton, a row a program."""

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
