"""Normalisation of a residual stream in plain Triton, a row a program."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["width"])
def add_rms_norm_kernel(x, residual, weight, out, width, eps, BLOCK: tl.constexpr):
    """Add a row of `x` to `residual` and write its norm; BLOCK is at least the width."""
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    mask = at < width
    total = tl.load(x + row + at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual + row + at, mask=mask, other=0.0).to(tl.float32)
    kept = total.to(residual.dtype.element_ty)
    tl.store(residual + row + at, kept, mask=mask)
    total = kept.to(tl.float32)
    factor = tl.rsqrt(tl.sum(total * total, 0) / width + eps)
    scale = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + at, (total * factor * scale).to(out.dtype.element_ty), mask=mask)
