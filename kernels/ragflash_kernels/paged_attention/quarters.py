"""Pages of every format unpacked in plain Triton, a quarter of a head's values at a time."""

import triton
import triton.language as tl

from ragflash_kernels.kv_codec.formats import LEVEL_UNITS, TQ3_LEVELS, TQ4_LEVELS
from ragflash_kernels.paged_attention import ptx

F16, Q8_0, Q4_0, TQ4, TQ3_0 = (tl.constexpr(i) for i in range(5))
_TQ3 = tl.constexpr(tuple(level / LEVEL_UNITS for level in TQ3_LEVELS))
_TQ4 = tl.constexpr(tuple(level / LEVEL_UNITS for level in TQ4_LEVELS))
_TQ4_PTX = tl.constexpr([ptx.tq4_values(quarter) for quarter in range(4)])
_TQ4_CONSTRAINTS = tl.constexpr(ptx.TQ4_CONSTRAINTS)


@triton.jit
def _level(index, LEVELS: tl.constexpr, COUNT: tl.constexpr):
    """Return float16 levels of indices whose sign bit follows the level's bits."""
    magnitude = index & (COUNT - 1)
    level = tl.full(index.shape, LEVELS[0], tl.float16)
    for i in tl.static_range(1, COUNT):
        level = tl.where(magnitude == i, tl.full(index.shape, LEVELS[i], tl.float16), level)
    return tl.where(index >= COUNT, -level, level)


@triton.jit
def _scales(place, token, quarter: tl.constexpr, mask, N: tl.constexpr, DIM: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Return float16 `[N, DIM / 4]`: the scales of a quarter, from `[tokens, DIM / BLOCK]`."""
    width: tl.constexpr = DIM // 4
    halves = place.to(tl.pointer_type(tl.float16)) + token * (DIM // BLOCK)
    if width <= BLOCK:
        scale = tl.load(halves + quarter * width // BLOCK, mask=mask, other=0.0)[:, None]
    else:
        count: tl.constexpr = width // BLOCK
        at = halves[:, None] + (quarter * count + tl.arange(0, count))[None, :]
        scale = tl.load(at, mask=mask[:, None], other=0.0)
        scale = tl.broadcast_to(scale[:, :, None], (N, count, BLOCK))
        scale = tl.reshape(scale, (N, width))
    return scale


@triton.jit
def _key_places(t, d, DIM: tl.constexpr):
    """Return where `TQ3_0` keys are: their groups of eight, nibbles in these, and their scales."""
    block = d // 32
    group = (t * 4 + d % 32 // 8) * (DIM // 32) + block
    return group, d % 8, t * (DIM // 32) + block


@triton.jit
def _value_places(t, d, DIM: tl.constexpr, PAGE: tl.constexpr):
    """As `_key_places`, of values."""
    tiles: tl.constexpr = 4 if PAGE % 64 == 0 else 2
    tile = t % (16 * tiles) // 16
    block = t // (16 * tiles) * (DIM // 32) + d // 32
    c = t % 8 // 2
    of_four = t % 16 // 8 * 2 + t % 2
    group = ((block * 32 + d % 8 * 4 + c) * tiles + tile) * 2 + d % 32 // 16
    return group, d % 16 // 8 * 4 + of_four, ((block * 4 + c) * tiles + tile) * 4 + of_four


@triton.jit
def load_quarter(place, token, quarter: tl.constexpr, mask, N: tl.constexpr, DIM: tl.constexpr,
                 PAGE: tl.constexpr, FORMAT: tl.constexpr, VALUES: tl.constexpr,
                 PTX: tl.constexpr):  # fmt: skip
    """Return float16 `[N, DIM / 4]`: a quarter of the values of a page's tokens.

    Args:
        place: Where the page of a head begins, as bytes.
        token: `[N]`, within the page.
        quarter: 0 … 3.
        mask: `[N]`: which tokens to read; others are 0.
        N: Tokens.
        DIM: Values of a head.
        PAGE: Tokens of a page.
        FORMAT: One of this module's.
        VALUES: They are values, not keys.
        PTX: On an NVIDIA card, not interpreted.
    """
    width: tl.constexpr = DIM // 4
    e = tl.arange(0, width)[None, :]
    t = token[:, None]
    here = mask[:, None]
    if FORMAT == F16:
        halves = place.to(tl.pointer_type(tl.float16))
        values = tl.load(halves + t * DIM + quarter * width + e, mask=here, other=0.0)
    elif FORMAT == Q8_0:
        codes = tl.load(place + t * DIM + quarter * width + e, mask=here, other=0)
        scale = _scales(place + PAGE * DIM, token, quarter, mask, N, DIM, 32)
        values = codes.to(tl.int8, bitcast=True).to(tl.float16) * scale
    elif FORMAT == TQ3_0:
        d = quarter * width + e
        if VALUES:
            group, nibble, scale_at = _value_places(t, d, DIM, PAGE)
        else:
            group, nibble, scale_at = _key_places(t, d, DIM)
        shift = nibble % 2 * 4
        byte = place + nibble // 2
        low = tl.load(byte + group // 2 * 4, mask=here, other=0).to(tl.int32)
        high = tl.load(byte + PAGE * width + group // 4 * 4, mask=here, other=0).to(tl.int32)
        code = (low >> (shift + group % 2 * 2)) & 3 | ((high >> (shift + group % 4)) & 1) << 2
        halves = (place + PAGE * width * 3 // 2).to(tl.pointer_type(tl.float16))
        values = _level(code, _TQ3, 4) * tl.load(halves + scale_at, mask=here, other=0.0)
    else:
        pairs = tl.load(place + t * (2 * width) + quarter % 2 * width + e, mask=here, other=0)
        index = (pairs.to(tl.int32) >> (quarter // 2 * 4)) & 15
        if FORMAT == Q4_0:
            scale = _scales(place + PAGE * 2 * width, token, quarter, mask, N, DIM, 32)
            values = (index - 8).to(tl.float16) * scale
        else:
            group: tl.constexpr = min(DIM, 128)
            scale = _scales(place + PAGE * 2 * width, token, quarter, mask, N, DIM, group)
            if PTX:
                level = tl.inline_asm_elementwise(
                    _TQ4_PTX[quarter], _TQ4_CONSTRAINTS, [pairs],
                    dtype=tl.float16, is_pure=True, pack=4,
                )  # fmt: skip
            else:
                level = _level(index, _TQ4, 8)
            values = level * scale
    return values
