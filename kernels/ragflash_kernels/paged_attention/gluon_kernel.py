"""Attention over TQ3_0 pages on NVIDIA cards.

A program of DIM / 32 warps goes through a split DIM / 2 tokens at a time. First each warp scores
16 of the tokens with all queries, and stores weights, 2**(score - reference), as fragments in
shared memory; then, after one barrier, it mixes 32 of the values of all these tokens. So keys and
values are unpacked once for all queries, straight from memory into matrix instructions.

A query's reference is some earlier maximum of its scores. It is raised only where an exponent
exceeds a limit, seldom, at the cost of three more barriers: for the first tokens, where all
references are very low, and when a score is far above all before. That decision, like every sum,
is a query's own, so what comes out for a row does not depend on the other rows, on their number,
or on TILES.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ragflash_kernels.paged_attention.gluon_parts import (
    barrier,
    fade,
    load_constants,
    load_keys,
    load_shared,
    load_values,
    make_finite,
    mark,
    mix,
    prefetch,
    raise_references,
    score,
    shared_memory,
    store_constants,
    store_if,
    store_maxima,
    store_pair_if,
    weigh,
)

_LOWEST = gl.constexpr(-32768.0)  # the first reference: scores in units of log2 are above it
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


@gluon.jit
def _row_of(query, first_row, head, group, kv_heads):
    """Return which of `[rows, heads]` a sequence's query is."""
    row = (first_row + query // group).to(gl.int64)
    return row * (kv_heads * group) + head * group + query % group


@gluon.jit
def _hide(scores, starts, token, query, first_row, num_queries, group, TILES: gl.constexpr):
    """Return scores with those of tokens before a row's start at -inf.

    `token` is this lane's first one, the other is 8 later; `query` is the first one of its two.
    """
    out = ()
    for i in gl.static_range(4 * TILES):
        m = gl.minimum(query + i // 4 * 8 + i % 2, num_queries - 1)
        start = gl.load(starts + first_row + m // group)
        out = out + (gl.where(token + i % 4 // 2 * 8 >= start, scores[i], -float("inf")),)
    return out


@gluon.jit(
    do_not_specialize=[
        "kv_heads", "group", "max_pages", "splits", "split_tokens", "tiles", "tile_groups",
    ]
)  # fmt: skip
def attend_tq3_kernel(
    q, scales, bounds, keys, values, page_table, first_rows, starts, ends, out, lse, key_stride,
    value_stride, kv_heads, group, max_pages, splits, split_tokens, tiles, tile_groups,
    DIM: gl.constexpr, PAGE: gl.constexpr, HIGH: gl.constexpr, SCALES: gl.constexpr,
    SIZE: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr, BUFFERS: gl.constexpr,
    AHEAD: gl.constexpr, EAGER: gl.constexpr,
):  # fmt: skip
    """Attend of up to 8 · TILES queries of a sequence and a key head to one split.

    Args:
        q: As `quantize_queries_kernel` writes it.
        scales: Likewise.
        bounds: Likewise.
        keys: Bytes of pages, `key_stride` apart, heads SIZE apart.
        values: Likewise, `value_stride` apart.
        page_table: As in `Visibility`, `[sequences, max_pages]`.
        first_rows: Likewise.
        starts: Likewise.
        ends: Likewise.
        out: float32 `[rows, heads, splits, DIM]`; not written where `lse` is -inf for all queries.
        lse: float32 `[rows, heads, splits]`.
        key_stride: Bytes.
        value_stride: Bytes.
        kv_heads: Of the cache.
        group: Query heads of a key head.
        max_pages: See `page_table`.
        splits: That the tokens before a sequence's end are shared evenly among.
        split_tokens: That a split has at least, a multiple of DIM / 2.
        tiles: Of `q`.
        tile_groups: Programs that share the tiles of a sequence.
        DIM: Values of a head.
        PAGE: Tokens of a page, a multiple of DIM / 2.
        HIGH: As in `PageLayout`.
        SCALES: Likewise.
        SIZE: Likewise.
        TILES: Of eight queries.
        WARPS: DIM / 32.
        BUFFERS: For weights: with 2 there is one barrier a step, with 1 there are two.
        AHEAD: A step loads the keys of the next one, and its own values first; otherwise what the
            next one needs is only asked into the second-level cache, which takes fewer registers.
        EAGER: Let the next kernel start, and wait for the one before only here (sm_90).
    """
    if EAGER:
        gdc_launch_dependents()
        gdc_wait()
    STEP: gl.constexpr = 16 * WARPS
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    thread = gl.arange(0, 32 * WARPS, layout=layout)
    lane = thread & 31
    warp = thread >> 5
    tile_group = gl.program_id(0) % tile_groups
    head = gl.program_id(0) // tile_groups
    split = gl.program_id(1)
    sequence = gl.program_id(2)
    first_row = gl.load(first_rows + sequence)
    num_queries = (gl.load(first_rows + sequence + 1) - first_row) * group
    first_query = tile_group * (8 * TILES)
    if first_query >= num_queries:
        return
    end = gl.load(ends + sequence)
    place = (sequence * kv_heads + head) * tiles + tile_group * TILES
    earliest = gl.load(bounds + place * 2)
    latest = gl.load(bounds + place * 2 + 1)
    for tile in gl.static_range(1, TILES):
        earliest = gl.minimum(earliest, gl.load(bounds + (place + tile) * 2))
        latest = gl.maximum(latest, gl.load(bounds + (place + tile) * 2 + 1))
    share = (end + splits * STEP - 1) // (splits * STEP) * STEP
    share = gl.maximum(share, split_tokens)
    stop = gl.minimum((split + 1) * share, end)
    begin = gl.maximum(split * share, earliest // STEP * STEP)

    # Shared memory: weights, a table of scales and references, then what raising these needs.
    WEIGHTS: gl.constexpr = WARPS * TILES * 256
    TABLE: gl.constexpr = BUFFERS * WEIGHTS
    MAXIMA: gl.constexpr = TABLE + TILES * 64
    FADES: gl.constexpr = MAXIMA + WARPS * TILES * 32
    FLAGS: gl.constexpr = FADES + TILES * 32
    CONSTANTS: gl.constexpr = FLAGS + 32
    memory = shared_memory(split, CONSTANTS + 128)
    ROW_TURNS: gl.constexpr = (8 * TILES + 32 * WARPS - 1) // (32 * WARPS)
    for turn in gl.static_range(ROW_TURNS):
        query = thread + turn * 32 * WARPS
        real = query < 8 * TILES
        at = memory + TABLE + (query >> 1) * 16 + (query & 1) * 4
        scale = gl.load(scales + place * 8 + query, mask=real, other=0.0)
        store_if(real, at, scale)
        store_if(real, at + 8, scale * 0.0 - _LOWEST)
    store_if(thread < 2, memory + FLAGS + thread * 4, (thread * 0).to(gl.float32))
    # Two copies: words that all threads have in common would be kept in uniform registers.
    constants = memory + CONSTANTS + (thread & 1) * 64
    store_constants(constants)
    barrier(memory + FLAGS)
    key_tables, value_tables, bits = load_constants(constants)

    zero = (thread * 0).to(gl.float32)
    sums = ()
    for _ in gl.static_range(8 * TILES):
        sums = sums + (zero,)
    totals = ()
    own = ()
    for turn in gl.static_range((TILES + WARPS - 1) // WARPS):
        totals = totals + (zero, zero)
        tile_of_warp = gl.minimum(warp + turn * WARPS, TILES - 1)
        own = own + (memory + lane * 8 + tile_of_warp * 256,)
    queries = q.to(gl.int64) + place.to(gl.int64) * (DIM * 8) + lane * 16
    table = memory + TABLE + (lane & 3) * 16
    maxima = memory + MAXIMA
    token = warp * 16 + (lane >> 2)
    pages = page_table + sequence * max_pages
    first_key = keys.to(gl.int64) + head * SIZE
    first_value = values.to(gl.int64) + head * SIZE
    page = gl.load(pages + gl.minimum(begin // PAGE, max_pages - 1)).to(gl.int64)
    next_page = gl.load(pages + gl.minimum((begin + STEP) // PAGE, max_pages - 1)).to(gl.int64)
    if AHEAD:
        loaded = load_keys(
            first_key + page * key_stride, warp * 16 + begin % PAGE,
            gl.maximum(end - 1 - begin // PAGE * PAGE, 0), lane, DIM, HIGH, SCALES,
        )  # fmt: skip
    stamp = 0
    for at in range(begin, stop, STEP):
        stamp += 1
        slot = memory + FLAGS + stamp % 2 * 4
        buffer = stamp % BUFFERS * WEIGHTS
        key_page = first_key + page * key_stride
        value_page = first_value + page * value_stride
        if AHEAD:
            mixed = load_values(value_page, at % PAGE, warp, lane, DIM, HIGH, SCALES)
        else:
            loaded = load_keys(
                key_page,
                warp * 16 + at % PAGE,
                end - 1 - at // PAGE * PAGE,
                lane,
                DIM,
                HIGH,
                SCALES,
            )
        first = gl.where(at + token < end, zero, -float("inf"))
        second = gl.where(at + token + 8 < end, zero, -float("inf"))
        scores = score(loaded, key_tables, bits, queries, first, second, DIM, TILES)
        if at < latest:
            scores = _hide(
                scores, starts, at + token, first_query + 2 * (lane & 3), first_row, num_queries,
                group, TILES,
            )  # fmt: skip
        if not AHEAD:
            mixed = load_values(value_page, at % PAGE, warp, lane, DIM, HIGH, SCALES)
        # The next step's keys; after the last step, once more the same.
        more = at + STEP < stop
        following = gl.where(more, at + STEP, at)
        page = gl.where(more, next_page, page)
        next_page = gl.load(pages + gl.minimum((at + 2 * STEP) // PAGE, max_pages - 1)).to(gl.int64)
        key_page = first_key + page * key_stride
        if AHEAD:
            loaded = load_keys(
                key_page, warp * 16 + following % PAGE, end - 1 - following // PAGE * PAGE, lane,
                DIM, HIGH, SCALES,
            )  # fmt: skip
        else:
            prefetch(
                key_page, first_value + page * value_stride, following % PAGE, thread, more, DIM,
                HIGH, SCALES,
            )  # fmt: skip
        low, high, of_values = mixed
        if at + STEP > end:
            of_values = make_finite(of_values)
        weights = memory + buffer + warp * (TILES * 256) + lane * 8
        if BUFFERS == 1:
            barrier(slot)
        mark(weigh(scores, table, weights, TILES), slot, stamp)
        if barrier(slot) == stamp:
            store_maxima(scores, table, maxima + warp * (TILES * 32) + (lane & 3) * 8, TILES)
            barrier(slot)
            raise_references(thread, memory + TABLE, maxima, memory + FADES, WARPS, TILES)
            barrier(slot)
            weigh(scores, table, weights, TILES)
            sums, totals = fade(sums, totals, memory + FADES, lane, warp, WARPS, TILES)
            barrier(slot)
        of_warp = ()
        for turn in gl.static_range(len(own)):
            of_warp = of_warp + (own[turn] + buffer,)
        sums, totals = mix(
            (low, high, of_values),
            value_tables,
            memory + buffer + lane * 8,
            of_warp,
            sums,
            totals,
            TILES,
            WARPS,
        )

    for turn in gl.static_range(len(own)):
        tile = warp + turn * WARPS
        at_tile = maxima + tile * 32 + (lane & 3) * 8
        store_pair_if(tile < TILES, at_tile, totals[2 * turn], totals[2 * turn + 1])
    barrier(memory + FLAGS)
    for turn in gl.static_range(ROW_TURNS):
        query = thread + turn * 32 * WARPS
        here = (query < 8 * TILES) & (first_query + query < num_queries)
        query = gl.minimum(query, 8 * TILES - 1)
        total = load_shared(maxima + query * 4)
        reference = -load_shared(memory + TABLE + (query >> 1) * 16 + (query & 1) * 4 + 8)
        row = _row_of(first_query + query, first_row, head, group, kv_heads)
        logarithm = gl.where(total > 0, reference + gl.log2(total), -float("inf"))
        gl.store(lse + row * splits + split, logarithm, mask=here)
    if begin < stop:
        for i in gl.static_range(2 * TILES):
            query = first_query + i // 2 * 8 + 2 * (lane & 3) + i % 2
            total = load_shared(maxima + (query - first_query) * 4)
            inverse = gl.where(total > 0, 1.0 / total, 0.0)
            row = _row_of(query, first_row, head, group, kv_heads)
            target = out + (row * splits + split) * DIM + warp * 32 + (lane >> 2)
            here = query < num_queries
            for k in gl.static_range(4):
                value = sums[8 * (i // 2) + 2 * k + i % 2] * inverse
                gl.store(target + 8 * k, value, mask=here)
