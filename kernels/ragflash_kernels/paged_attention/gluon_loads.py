"""What a warp loads of a page of TQ3_0, in Gluon: one element of a tensor is one thread's."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ragflash_kernels.paged_attention import gluon_ptx as ptx

# What the compiler finds in a function that it calls must be data: hence tables, not functions.
_OFFSETS = {  # by the values of a head: of a thread's low words, high words and scales
    256: (((0, 4096), 4), ((0, 2048), 2), ((0, 16, 1024, 1040), 4)),
    128: (((0,), 4), ((0,), 2), ((0, 16), 4)),
    64: (((0,), 2), ((0,), 1), ((0,), 4)),
}
_VALUE_LOADS = {
    (dim, part): (ptx.load(*what), ptx.load_constraints(*what), len(what[0]) * what[1])
    for dim, parts in _OFFSETS.items()
    for part, what in enumerate(parts)
}
_KEY_LOADS = {
    width: (ptx.load((0,), width), ptx.load_constraints((0,), width)) for width in (1, 2, 4)
}
_PREFETCH_IF = gl.constexpr(ptx.prefetch_if())
_MAKE_FINITE = gl.constexpr(ptx.make_finite())


@gluon.constexpr_function
def word_types(count):
    """Return the types of an instruction's results: so many words."""
    return [gl.int32] * count


@gluon.constexpr_function
def float_types(count):
    """Likewise, so many floats."""
    return [gl.float32] * count


@gluon.constexpr_function
def _value_load(dim, part, what):
    return _VALUE_LOADS[dim, part][what]


@gluon.constexpr_function
def _key_load(width, what):
    return _KEY_LOADS[width][what]


@gluon.jit
def _load_key_words(place, WIDTH: gl.constexpr):
    return gl.inline_asm_elementwise(
        _key_load(WIDTH, 0), _key_load(WIDTH, 1), [place], dtype=word_types(WIDTH),
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _load_value_words(place, DIM: gl.constexpr, PART: gl.constexpr):
    return gl.inline_asm_elementwise(
        _value_load(DIM, PART, 0), _value_load(DIM, PART, 1), [place],
        dtype=word_types(_value_load(DIM, PART, 2)), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_keys(page, token, last, lane, DIM: gl.constexpr, HIGH: gl.constexpr,
              SCALES: gl.constexpr):  # fmt: skip
    """Return a tile's low words, high words and scales: token g, then token g + 8.

    Args:
        page: Where the page of a head begins.
        token: First of the tile, within the page.
        last: Token that is read in place of those after it.
        lane: Of a warp.
        DIM: Values of a head.
        HIGH: As in `PageLayout`.
        SCALES: Likewise.
    """
    c = lane & 3
    low = ()
    high = ()
    scales = ()
    for half in gl.static_range(2):
        t = gl.minimum(token + (lane >> 2) + 8 * half, last)
        low = low + _load_key_words(page + (t * (DIM // 4) + c * (DIM // 16)), DIM // 64)
        if DIM == 64:
            words = _load_key_words(page + (HIGH + t * 8 + (c >> 1) * 4), 1)
            high = high + (words[0] >> ((c & 1) * 2),)
        else:
            high = high + _load_key_words(
                page + (HIGH + t * (DIM // 8) + c * (DIM // 32)), DIM // 128
            )
        scales = scales + _load_key_words(page + (SCALES + t * (DIM // 16)), DIM // 64)
    return low, high, scales


@gluon.jit
def load_values(page, token, warp, lane, DIM: gl.constexpr, HIGH: gl.constexpr,
                SCALES: gl.constexpr):  # fmt: skip
    """Return low words, high words and scales of DIM / 2 tokens, of a warp's 32 values.

    Arguments are as in `load_keys`; `token` is a multiple of DIM / 2.
    """
    block = token // 64 * (DIM // 32) + warp
    second = token % 64 // 32  # only where DIM is 64
    low = _load_value_words(page + (block * 512 + lane * 16 + second * 8), DIM, 0)
    high = _load_value_words(page + (HIGH + block * 256 + lane * 8 + second * 4), DIM, 1)
    at = SCALES + block * 128 + (lane & 3) * 32 + second * 16
    return low, high, _load_value_words(page + at, DIM, 2)


@gluon.jit
def prefetch(key_page, value_page, token, thread, real, DIM: gl.constexpr, HIGH: gl.constexpr,
             SCALES: gl.constexpr):  # fmt: skip
    """Ask the second-level cache for DIM / 2 tokens from `token` on, if `real`."""
    LOW_LINES: gl.constexpr = DIM * DIM // 1024
    LINES: gl.constexpr = LOW_LINES * 7 // 4
    of_values = thread >= LINES
    line = gl.where(of_values, thread - LINES, thread)
    high = line - LOW_LINES
    scale = high - LOW_LINES // 2
    at = gl.where(high < 0, token * (DIM // 4), HIGH - LOW_LINES * 128 + token * (DIM // 8))
    at = gl.where(scale < 0, at, SCALES - LOW_LINES * 192 + token * (DIM // 16)) + line * 128
    place = gl.where(of_values, value_page, key_page) + at
    gl.inline_asm_elementwise(
        _PREFETCH_IF, "=r,r,l", [((line < LINES) & real).to(gl.int32), place],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def make_finite(scales):
    """Return scales with what is not finite replaced: weights of 0 cannot do that."""
    out = ()
    for i in gl.static_range(len(scales)):
        out = out + (
            gl.inline_asm_elementwise(
                _MAKE_FINITE, "=&r,r,r", [scales[i], scales[i] * 0 + 0x7BFF7BFF],
                dtype=gl.int32, is_pure=False, pack=1,
            ),
        )  # fmt: skip
    return out
