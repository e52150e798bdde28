"""Queries as fragments of matrix instructions, in plain Triton."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_NEVER = tl.constexpr(2147483647)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, ties to even


@triton.jit(do_not_specialize=["kv_heads", "group", "tiles"])
def quantize_queries_kernel(
    q, first_rows, starts, q_out, scales_out, bounds_out, factor, kv_heads, group, tiles,
    DIM: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Quantise a tile of eight queries of a sequence and a key head as fragments of a product.

    Query m of a sequence is head m % group of its row m // group. A query's values, in int8 steps
    of 1/127 of the largest, lie by pair of blocks of 32, then lane 4 g + c: values 8 c … 8 c + 7
    of query g in the first block, then in the second.

    Args:
        q: Floats `[rows, kv_heads * group, DIM]`.
        first_rows: As in `Visibility`.
        starts: Likewise.
        q_out: int8 `[sequences, kv_heads, tiles, 8 * DIM]`.
        scales_out: float32 `[sequences, kv_heads, tiles, 8]`, times `factor`.
        bounds_out: int32 `[sequences, kv_heads, tiles, 2]`: the least and the largest start.
        factor: See `scales_out`.
        kv_heads: Of the cache.
        group: Query heads of a key head.
        tiles: See `q_out`.
        DIM: Values of a head.
        EAGER: Let the next kernel start, and wait for the one before only here (sm_90).
    """
    if EAGER:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(first_rows + sequence)
    num_rows = tl.load(first_rows + sequence + 1) - first_row
    of_tile = tl.arange(0, 8)
    m = tile * 8 + of_tile
    here = m < num_rows * group
    row = (first_row + m // group).to(tl.int64)
    d = tl.arange(0, DIM)[None, :]
    at = (row * (kv_heads * group) + head * group + m % group)[:, None] * DIM + d
    x = tl.load(q + at, mask=here[:, None], other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), 1) * (1.0 / 127.0)
    codes = x / tl.where(scale > 0.0, scale, 1.0)[:, None]
    codes = tl.clamp((codes + _ROUND) - _ROUND, -127.0, 127.0).to(tl.int8)
    place = (sequence * kv_heads + head) * tiles + tile
    lane = of_tile[:, None] * 4 + d % 32 // 8
    byte = d // 64 * 512 + lane * 16 + d % 64 // 32 * 8 + d % 8
    tl.store(q_out + place.to(tl.int64) * (8 * DIM) + byte, codes)
    # Scores start at -inf where a token is hidden: times 0 they would be NaN.
    tl.store(scales_out + place * 8 + of_tile, tl.maximum(scale * factor, 1e-30))
    start = tl.load(starts + row, mask=here, other=0)
    tl.store(bounds_out + place * 2, tl.min(tl.where(here, start, _NEVER), 0))
    tl.store(bounds_out + place * 2 + 1, tl.max(start, 0))
