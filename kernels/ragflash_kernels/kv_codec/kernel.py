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
def _store_fields(place, codes, token, here, TOKENS: tl.constexpr, DIM: tl.constexpr,
                  BITS: tl.constexpr):  # fmt: skip
    """Pack fields of a plane, values far apart, and store it."""
    fields: tl.constexpr = 8 // BITS
    width: tl.constexpr = DIM // fields
    shifts = tl.arange(0, fields) * BITS
    packed = tl.sum(tl.reshape(codes, (TOKENS, fields, width)) << shifts[None, :, None], 1)
    at = token[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(place + at, packed.to(tl.uint8), mask=here[:, None])


@triton.jit
def _store_codes(low, high, codes, token, here, TOKENS: tl.constexpr, DIM: tl.constexpr,
                 BITS: tl.constexpr, LEVELS: tl.constexpr):  # fmt: skip
    """Store int32 `[TOKENS, DIM]` in the planes of a format."""
    if BITS == 8:
        at = token[:, None] * DIM + tl.arange(0, DIM)[None, :]
        tl.store(low + at, codes.to(tl.uint8), mask=here[:, None])
    elif LEVELS == 4:
        _store_fields(low, codes & 3, token, here, TOKENS, DIM, 2)
        _store_fields(high, codes >> 2, token, here, TOKENS, DIM, 1)
    elif LEVELS == 8:
        _store_fields(low, codes, token, here, TOKENS, DIM, 4)
    else:
        _store_fields(low, codes + 8, token, here, TOKENS, DIM, 4)


@triton.jit(
    do_not_specialize=["page_stride", "head_stride", "token_stride", "page_tokens", "heads"]
)
def encode_kernel(
    x, offsets, first, last, out, page_stride, head_stride, token_stride, page_tokens, heads,
    root, DIM: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, SIZE: tl.constexpr, HIGH: tl.constexpr, SCALES: tl.constexpr,
    BITS: tl.constexpr, LEVELS: tl.constexpr, HAS_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Rotate, quantise and pack TOKENS tokens of one page and head.

    x is `[pages, heads, page_tokens, DIM]`, the last dimension contiguous, its strides in elements;
    offsets, subtracted first, are `[heads, DIM]`; first and last are the signs around the
    transform, `[GROUP]`; root is GROUP ** -0.5; out is `[pages, heads, SIZE]`.

    GROUP values are rotated together in STAGES = log2(GROUP) steps (0: not at all), BLOCK values
    have one scale; SIZE, HIGH and SCALES are those of `PageLayout`. LEVELS is 0 for uniform steps
    of BITS bits, else the number of levels of absolute values.
    """
    page = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
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
    _store_codes(target, target + HIGH, codes, token, here, TOKENS, DIM, BITS, LEVELS)
    per_token: tl.constexpr = DIM // BLOCK
    at = token[:, None] * per_token + tl.arange(0, per_token)[None, :]
    halves = (target + SCALES).to(tl.pointer_type(tl.float16))
    tl.store(halves + at, tl.reshape(scales, (TOKENS, per_token)), mask=here[:, None])


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
