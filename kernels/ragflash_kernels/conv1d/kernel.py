"""The convolution in Triton, as a part of the kernels that read what it gives."""

import triton
import triton.language as tl

from ragflash_kernels.columns_kernel import load_columns


@triton.jit
def _go_back(row, first, parents, here, COUNT: tl.constexpr):
    """Return the row so many before `row` on its path; those before `first` are in the tail."""
    if parents is None:
        at = row - COUNT
    else:
        at = row
        for _ in tl.static_range(COUNT):
            inside = here & (at >= first)
            parent = tl.load(parents + at, mask=inside, other=0)
            at = tl.where(inside, first + parent, at - 1)
    return at


@triton.jit
def convolve(
    parts, part_stride, row_stride, tail, weight, row, first, parents, channel, here, channels,
    PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Weigh rows and those before them, then SiLU.

    Args:
        parts: Of the inputs, still to be added, from the first channel on.
        part_stride: Elements from one part to the next.
        row_stride: Elements.
        tail: float32 `[WIDTH - 1, channels]`, before row `first`.
        weight: float32 `[channels, WIDTH]`.
        row: int64 `[R, 1]`, rows of `parts`.
        first: The first row of their sequence.
        parents: Of all rows, counted from `first`, -1 for the tail; None for a chain.
        channel: `[1, C]`.
        here: `[R, 1]`, which rows there are.
        channels: Of all heads.
        PARTS: How many.
        WIDTH: Rows that are weighed.

    Returns:
        The result and the inputs of `row`, float32 `[R, C]`.
    """
    every = channel >= 0
    for tap in tl.static_range(WIDTH):
        at = _go_back(row, first, parents, here, WIDTH - 1 - tap)
        inside = here & (at >= first) & every
        x = load_columns(parts, part_stride, at * row_stride + channel, inside, PARTS)
        if tap < WIDTH - 1:
            before = here & (at < first) & every
            place = (at - first + WIDTH - 1) * channels + channel
            x += tl.load(tail + place, mask=before, other=0.0)
        factor = tl.load(weight + channel * WIDTH + tap)
        if tap == 0:
            total = x * factor
        else:
            total += x * factor
    return total * tl.sigmoid(total), x
