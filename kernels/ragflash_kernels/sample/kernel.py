"""The largest logit in two stages: of chunks of a row, then of the chunks."""

import triton
import triton.language as tl


@triton.jit
def _first_largest(values, columns):
    """Return the largest of values and the first of its columns; NaN counts as -inf."""
    values = tl.where(values == values, values, float("-inf"))  # noqa: PLR0124
    top = tl.max(values, 0)
    return top, tl.min(tl.where(values == top, columns, 2147483647), 0)


@triton.jit(do_not_specialize=["row_stride", "valid", "chunks"])
def largest_of_chunks_kernel(
    logits, tops, places, row_stride, valid, chunks, CHUNK: tl.constexpr, EAGER: tl.constexpr
):
    """Write the largest of CHUNK columns and its place to `[rows, chunks]`.

    EAGER: let the next kernel start, and wait for the one before only here (sm_90).
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if EAGER:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    place = logits + row.to(tl.int64) * row_stride + column
    values = tl.load(place, mask=column < valid, other=float("-inf"))
    top, first = _first_largest(values, column)
    tl.store(tops + row * chunks + chunk, top)
    tl.store(places + row * chunks + chunk, first)


@triton.jit(do_not_specialize=["chunks"])
def largest_kernel(tops, places, out, chunks, CHUNKS: tl.constexpr, EAGER: tl.constexpr):
    """Write the place of the largest of a row's chunks; CHUNKS is at least their number."""
    row = tl.program_id(0)
    if EAGER:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.arange(0, CHUNKS)
    here = chunk < chunks
    top = tl.load(tops + row * chunks + chunk, mask=here, other=float("-inf"))
    place = tl.load(places + row * chunks + chunk, mask=here, other=2147483647)
    _, first = _first_largest(top, place)
    tl.store(out + row, first)
