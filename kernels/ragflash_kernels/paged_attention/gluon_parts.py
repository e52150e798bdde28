"""What a warp computes of a page of TQ3_0, in Gluon: one element of a tensor is one thread's."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ragflash_kernels.paged_attention import gluon_ptx as ptx
from ragflash_kernels.paged_attention.gluon_loads import float_types, word_types

# What the compiler finds in a function that it calls must be data: hence tables, not functions.
_HALVES_TO_FLOATS = gl.constexpr([ptx.half_to_float(high) for high in range(2)])
_KEY_FRAGMENTS = gl.constexpr([ptx.key_fragments(block) for block in range(4)])
_VALUE_FRAGMENTS = gl.constexpr([ptx.value_fragments(odd) for odd in range(2)])
_VALUE_CONSTRAINTS = gl.constexpr(ptx.constraints("r" * 8, "r" * 8))
_KEY_CONSTRAINTS = gl.constexpr(ptx.constraints("r" * 4, "r" * 6))
_MULTIPLY_KEYS = gl.constexpr(ptx.multiply_keys())
_MULTIPLY_KEYS_CONSTRAINTS = gl.constexpr(ptx.constraints("ffff", "rrrrrrrrl" + "f" * 8 + "rrrr"))
_MULTIPLY_VALUES = gl.constexpr(ptx.multiply_values())
_MULTIPLY_VALUES_CONSTRAINTS = gl.constexpr(ptx.constraints("f" * 8, "r" * 9 + "f" * 8))
_ADD_WEIGHTS = gl.constexpr(ptx.add_weights())
_WEIGH = gl.constexpr(ptx.weigh())
_STORE_MAXIMA = gl.constexpr(ptx.store_maxima())
_LARGEST = {
    (warps, tiles): ptx.largest(warps, 32 * tiles) for warps in (2, 4, 8) for tiles in range(1, 17)
}
_SHARED_MEMORY = ptx.shared_memory()
_BARRIER = gl.constexpr(ptx.barrier())
_RAISE_ABOVE = 5.0
_MARK = gl.constexpr(ptx.mark_above(_RAISE_ABOVE))
_STORE_IF = gl.constexpr([ptx.store_if(width) for width in (1, 2)])
_LOAD_SHARED = gl.constexpr([ptx.load_shared(width) for width in (1, 2)])
_STORE_CONSTANTS = gl.constexpr(ptx.store_constants())
_LOAD_CONSTANTS = gl.constexpr(ptx.load_constants())
_LOAD_CONSTANTS_CONSTRAINTS = gl.constexpr(ptx.constraints("r" * 10, "r"))
_POWER = gl.constexpr(ptx.power())
_LIMIT = gl.constexpr(_RAISE_ABOVE)


@gluon.constexpr_function
def _largest(warps, tiles):
    return _LARGEST[warps, tiles]


@gluon.constexpr_function
def _memory(num_bytes):
    return _SHARED_MEMORY % num_bytes


@gluon.jit
def shared_memory(anything, BYTES: gl.constexpr):
    """Return the address of shared memory, from any scalar."""
    return gl.inline_asm_elementwise(
        _memory(BYTES), "=r,r", [anything], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def barrier(place):
    """Wait for all threads, then return a shared word, the same for all."""
    return gl.inline_asm_elementwise(
        _BARRIER, "=&r,r", [place], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def store_if(condition, place, value):
    """Store a float in shared memory where a condition holds."""
    gl.inline_asm_elementwise(
        _STORE_IF[0], "=r,r,r,f", [condition.to(gl.int32), place, value],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def store_pair_if(condition, place, first, second):
    """Store two floats in shared memory where a condition holds."""
    gl.inline_asm_elementwise(
        _STORE_IF[1], "=r,r,r,f,f", [condition.to(gl.int32), place, first, second],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_shared(place):
    """Return a float from shared memory."""
    return gl.inline_asm_elementwise(
        _LOAD_SHARED[0], "=f,r", [place], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def load_shared_pair(place):
    """Return two floats from shared memory."""
    return gl.inline_asm_elementwise(
        _LOAD_SHARED[1], "=&f,=&f,r", [place], dtype=float_types(2), is_pure=False, pack=1
    )


@gluon.jit
def store_constants(place):
    """Store what `load_constants` loads."""
    gl.inline_asm_elementwise(
        _STORE_CONSTANTS, "=r,r", [place], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_constants(place):
    """Return tables of keys, tables of values, and the bits that integers are added to."""
    found = gl.inline_asm_elementwise(
        _LOAD_CONSTANTS, _LOAD_CONSTANTS_CONSTRAINTS, [place], dtype=word_types(10),
        is_pure=False, pack=1,
    )  # fmt: skip
    return found[:2], found[2:6], found[6:]


@gluon.jit
def _power(x):
    return gl.inline_asm_elementwise(_POWER, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _half(word, HIGH: gl.constexpr):
    return gl.inline_asm_elementwise(
        _HALVES_TO_FLOATS[HIGH], "=f,r", [word], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def score(keys, tables, bits, queries, first, second, DIM: gl.constexpr,
          TILES: gl.constexpr):  # fmt: skip
    """Return scores of 16 tokens with all queries, four a tile of eight, unscaled by the query.

    Args:
        keys: As `load_keys` returns them.
        tables: Of keys.
        bits: That integers are added to, four times.
        queries: Where this lane's fragments begin.
        first: What the scores of token g start with.
        second: Likewise of token g + 8.
        DIM: Values of a head.
        TILES: Of eight queries.
    """
    low, high, scales = keys
    LOW: gl.constexpr = DIM // 64
    WORDS: gl.constexpr = len(high) // 2
    sums = ()
    for _ in gl.static_range(TILES):
        sums = sums + (first, first, second, second)
    for pair in gl.static_range(LOW):  # of blocks
        left = ()
        factors = ()
        for odd in gl.static_range(2):
            left = left + gl.inline_asm_elementwise(
                _KEY_FRAGMENTS[(2 * pair + odd) % 4], _KEY_CONSTRAINTS,
                (low[pair], low[LOW + pair], high[pair // 2], high[WORDS + pair // 2]) + tables,
                dtype=word_types(4), is_pure=True, pack=1,
            )  # fmt: skip
            factors = factors + (_half(scales[pair], odd), _half(scales[LOW + pair], odd))
        after = ()
        for tile in gl.static_range(TILES):
            place = queries + (tile * (DIM * 8) + pair * 512)
            before = (sums[4 * tile], sums[4 * tile + 1], sums[4 * tile + 2], sums[4 * tile + 3])
            after = after + gl.inline_asm_elementwise(
                _MULTIPLY_KEYS, _MULTIPLY_KEYS_CONSTRAINTS,
                left + (place,) + factors + before + bits,
                dtype=float_types(4), is_pure=False, pack=1,
            )  # fmt: skip
        sums = after
    return sums


@gluon.jit
def weigh(scores, table, weights, TILES: gl.constexpr):
    """Store weights of a warp's tile of tokens; return the largest exponent of the thread's."""
    top = scores[0] * 0 - float("inf")
    for tile in gl.static_range(TILES):
        found = gl.inline_asm_elementwise(
            _WEIGH, "=&f,r,r,f,f,f,f",
            [table + tile * 64, weights + tile * 256, scores[4 * tile], scores[4 * tile + 1],
             scores[4 * tile + 2], scores[4 * tile + 3]],
            dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
        top = gl.maximum(top, found)
    return top


@gluon.jit
def mark(top, place, stamp):
    """Store a stamp if an exponent is so large that its reference must be raised."""
    gl.inline_asm_elementwise(
        _MARK, "=r,f,r,r", [top, place, top.to(gl.int32) * 0 + stamp],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def store_maxima(scores, table, maxima, TILES: gl.constexpr):
    """Store the largest exponents of all queries over a warp's tile of tokens."""
    for tile in gl.static_range(TILES):
        gl.inline_asm_elementwise(
            _STORE_MAXIMA, "=&r,r,r,f,f,f,f",
            [table + tile * 64, maxima + tile * 32, scores[4 * tile], scores[4 * tile + 1],
             scores[4 * tile + 2], scores[4 * tile + 3]],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def raise_references(thread, table, maxima, fades, WARPS: gl.constexpr, TILES: gl.constexpr):
    """Raise the references of queries whose exponents became large, and store how sums fade."""
    for turn in gl.static_range((8 * TILES + 32 * WARPS - 1) // (32 * WARPS)):
        query = thread + turn * 32 * WARPS
        real = query < 8 * TILES
        query = gl.minimum(query, 8 * TILES - 1)
        top = gl.inline_asm_elementwise(
            _largest(WARPS, TILES), "=&f,r", [maxima + query * 4],
            dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
        high = top > _LIMIT
        place = table + (query >> 1) * 16 + (query & 1) * 4 + 8
        store_if(real & high, place, load_shared(place) - top)
        store_if(real, fades + query * 4, gl.where(high, _power(-top), 1.0))


@gluon.jit
def fade(sums, totals, fades, lane, warp, WARPS: gl.constexpr, TILES: gl.constexpr):
    """Return sums and sums of weights, faded."""
    pair = fades + (lane & 3) * 8
    out = ()
    for tile in gl.static_range(TILES):
        a, b = load_shared_pair(pair + tile * 32)
        for i in gl.static_range(4):
            out = out + (sums[8 * tile + 2 * i] * a, sums[8 * tile + 2 * i + 1] * b)
    weights = ()
    for turn in gl.static_range(len(totals) // 2):
        a, b = load_shared_pair(pair + gl.minimum(warp + turn * WARPS, TILES - 1) * 32)
        weights = weights + (totals[2 * turn] * a, totals[2 * turn + 1] * b)
    return out, weights


@gluon.jit
def mix(values, tables, weights, own, sums, totals, TILES: gl.constexpr,
        WARPS: gl.constexpr):  # fmt: skip
    """Return sums of values and sums of weights with 16 · WARPS tokens added.

    Args:
        values: As `load_values` returns them.
        tables: Of values.
        weights: Where this lane's weights of the first tile of tokens and of queries are.
        own: Where those are of the tiles of queries whose weights this warp adds up.
        sums: Eight a tile of queries.
        totals: Two for each of `own`.
        TILES: Of eight queries.
        WARPS: Tiles of tokens.
    """
    low, high, scales = values
    for u in gl.static_range(WARPS):
        left = gl.inline_asm_elementwise(
            _VALUE_FRAGMENTS[u % 2], _VALUE_CONSTRAINTS,
            (low[u], high[u // 2], scales[2 * u], scales[2 * u + 1]) + tables,
            dtype=word_types(8), is_pure=True, pack=1,
        )  # fmt: skip
        after = ()
        for tile in gl.static_range(TILES):
            before = ()
            for i in gl.static_range(8):
                before = before + (sums[8 * tile + i],)
            after = after + gl.inline_asm_elementwise(
                _MULTIPLY_VALUES, _MULTIPLY_VALUES_CONSTRAINTS,
                (weights + (u * TILES + tile) * 256,) + left + before,
                dtype=float_types(8), is_pure=False, pack=1,
            )  # fmt: skip
        sums = after
        counted = ()
        for turn in gl.static_range(len(own)):
            counted = counted + gl.inline_asm_elementwise(
                _ADD_WEIGHTS, "=&f,=&f,r,f,f",
                [own[turn] + u * TILES * 256, totals[2 * turn], totals[2 * turn + 1]],
                dtype=float_types(2), is_pure=False, pack=1,
            )  # fmt: skip
        totals = counted
    return sums, totals
