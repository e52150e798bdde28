"""Reading `Columns` in Triton."""

import triton
import triton.language as tl


@triton.jit
def load_columns(parts, part_stride, at, mask, PARTS: tl.constexpr):
    """Add parts in order: float32 of the shape of `at`, zero where `mask` is not set.

    Args:
        parts: Where the columns begin in the first part.
        part_stride: Elements from one part to the next.
        at: Elements from `parts`.
        mask: Of the shape of `at`.
        PARTS: How many.
    """
    total = tl.load(parts + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        stored = tl.load(parts + part * part_stride + at, mask=mask, other=0.0)
        total += stored.to(tl.float32)
    return total
