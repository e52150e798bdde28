"""What a warp does with a page of TQ3_0, in Gluon: one element of a tensor is one thread's."""

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
_PREFETCH_IF = gl.constexpr(ptx.prefetch_if())
_MAKE_FINITE = gl.constexpr(ptx.make_finite())
_POWER = gl.constexpr(ptx.power())
_LIMIT = gl.constexpr(_RAISE_ABOVE)


@gluon.constexpr_function
def _value_load(dim, part, what):
    return _VALUE_LOADS[dim, part][what]


@gluon.constexpr_function
def _key_load(width, what):
    return _KEY_LOADS[width][what]


@gluon.constexpr_function
def _largest(warps, tiles):
    return _LARGEST[warps, tiles]


@gluon.constexpr_function
def _memory(num_bytes):
    return _SHARED_MEMORY % num_bytes


@gluon.constexpr_function
def _words(count):
    return [gl.int32] * count


@gluon.constexpr_function
def _floats(count):
    return [gl.float32] * count


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
        _LOAD_SHARED[1], "=&f,=&f,r", [place], dtype=_floats(2), is_pure=False, pack=1
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
        _LOAD_CONSTANTS, _LOAD_CONSTANTS_CONSTRAINTS, [place], dtype=_words(10),
        is_pure=False, pack=1,
    )  # fmt: skip
    return found[:2], found[2:6], found[6:]


@gluon.jit
def _power(x):
    return gl.inline_asm_elementwise(_POWER, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _load_key_words(place, WIDTH: gl.constexpr):
    return gl.inline_asm_elementwise(
        _key_load(WIDTH, 0), _key_load(WIDTH, 1), [place], dtype=_words(WIDTH),
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _load_value_words(place, DIM: gl.constexpr, PART: gl.constexpr):
    return gl.inline_asm_elementwise(
        _value_load(DIM, PART, 0), _value_load(DIM, PART, 1), [place],
        dtype=_words(_value_load(DIM, PART, 2)), is_pure=False, pack=1,
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
                dtype=_words(4), is_pure=True, pack=1,
            )  # fmt: skip
            factors = factors + (_half(scales[pair], odd), _half(scales[LOW + pair], odd))
        after = ()
        for tile in gl.static_range(TILES):
            place = queries + (tile * (DIM * 8) + pair * 512)
            before = (sums[4 * tile], sums[4 * tile + 1], sums[4 * tile + 2], sums[4 * tile + 3])
            after = after + gl.inline_asm_elementwise(
                _MULTIPLY_KEYS, _MULTIPLY_KEYS_CONSTRAINTS,
                left + (place,) + factors + before + bits,
                dtype=_floats(4), is_pure=False, pack=1,
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
            dtype=_words(8), is_pure=True, pack=1,
        )  # fmt: skip
        after = ()
        for tile in gl.static_range(TILES):
            before = ()
            for i in gl.static_range(8):
                before = before + (sums[8 * tile + i],)
            after = after + gl.inline_asm_elementwise(
                _MULTIPLY_VALUES, _MULTIPLY_VALUES_CONSTRAINTS,
                (weights + (u * TILES + tile) * 256,) + left + before,
                dtype=_floats(8), is_pure=False, pack=1,
            )  # fmt: skip
        sums = after
        counted = ()
        for turn in gl.static_range(len(own)):
            counted = counted + gl.inline_asm_elementwise(
                _ADD_WEIGHTS, "=&f,=&f,r,f,f",
                [own[turn] + u * TILES * 256, totals[2 * turn], totals[2 * turn + 1]],
                dtype=_floats(2), is_pure=False, pack=1,
            )  # fmt: skip
        totals = counted
    return sums, totals
