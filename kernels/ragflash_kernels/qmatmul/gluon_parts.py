"""What a warp does with a record, in Gluon: one element of a tensor is one thread's."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ragflash_kernels.qmatmul import ptx
from ragflash_kernels.qmatmul.formats import Scales
from ragflash_kernels.qmatmul.gluon_loads import (
    byte_to_float,
    half_to_float,
    load_activation_sums,
    load_step,
    load_words,
    read_factors,
    read_minima,
)

_FLOAT16 = gl.constexpr(int(Scales.FLOAT16))
_BYTES = gl.constexpr(int(Scales.BYTES))
_OF_16 = gl.constexpr(int(Scales.SIGNED_BYTES_OF_16))
_MAGIC = gl.constexpr(ptx.MAGIC)

# What the compiler finds in a function that it calls must be data: hence tables, not functions.
_NIBBLES = {
    (bits, row, signed): ptx.nibbles(bits, row, signed=signed)
    for bits in range(3)
    for row in range(4)
    for signed in (False, True)
}
_MULTIPLIES = {
    (k, one): (ptx.multiply(k, one=one), ptx.multiply_constraints(k, one=one))
    for k in (16, 32)
    for one in (False, True)
}
_TABLE = gl.constexpr(ptx.table())
_MINIMA = gl.constexpr(ptx.multiply_minima())
_MINIMA_CONSTRAINTS = gl.constexpr(ptx.constraints("ffff", "rrrrrrrr"))


@gluon.constexpr_function
def _nibbles_ptx(bits, row, signed):
    return _NIBBLES[bits, row, signed]


@gluon.constexpr_function
def _multiply_ptx(k, one):
    return _MULTIPLIES[k, one][0]


@gluon.constexpr_function
def _multiply_constraints(k, one):
    return _MULTIPLIES[k, one][1]


@gluon.constexpr_function
def _words(count):
    return [gl.int32] * count


@gluon.constexpr_function
def _floats(count):
    return [gl.float32] * count


@gluon.jit
def _float(word):
    return word.to(gl.float32, bitcast=True)


@gluon.jit
def read_codes(low, high, step: gl.constexpr, j: gl.constexpr, LOW_BITS: gl.constexpr,
               HIGH_BITS: gl.constexpr, SIGNED: gl.constexpr, TABLE: gl.constexpr):  # fmt: skip
    """Return both halves of row j of a step, as bytes."""
    if LOW_BITS == 8:
        codes = (low[8 * step + j], low[8 * step + 4 + j])
    elif TABLE:
        codes = gl.inline_asm_elementwise(
            _TABLE, "=&r,=&r,r", [low[4 * step + j]], dtype=_words(2), is_pure=True, pack=1
        )
    elif HIGH_BITS == 0:
        codes = gl.inline_asm_elementwise(
            _nibbles_ptx(0, j, SIGNED), "=&r,=&r,r", [low[4 * step + j]],
            dtype=_words(2), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        bits = high[step] if HIGH_BITS == 1 else high[2 * step + j // 2]
        codes = gl.inline_asm_elementwise(
            _nibbles_ptx(HIGH_BITS, j, SIGNED), "=&r,=&r,r,r", [low[4 * step + j], bits],
            dtype=_words(2), is_pure=True, pack=1,
        )  # fmt: skip
    return codes


@gluon.jit
def read_scale(words, factor, lowered, step: gl.constexpr, half: gl.constexpr, j: gl.constexpr,
               KIND: gl.constexpr):  # fmt: skip
    """Return the scale of row j in a step, or in half of one."""
    if KIND == _FLOAT16:
        scale = half_to_float(words[2 * step + j // 2], j % 2)
    elif KIND == _BYTES:
        scale = gl.fma(byte_to_float(words[step], j), factor, lowered)
    elif KIND == _OF_16:
        scale = (byte_to_float(words[2 * step + half], j) - 8388736.0) * factor
    else:
        scale = (byte_to_float(words[step], j) - 8388736.0) * factor
    return scale


@gluon.jit
def _multiply(left, right, scales, rows, sums, K: gl.constexpr, ONE: gl.constexpr):
    lowered = ()
    for i in gl.static_range(len(scales)):
        lowered = lowered + (scales[i] * -_MAGIC,)
    return gl.inline_asm_elementwise(
        _multiply_ptx(K, ONE), _multiply_constraints(K, ONE),
        left + right + scales + lowered + rows + sums,
        dtype=_floats(len(sums)), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _activations(q, scales, pair: gl.constexpr, TILES: gl.constexpr):
    """Return two steps' words of q and scales, four a tile each."""
    words = ()
    floats = ()
    for tile in gl.static_range(TILES):
        words = words + load_words(q + tile * 2048 + pair * 512, 1, 4, "global")
        floats = floats + load_words(scales + tile * 256 + pair * 16, 1, 4, "global")
    return words, floats


@gluon.jit
def _step(codes, words, floats, rows, sums, odd: gl.constexpr, half: gl.constexpr,
          TILES: gl.constexpr, K: gl.constexpr, ONE: gl.constexpr):  # fmt: skip
    """Add one step, or one half of it, to all sums."""
    size: gl.constexpr = 2 if ONE else 4
    out = ()
    for pair in gl.static_range(2):  # of rows: 2 * pair and 2 * pair + 1
        if K == 32:
            left = (codes[4 * pair], codes[4 * pair + 2], codes[4 * pair + 1], codes[4 * pair + 3])
        else:
            left = (codes[4 * pair + half], codes[4 * pair + 2 + half])
        for tile in gl.static_range(TILES):
            if K == 32:
                right = (words[4 * tile + 2 * odd], words[4 * tile + 2 * odd + 1])
            else:
                right = (words[4 * tile + 2 * odd + half],)
            if ONE:
                column = (_float(floats[2 * odd]),)
            else:
                column = (
                    _float(floats[4 * tile + 2 * odd]),
                    _float(floats[4 * tile + 2 * odd + 1]),
                )
            before = ()
            for i in gl.static_range(size):
                before = before + (sums[(pair * TILES + tile) * size + i],)
            row = (rows[2 * pair], rows[2 * pair + 1])
            out = out + _multiply(left, right, column, row, before, K, ONE)
    return out


@gluon.jit
def _add_minima(sums, minima, factors, x_sums, TILES: gl.constexpr, ONE: gl.constexpr,
                KIND: gl.constexpr):  # fmt: skip
    """Add the minima of a whole record, eight floats, times the sums of activations."""
    size: gl.constexpr = 2 if ONE else 4
    out = ()
    for pair in gl.static_range(2):
        left = (minima[2 * pair], minima[2 * pair + 1], minima[4 + 2 * pair], minima[5 + 2 * pair])
        for tile in gl.static_range(TILES):
            x = (x_sums[4 * tile], x_sums[4 * tile + 2], x_sums[4 * tile + 1], x_sums[4 * tile + 3])
            product = gl.inline_asm_elementwise(
                _MINIMA, _MINIMA_CONSTRAINTS, left + x,
                dtype=_floats(4), is_pure=True, pack=1,
            )  # fmt: skip
            for i in gl.static_range(size):
                value = product[2 * i] if ONE else product[i]
                before = sums[(pair * TILES + tile) * size + i]
                if KIND == _FLOAT16:
                    out = out + (before + value,)
                else:
                    factor = factors[2 * pair + (i if ONE else i // 2)]
                    out = out + (gl.fma(value, factor, before),)
    return out


@gluon.jit
def multiply_record(
    loaded, slot, lane, q, scales, sums, total, index, HIGH: gl.constexpr, SCALES: gl.constexpr,
    STEPS: gl.constexpr, LOW_BITS: gl.constexpr, HIGH_BITS: gl.constexpr, TABLE: gl.constexpr,
    KIND: gl.constexpr, HAS_MINIMA: gl.constexpr, TILES: gl.constexpr, ONE: gl.constexpr,
    STAGED: gl.constexpr,
):  # fmt: skip
    """Add the products of record `index` to `total`.

    Sums lie by pair of row groups, then tile, then as an instruction has them. Activations, at
    `q`, `scales` and `sums`, are loaded two steps ahead. The record is what `load_record` loaded,
    the rest of it if STAGED in shared memory at `slot`.
    """
    low, high, stored, factor_words, minima = loaded
    factors, lowered, of_minima = read_factors(factor_words, lane, KIND, HAS_MINIMA)
    block = index * STEPS // 8 * TILES
    first_step = index * STEPS % 8
    q += block * 2048 + first_step * 256
    scales += block * 256 + first_step * 8
    words, floats = _activations(q, scales, 0, TILES)
    for pair in gl.static_range(STEPS // 2):
        if pair + 1 < STEPS // 2:
            next_words, next_floats = _activations(q, scales, pair + 1, TILES)
        for odd in gl.static_range(2):
            if STAGED:
                more_low, more_high, more_stored = load_step(
                    slot, lane, 2 * pair + odd, HIGH, SCALES, STEPS, LOW_BITS, HIGH_BITS, KIND,
                    "shared",
                )  # fmt: skip
                low = low + more_low
                high = high + more_high
                stored = stored + more_stored
            codes = ()
            for j in gl.static_range(4):
                codes = codes + read_codes(
                    low, high, 2 * pair + odd, j, LOW_BITS, HIGH_BITS, not HAS_MINIMA, TABLE
                )
            for half in gl.static_range(2 if KIND == _OF_16 else 1):
                row_scales = ()
                for j in gl.static_range(4):
                    row_scales = row_scales + (
                        read_scale(stored, factors[j], lowered[j], 2 * pair + odd, half, j, KIND),
                    )
                total = _step(
                    codes, words, floats, row_scales, total, odd, half, TILES,
                    16 if KIND == _OF_16 else 32, ONE,
                )  # fmt: skip
        if pair + 1 < STEPS // 2:
            words = next_words
            floats = next_floats
    if HAS_MINIMA:
        x_sums = load_activation_sums(sums + block * 512, lane, first_step, TILES, STEPS, ONE)
        minima = read_minima(minima, lane, STEPS, KIND)
        total = _add_minima(total, minima, of_minima, x_sums, TILES, ONE, KIND)
    return total
