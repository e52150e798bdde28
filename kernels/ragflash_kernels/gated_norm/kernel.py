"""Norm and gate of heads in plain Triton, 256 columns of a row a program."""

import triton
import triton.language as tl

from ragflash_kernels.columns_kernel import load_columns
from ragflash_kernels.qmatmul.kernel import store_quantized


@triton.jit(do_not_specialize=["part_stride", "row_stride", "columns", "tiles"])
def gated_norm_kernel(
    o, gate, weight, out, scales_out, sums_out, part_stride, row_stride, columns, tiles, eps,
    PARTS: tl.constexpr, DIM: tl.constexpr, QUANTIZED: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Write `rms_norm(o) · silu(gate)`.

    Args:
        o: Floats `[N, columns]`.
        gate: Parts that are still to be added, rows `row_stride` apart.
        weight: float32 `[DIM]`.
        out: `[N, columns]`, or if QUANTIZED `ActivationBuffers.q` as int8.
        scales_out: As there.
        sums_out: As there.
        part_stride: Elements from one part to the next.
        row_stride: Elements.
        columns: Of all heads.
        tiles: Of the buffers.
        eps: Added to mean squares.
        PARTS: Of the gate.
        DIM: Values of a head, a power of two up to 256.
        QUANTIZED: Whether the result is.
        EAGER: Let the next kernel start, and wait for the one before once the weight is on its
            way (sm_90).
    """
    row = tl.program_id(0)
    block = tl.program_id(1)
    if EAGER:
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.arange(0, DIM)[None, :]
    factor = tl.load(weight + at)
    column = block * 256 + tl.arange(0, 256 // DIM)[:, None] * DIM + at
    mask = column < columns
    if EAGER:
        tl.extra.cuda.gdc_wait()
    place = row.to(tl.int64) * columns + column
    x = tl.load(o + place, mask=mask, other=0.0).to(tl.float32)
    z = load_columns(gate + row.to(tl.int64) * row_stride, part_stride, column, mask, PARTS)
    x *= tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    x = x * factor * (z * tl.sigmoid(z))
    if QUANTIZED:
        steps = tl.arange(0, 8)
        store_quantized(tl.reshape(x, (8, 32)), row, block, steps, tiles, out, scales_out, sums_out)
    else:
        tl.store(out + place, x.to(out.dtype.element_ty), mask=mask)
