"""Queries rotated, and as fragments of matrix instructions, in plain Triton."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_NEVER = tl.constexpr(2147483647)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, ties to even


@triton.jit
def _hadamard(N: tl.constexpr):
    """Return the signs of the transform of N values, at most 16: float32 `[N, N]`."""
    common = tl.arange(0, N)[:, None] & tl.arange(0, N)[None, :]
    common = common ^ (common >> 2)
    return 1.0 - 2.0 * ((common ^ (common >> 1)) & 1).to(tl.float32)


@triton.jit
def rotate(x, first, last, root, GROUP: tl.constexpr):
    """Rotate float32 `[GROUP]` as `kv_codec` does, by two products instead of many exchanges.

    Signs, the transform of eighths and in eighths, signs. `first` and `last` are those of
    `sign_vectors`, the other way round to rotate back, and `root` is the inverse root of GROUP.
    """
    d = tl.arange(0, GROUP)
    width: tl.constexpr = GROUP // 8
    y = tl.reshape(x * tl.load(first + d), (8, width))
    y = tl.sum(y[:, :, None] * _hadamard(width)[None, :, :], 1)
    y = tl.sum(_hadamard(8)[:, :, None] * y[None, :, :], 1)
    return tl.reshape(y, (GROUP,)) * root * tl.load(last + d)


@triton.jit
def rotate_queries_kernel(q, first, last, out, root, GROUP: tl.constexpr, EAGER: tl.constexpr):
    """Rotate one group; EAGER: start the next kernel, and wait for the one before (sm_90)."""
    at = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    if EAGER:
        gdc_launch_dependents()
        gdc_wait()
    tl.store(out + at, rotate(tl.load(q + at).to(tl.float32), first, last, root, GROUP))


@triton.jit
def _load_group(q, here, first, last, root, GROUP: tl.constexpr, ROTATE: tl.constexpr):
    x = tl.load(q + tl.arange(0, GROUP), mask=here, other=0.0).to(tl.float32)
    if ROTATE:
        x = rotate(x, first, last, root, GROUP)
    return x


@triton.jit
def _store_codes(out, x, scale, of_tile, group: tl.constexpr, GROUP: tl.constexpr):
    codes = x / tl.where(scale > 0.0, scale, 1.0)
    codes = tl.clamp((codes + _ROUND) - _ROUND, -127.0, 127.0).to(tl.int8)
    d = group * GROUP + tl.arange(0, GROUP)
    lane = of_tile * 4 + d % 32 // 8
    tl.store(out + d // 64 * 512 + lane * 16 + d % 64 // 32 * 8 + d % 8, codes)


@triton.jit
def _store_bounds(out, starts, m, num_rows, group):
    row = (m + tl.arange(0, 8)) // group
    start = tl.load(starts + row, mask=row < num_rows, other=_NEVER)
    tl.store(out, tl.min(start, 0))
    tl.store(out + 1, tl.max(tl.where(row < num_rows, start, 0), 0))


@triton.jit(do_not_specialize=["kv_heads", "group", "tiles"])
def quantize_queries_kernel(
    q, first_rows, starts, first, last, q_out, scales_out, bounds_out, factor, root, kv_heads,
    group, tiles, DIM: tl.constexpr, ROTATE: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Quantise a query of a tile of eight, which are of a sequence and a key head.

    Query m of a sequence is head m % group of its row m // group. A query's values, in int8 steps
    of 1/127 of the largest, lie by pair of blocks of 32, then lane 4 g + c: values 8 c … 8 c + 7
    of query g in the first block, then in the second: fragments of a product. Sequences without
    rows are left out.

    Args:
        q: Floats `[rows, kv_heads * group, DIM]`.
        first_rows: As in `Visibility`.
        starts: Likewise.
        first: See `rotate`.
        last: Likewise.
        q_out: int8 `[sequences, kv_heads, tiles, 8 * DIM]`.
        scales_out: float32 `[sequences, kv_heads, tiles, 8]`, times `factor`.
        bounds_out: int32 `[sequences, kv_heads, tiles, 2]`: the least and the largest start.
        factor: See `scales_out`.
        root: See `rotate`.
        kv_heads: Of the cache.
        group: Query heads of a key head.
        tiles: See `q_out`.
        DIM: Values of a head.
        ROTATE: Rotate the query first.
        EAGER: Let the next kernel start, and wait for the one before, but for tables (sm_90).
    """
    if EAGER:
        gdc_launch_dependents()
    GROUP: tl.constexpr = min(DIM, 128)
    m = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(first_rows + sequence)
    num_rows = tl.load(first_rows + sequence + 1) - first_row
    if EAGER:
        gdc_wait()
    if num_rows == 0:
        return
    of_tile = m % 8
    place = (sequence * kv_heads + head) * tiles + m // 8
    here = m < num_rows * group
    row = (first_row + m // group).to(tl.int64)
    q += ((row * kv_heads + head) * group + m % group) * DIM
    x = _load_group(q, here, first, last, root, GROUP, ROTATE)
    amplitude = tl.max(tl.abs(x), 0)
    if DIM > GROUP:
        y = _load_group(q + GROUP, here, first, last, root, GROUP, ROTATE)
        amplitude = tl.maximum(amplitude, tl.max(tl.abs(y), 0))
    scale = amplitude * (1.0 / 127.0)
    out = q_out + place.to(tl.int64) * (8 * DIM)
    _store_codes(out, x, scale, of_tile, 0, GROUP)
    if DIM > GROUP:
        _store_codes(out, y, scale, of_tile, 1, GROUP)
    # Scores start at -inf where a token is hidden: times 0 they would be NaN.
    tl.store(scales_out + place * 8 + of_tile, tl.maximum(scale * factor, 1e-30))
    if of_tile == 0:
        _store_bounds(bounds_out + place * 2, starts + first_row, m, num_rows, group)
