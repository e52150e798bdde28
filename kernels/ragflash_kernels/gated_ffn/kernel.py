"""The gate of a feed-forward part in plain Triton, some columns of a row a program."""

import triton
import triton.language as tl

from ragflash_kernels.columns_kernel import load_columns
from ragflash_kernels.qmatmul.kernel import store_quantized

_TWICE_ROOT = tl.constexpr(1.5957691216057308)  # 2 · sqrt(2 / pi)


@triton.jit(do_not_specialize=["tiles"])
def gated_kernel(
    gate, up, out, scales_out, sums_out, gate_part_stride, gate_row_stride, up_part_stride,
    up_row_stride, width, tiles, GATE_PARTS: tl.constexpr, UP_PARTS: tl.constexpr,
    GELU: tl.constexpr, QUANTIZED: tl.constexpr, STEPS: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Write `activation(gate) · up`; half of 1 + tanh(x) is the sigmoid of 2 x.

    Args:
        gate: Parts that are still to be added.
        up: Likewise.
        out: `[N, width]`, or if QUANTIZED `ActivationBuffers.q` as int8.
        scales_out: As there.
        sums_out: As there.
        gate_part_stride: Elements from one part to the next.
        gate_row_stride: Elements from one row to the next.
        up_part_stride: As of the gate.
        up_row_stride: As of the gate.
        width: Columns.
        tiles: Of the buffers.
        GATE_PARTS: Parts of the gate.
        UP_PARTS: Of the other factor.
        GELU: The activation is GELU's tanh form, not SiLU.
        QUANTIZED: Whether the result is; STEPS is 8 then.
        STEPS: Of 32 columns that a program works on.
        EAGER: Let the next kernel start, and wait for the one before only here (sm_90).
    """
    row = tl.program_id(0)
    block = tl.program_id(1)
    step = tl.arange(0, STEPS)
    column = (block * STEPS + step[:, None]) * 32 + tl.arange(0, 32)[None, :]
    mask = column < width
    if EAGER:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    long_row = row.to(tl.int64)
    x = load_columns(gate + long_row * gate_row_stride, gate_part_stride, column, mask, GATE_PARTS)
    y = load_columns(up + long_row * up_row_stride, up_part_stride, column, mask, UP_PARTS)
    inner = x
    if GELU:
        inner = _TWICE_ROOT * (x + 0.044715 * x * x * x)
    value = x * tl.sigmoid(inner) * y
    if QUANTIZED:
        store_quantized(value, row, block, step, tiles, out, scales_out, sums_out)
    else:
        at = long_row * width + column
        tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)
