"""Rotation and quantisation in plain Triton, a few tokens a program.

Compiled without fusing products into sums, it gives the same bytes as `reference.py`.
"""

import triton
import triton.language as tl

from ragflash_kernels.kv_codec.formats import (
    AMPLITUDE_UNITS,
    FIT_ROUNDS,
    LARGEST_HALF,
    LEVEL_UNITS,
    SMALLEST_AMPLITUDE,
    TQ3_EDGES,
    TQ3_LEVELS,
    TQ4_EDGES,
    TQ4_LEVELS,
)

_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, ties to even
_LARGEST = tl.constexpr(LARGEST_HALF)
_SMALLEST = tl.constexpr(SMALLEST_AMPLITUDE)
_AMPLITUDE_UNITS = tl.constexpr(float(AMPLITUDE_UNITS))
_LEVEL_UNITS = tl.constexpr(float(LEVEL_UNITS))
_FIT_ROUNDS = tl.constexpr(FIT_ROUNDS)
_EDGES = tl.constexpr((TQ3_EDGES, TQ4_EDGES))
_LEVELS = tl.constexpr((TQ3_LEVELS, TQ4_LEVELS))


@triton.jit
def _rotate(x, first, last, scale, R: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr):
    """Rotate float32 `[R, GROUP]`."""
    at = tl.arange(0, GROUP)[None, :]
    y = x * tl.load(first + at)
    for _ in tl.static_range(STAGES):
        left, right = tl.split(tl.reshape(y, (R, GROUP // 2, 2)))
        pairs = tl.join(left + right, left - right)
        y = tl.reshape(tl.permute(pairs, (0, 2, 1)), (R, GROUP))
    return y * scale * tl.load(last + at)


@triton.jit
def _quantize_uniform(blocks, BITS: tl.constexpr):
    """Return integers, int32, and the scales of rows, float16."""
    largest: tl.constexpr = 127.0 if BITS == 8 else 7.0
    smallest: tl.constexpr = -127.0 if BITS == 8 else -8.0
    if BITS == 8:
        scale = tl.max(tl.abs(blocks), 1) * (1.0 / 127.0)
    else:
        top = tl.max(blocks, 1)
        bottom = tl.min(blocks, 1)
        scale = tl.where(top > -bottom, top, bottom) * (-1.0 / 8.0)
    scale = (scale + tl.sum(blocks * 0.0, 1)).to(tl.float16)  # the sum is NaN if a value is
    wide = scale.to(tl.float32)
    usable = wide != 0.0
    inverse = tl.where(usable, tl.div_rn(1.0, tl.where(usable, wide, 1.0)), 0.0)
    rounded = (blocks * inverse[:, None] + _ROUND) - _ROUND
    rounded = tl.where(rounded == rounded, tl.clamp(rounded, smallest, largest), 0.0)  # noqa: PLR0124
    return rounded.to(tl.int32), scale


@triton.jit
def _quantize_levels(blocks, R: tl.constexpr, BLOCK: tl.constexpr, WHICH: tl.constexpr,
                     NUM_LEVELS: tl.constexpr):  # fmt: skip
    """Return sign and index, int32, and the scales of rows, float16."""
    peak = tl.max(tl.abs(blocks), 1)
    peak += tl.sum(blocks * 0.0, 1)  # NaN if a value is
    usable = peak >= _SMALLEST
    unit = tl.where(usable, tl.div_rn(_AMPLITUDE_UNITS, tl.where(usable, peak, 1.0)), 0.0)
    amplitude = tl.abs(blocks) * unit[:, None]
    rounded = (amplitude + _ROUND) - _ROUND
    whole = tl.where(rounded == rounded, rounded, 0.0).to(tl.int32)  # noqa: PLR0124
    scale = tl.sqrt_rn(tl.sum(whole * whole, 1).to(tl.float32) * (1.0 / BLOCK))
    index = tl.zeros((R, BLOCK), tl.int32)
    for _ in tl.static_range(_FIT_ROUNDS):
        index = tl.zeros((R, BLOCK), tl.int32)
        level = tl.full((R, BLOCK), _LEVELS[WHICH][0], tl.int32)
        for i in tl.static_range(NUM_LEVELS - 1):
            above = amplitude > (scale * _EDGES[WHICH][i])[:, None]
            index += above.to(tl.int32)
            level = tl.where(above, _LEVELS[WHICH][i + 1], level)
        fitted = tl.sum(whole * level, 1).to(tl.float32)
        scale = tl.div_rn(fitted, tl.sum(level * level, 1).to(tl.float32)) * _LEVEL_UNITS
    codes = index + (blocks < 0).to(tl.int32) * NUM_LEVELS
    scale = scale * (peak * (1.0 / _AMPLITUDE_UNITS))
    limit: tl.constexpr = _LARGEST * _LEVEL_UNITS / _LEVELS[WHICH][NUM_LEVELS - 1]
    return codes, tl.where(scale > limit, limit, scale).to(tl.float16)


@triton.jit
def _fold(x, step: tl.constexpr, A: tl.constexpr, N: tl.constexpr, B: tl.constexpr):
    """Return int32 `[A, B]`: the N of `[A, N, B]` as fields of a word, `step` bits apart."""
    shifts = tl.arange(0, N) * step
    return tl.sum(tl.reshape(x, (A, N, B)) << shifts[None, :, None], 1)


@triton.jit
def _store_pairs(low, codes, token, here, TOKENS: tl.constexpr, DIM: tl.constexpr):
    """Store nibbles, those that are DIM / 2 apart in a byte."""
    at = token[:, None] * (DIM // 2) + tl.arange(0, DIM // 2)[None, :]
    packed = _fold(codes, 4, TOKENS, 2, DIM // 2)
    tl.store(low + at, packed.to(tl.uint8), mask=here[:, None])


@triton.jit
def _store_keys(low, high, codes, first, page_tokens, TOKENS: tl.constexpr, DIM: tl.constexpr):
    """Store the planes of TQ3_0 keys, from token `first` on."""
    groups: tl.constexpr = TOKENS * DIM // 8
    codes = tl.permute(tl.reshape(codes, (TOKENS, DIM // 32, 4, 8)), (0, 2, 1, 3))
    codes = _fold(codes, 4, groups * 4, 2, 1)  # two neighbours of a group: a byte
    at = tl.arange(0, groups * 2)
    place = low + first * (DIM // 4) + at
    packed = tl.reshape(_fold(codes & 0x33, 2, groups // 2, 2, 4), (groups * 2,))
    tl.store(place, packed.to(tl.uint8), mask=at < (page_tokens - first) * (DIM // 4))
    at = tl.arange(0, groups)
    place = high + first * (DIM // 8) + at
    packed = tl.reshape(_fold((codes >> 2) & 0x11, 1, groups // 4, 4, 4), (groups,))
    tl.store(place, packed.to(tl.uint8), mask=at < (page_tokens - first) * (DIM // 8))


@triton.jit
def _store_values(low, high, codes, first, DIM: tl.constexpr, TILES: tl.constexpr):
    """Store the planes of 32 tokens of TQ3_0 values, from token `first` on."""
    part = first // (16 * TILES) * (DIM // 32)
    tile = first % (16 * TILES) // 16
    i = tl.arange(0, 16)[:, None, None]  # tile, half of it, c
    b = tl.arange(0, DIM // 32)[None, :, None]
    k = tl.arange(0, 16)[None, None, :]  # half of 16 values, g
    lane = k % 8 * 4 + i % 4
    byte = k // 8 * 2 + i // 4 % 2
    codes = tl.reshape(_fold(codes, 4, 16, 2, DIM), (16 * DIM // 32, 2, 16))
    packed = _fold(codes & 0x33, 2, 16 * DIM // 32, 2, 16)
    word = ((part + b) * 32 + lane) * TILES + tile + i // 8
    packed = tl.reshape(packed, (16, DIM // 32, 16)).to(tl.uint8)
    tl.store(low + word * 4 + byte, packed)
    packed = _fold((codes >> 2) & 0x11, 1, 16 * DIM // 32, 2, 16)
    packed = _fold(packed, 2, 1, 2, DIM * 4)
    i = tl.arange(0, 8)[:, None, None]
    word = ((part + b) * 32 + k % 8 * 4 + i % 4) * (TILES // 2) + tile // 2
    packed = tl.reshape(packed, (8, DIM // 32, 16)).to(tl.uint8)
    tl.store(high + word * 4 + k // 8 * 2 + i // 4, packed)


@triton.jit
def _store_value_scales(place, scales, first, DIM: tl.constexpr, TILES: tl.constexpr):
    """Store the scales of 32 tokens of TQ3_0 values, `[32, DIM / 32]`."""
    t = tl.arange(0, 32)[:, None]
    b = first // (16 * TILES) * (DIM // 32) + tl.arange(0, DIM // 32)[None, :]
    tile = first % (16 * TILES) // 16 + t // 16
    at = ((b * 4 + t % 8 // 2) * TILES + tile) * 4 + t % 16 // 8 * 2 + t % 2
    tl.store(place + at, scales)


@triton.jit
def _store_codes(low, high, codes, first, token, here, page_tokens, TOKENS: tl.constexpr,
                 DIM: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr,
                 VALUE_TILES: tl.constexpr):  # fmt: skip
    """Store int32 `[TOKENS, DIM]` in the planes of a format."""
    if BITS == 8:
        at = token[:, None] * DIM + tl.arange(0, DIM)[None, :]
        tl.store(low + at, codes.to(tl.uint8), mask=here[:, None])
    elif LEVELS == 4:
        if VALUE_TILES > 0:
            _store_values(low, high, codes, first, DIM, VALUE_TILES)
        else:
            _store_keys(low, high, codes, first, page_tokens, TOKENS, DIM)
    elif LEVELS == 8:
        _store_pairs(low, codes, token, here, TOKENS, DIM)
    else:
        _store_pairs(low, codes + 8, token, here, TOKENS, DIM)


@triton.jit(
    do_not_specialize=["page_stride", "head_stride", "token_stride", "page_tokens", "heads"]
)
def encode_kernel(
    x, offsets, first, last, out, page_stride, head_stride, token_stride, page_tokens, heads,
    root, DIM: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, SIZE: tl.constexpr, HIGH: tl.constexpr, SCALES: tl.constexpr,
    BITS: tl.constexpr, LEVELS: tl.constexpr, VALUE_TILES: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Rotate, quantise and pack TOKENS tokens of one page and head.

    x is `[pages, heads, page_tokens, DIM]`, the last dimension contiguous, its strides in elements;
    offsets, subtracted first, are `[heads, DIM]`; first and last are the signs around the
    transform, `[GROUP]`; root is GROUP ** -0.5; out is `[pages, heads, SIZE]`.

    GROUP values are rotated together in STAGES = log2(GROUP) steps (0: not at all), BLOCK values
    have one scale; SIZE, HIGH and SCALES are those of `PageLayout`. LEVELS is 0 for uniform steps
    of BITS bits, else the number of levels of absolute values. VALUE_TILES is 0, or `value_tiles`
    for values that are stored in tiles; TOKENS is 32 then.
    """
    page = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    first_token = tl.program_id(1) * TOKENS
    token = first_token + tl.arange(0, TOKENS)
    here = token < page_tokens
    d = tl.arange(0, DIM)[None, :]
    place = x + page.to(tl.int64) * page_stride + head * head_stride
    values = tl.load(place + token[:, None] * token_stride + d, mask=here[:, None], other=0.0)
    values = values.to(tl.float32)
    if HAS_OFFSETS:
        values -= tl.load(offsets + head * DIM + d)
    finite = tl.abs(values) < float("inf")
    values = tl.where(finite, tl.clamp(values, -_LARGEST, _LARGEST), float("nan"))
    if STAGES > 0:
        groups = tl.reshape(values, (TOKENS * DIM // GROUP, GROUP))
        values = _rotate(groups, first, last, root, TOKENS * DIM // GROUP, GROUP, STAGES)
    rows: tl.constexpr = TOKENS * DIM // BLOCK
    blocks = tl.reshape(values, (rows, BLOCK))
    target = out + tl.program_id(0).to(tl.int64) * SIZE
    if LEVELS == 0:
        codes, scales = _quantize_uniform(blocks, BITS)
    else:
        codes, scales = _quantize_levels(blocks, rows, BLOCK, LEVELS // 4 - 1, LEVELS)
    codes = tl.reshape(codes, (TOKENS, DIM))
    _store_codes(
        target, target + HIGH, codes, first_token, token, here, page_tokens, TOKENS, DIM, BITS,
        LEVELS, VALUE_TILES,
    )  # fmt: skip
    per_token: tl.constexpr = DIM // BLOCK
    halves = (target + SCALES).to(tl.pointer_type(tl.float16))
    scales = tl.reshape(scales, (TOKENS, per_token))
    if VALUE_TILES > 0:
        _store_value_scales(halves, scales, first_token, DIM, VALUE_TILES)
    else:
        at = token[:, None] * per_token + tl.arange(0, per_token)[None, :]
        tl.store(halves + at, scales, mask=here[:, None])


@triton.jit(do_not_specialize=["rows", "row_stride"])
def rotate_kernel(
    x, first, last, out, rows, row_stride, root, GROUP: tl.constexpr, STAGES: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Rotate float `[rows, GROUP]` into contiguous rows of the type of `out`."""
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None]
    at = tl.arange(0, GROUP)[None, :]
    values = tl.load(x + row * row_stride + at, mask=row < rows, other=0.0).to(tl.float32)
    rotated = _rotate(values, first, last, root, R, GROUP, STAGES)
    tl.store(out + row * GROUP + at, rotated.to(out.dtype.element_ty), mask=row < rows)
