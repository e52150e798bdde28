"""Moves in plain Triton: a program takes some values of a token from place to place, in order."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_moves", "page_values", "num_values"])
def move_tokens_kernel(
    pages, starts, strides, moves, num_moves, page_values, num_values, BLOCK: tl.constexpr
):
    """Copy BLOCK values of each moved token; arguments as in `move_tokens`."""
    value = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = value < num_values
    start = tl.load(starts + value, mask=here, other=0).to(tl.int64)
    stride = tl.load(strides + value, mask=here, other=0).to(tl.int64)
    for move in range(num_moves):
        at = moves + move * 4
        source = tl.load(at) * page_values + tl.load(at + 1) * stride + start
        target = tl.load(at + 2) * page_values + tl.load(at + 3) * stride + start
        tl.store(pages + target, tl.load(pages + source, mask=here), mask=here)
        tl.debug_barrier()  # later targets may be this source, which other threads have read
