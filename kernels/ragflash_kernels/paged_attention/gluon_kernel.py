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

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ragflash_kernels.paged_attention.gluon_loads import (
    load_keys,
    load_values,
    make_finite,
    prefetch,
)
from ragflash_kernels.paged_attention.gluon_parts import (
    barrier,
    fade,
    load_constants,
    load_shared,
    mark,
    mix,
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


@gluon.constexpr_function
def _areas(tiles, warps, buffers):
    """Return where areas of shared memory begin; weights are at 0, constants take 128 bytes.

    A table of scales and references, then what raising these needs: maxima, factors, flags.
    """
    table = buffers * warps * tiles * 256
    maxima = table + tiles * 64
    fades = maxima + warps * tiles * 32
    flags = fades + tiles * 32
    return table, maxima, fades, flags, flags + 32


@gluon.constexpr_function
def _turns(tiles, warps):
    """Return how often all threads take a query each until all have one."""
    return (8 * tiles + 32 * warps - 1) // (32 * warps)


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


@gluon.jit
def _find_span(bounds, ends, sequence, place, split, splits, split_tokens, STEP: gl.constexpr,
               TILES: gl.constexpr):  # fmt: skip
    """Return a split's first token and the one after its last, the sequence's end, the last start.

    Tokens before the earliest start are left out; from the last start on no row hides any.
    """
    end = gl.load(ends + sequence)
    earliest = gl.load(bounds + place * 2)
    latest = gl.load(bounds + place * 2 + 1)
    for tile in gl.static_range(1, TILES):
        earliest = gl.minimum(earliest, gl.load(bounds + (place + tile) * 2))
        latest = gl.maximum(latest, gl.load(bounds + (place + tile) * 2 + 1))
    share = (end + splits * STEP - 1) // (splits * STEP) * STEP
    share = gl.maximum(share, split_tokens)
    stop = gl.minimum((split + 1) * share, end)
    begin = gl.maximum(split * share, earliest // STEP * STEP)
    return begin, stop, end, latest


@gluon.jit
def _prepare(memory, scales, place, thread, TILES: gl.constexpr, WARPS: gl.constexpr,
             BUFFERS: gl.constexpr):  # fmt: skip
    """Fill shared memory with scales and first references; return the constants."""
    AREAS: gl.constexpr = _areas(TILES, WARPS, BUFFERS)
    for turn in gl.static_range(_turns(TILES, WARPS)):
        query = thread + turn * 32 * WARPS
        real = query < 8 * TILES
        at = memory + AREAS[0] + (query >> 1) * 16 + (query & 1) * 4
        scale = gl.load(scales + place * 8 + query, mask=real, other=0.0)
        store_if(real, at, scale)
        store_if(real, at + 8, scale * 0.0 - _LOWEST)
    flags = memory + AREAS[3]
    store_if(thread < 2, flags + thread * 4, (thread * 0).to(gl.float32))
    # Two copies: words that all threads have in common would be kept in uniform registers.
    constants = memory + AREAS[4] + (thread & 1) * 64
    store_constants(constants)
    barrier(flags)
    return load_constants(constants)


@gluon.jit
def _score_step(loaded, constants, queries, starts, rows, at, span, thread, DIM: gl.constexpr,
                TILES: gl.constexpr):  # fmt: skip
    """Return a warp's scores of 16 of the tokens from `at` on, -inf where they are hidden.

    `rows` is the program's first query, the sequence's first row, its queries, and the group.
    """
    _, _, end, latest = span
    lane = thread & 31
    token = (thread >> 5) * 16 + (lane >> 2)
    zero = (thread * 0).to(gl.float32)
    first = gl.where(at + token < end, zero, -float("inf"))
    second = gl.where(at + token + 8 < end, zero, -float("inf"))
    scores = score(loaded, constants[0], constants[2], queries, first, second, DIM, TILES)
    if at < latest:
        first_query, first_row, num_queries, group = rows
        query = first_query + 2 * (lane & 3)
        scores = _hide(scores, starts, at + token, query, first_row, num_queries, group, TILES)
    return scores


@gluon.jit
def _weigh_step(scores, memory, stamp, sums, totals, thread, TILES: gl.constexpr,
                WARPS: gl.constexpr, BUFFERS: gl.constexpr):  # fmt: skip
    """Store all warps' weights, and raise references if any must be; return sums, then faded."""
    AREAS: gl.constexpr = _areas(TILES, WARPS, BUFFERS)
    lane = thread & 31
    warp = thread >> 5
    slot = memory + AREAS[3] + stamp % 2 * 4
    buffer = stamp % BUFFERS * (WARPS * TILES * 256)
    table = memory + AREAS[0] + (lane & 3) * 16
    weights = memory + buffer + warp * (TILES * 256) + lane * 8
    if BUFFERS == 1:
        barrier(slot)
    mark(weigh(scores, table, weights, TILES), slot, stamp)
    if barrier(slot) == stamp:
        maxima = memory + AREAS[1]
        fades = memory + AREAS[2]
        store_maxima(scores, table, maxima + warp * (TILES * 32) + (lane & 3) * 8, TILES)
        barrier(slot)
        raise_references(thread, memory + AREAS[0], maxima, fades, WARPS, TILES)
        barrier(slot)
        weigh(scores, table, weights, TILES)
        sums, totals = fade(sums, totals, fades, lane, warp, WARPS, TILES)
        barrier(slot)
    return sums, totals


@gluon.jit
def _mix_step(mixed, tables, memory, stamp, sums, totals, thread, TILES: gl.constexpr,
              WARPS: gl.constexpr, BUFFERS: gl.constexpr):  # fmt: skip
    """Return sums with all warps' weights times values of the step added."""
    first = memory + stamp % BUFFERS * (WARPS * TILES * 256) + (thread & 31) * 8
    own = ()
    for turn in gl.static_range(len(totals) // 2):
        own = own + (first + gl.minimum((thread >> 5) + turn * WARPS, TILES - 1) * 256,)
    return mix(mixed, tables, first, own, sums, totals, TILES, WARPS)


@gluon.jit
def _repeat(x, COUNT: gl.constexpr):
    out = ()
    for _ in gl.static_range(COUNT):
        out = out + (x,)
    return out


@gluon.jit
def _go_through(
    memory, constants, queries, pools, pages, max_pages, starts, rows, span, thread,
    DIM: gl.constexpr, PAGE: gl.constexpr, HIGH: gl.constexpr, SCALES: gl.constexpr,
    TILES: gl.constexpr, WARPS: gl.constexpr, BUFFERS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Return sums of weighted values over a split, and each warp's sums of some tiles' weights.

    `pools` is where the head's keys are in page 0, the stride of pages, and both of values.
    """
    STEP: gl.constexpr = 16 * WARPS
    lane = thread & 31
    warp = thread >> 5
    begin, stop, end, _ = span
    first_key, key_stride, first_value, value_stride = pools
    zero = (thread * 0).to(gl.float32)
    sums = _repeat(zero, 8 * TILES)
    totals = _repeat(zero, 2 * ((TILES + WARPS - 1) // WARPS))
    page = gl.load(pages + gl.minimum(begin // PAGE, max_pages - 1)).to(gl.int64)
    next_page = gl.load(pages + gl.minimum((begin + STEP) // PAGE, max_pages - 1)).to(gl.int64)
    if AHEAD:
        last = gl.maximum(end - 1 - begin // PAGE * PAGE, 0)
        place = first_key + page * key_stride
        loaded = load_keys(place, warp * 16 + begin % PAGE, last, lane, DIM, HIGH, SCALES)
    stamp = 0
    for at in range(begin, stop, STEP):
        stamp += 1
        value_page = first_value + page * value_stride
        if AHEAD:
            mixed = load_values(value_page, at % PAGE, warp, lane, DIM, HIGH, SCALES)
        else:
            last = end - 1 - at // PAGE * PAGE
            place = first_key + page * key_stride
            loaded = load_keys(place, warp * 16 + at % PAGE, last, lane, DIM, HIGH, SCALES)
        scores = _score_step(loaded, constants, queries, starts, rows, at, span, thread, DIM, TILES)
        if not AHEAD:
            mixed = load_values(value_page, at % PAGE, warp, lane, DIM, HIGH, SCALES)
        # The next step's keys; after the last step, once more the same.
        more = at + STEP < stop
        following = gl.where(more, at + STEP, at)
        page = gl.where(more, next_page, page)
        next_page = gl.load(pages + gl.minimum((at + 2 * STEP) // PAGE, max_pages - 1)).to(gl.int64)
        place = first_key + page * key_stride
        if AHEAD:
            last = end - 1 - following // PAGE * PAGE
            loaded = load_keys(place, warp * 16 + following % PAGE, last, lane, DIM, HIGH, SCALES)
        else:
            value_page = first_value + page * value_stride
            prefetch(place, value_page, following % PAGE, thread, more, DIM, HIGH, SCALES)
        low, high, of_values = mixed
        if at + STEP > end:
            of_values = make_finite(of_values)
        sums, totals = _weigh_step(
            scores, memory, stamp, sums, totals, thread, TILES, WARPS, BUFFERS
        )
        sums, totals = _mix_step(
            (low, high, of_values), constants[1], memory, stamp, sums, totals, thread, TILES,
            WARPS, BUFFERS,
        )  # fmt: skip
    return sums, totals


@gluon.jit
def _add_up(totals, memory, thread, TILES: gl.constexpr, WARPS: gl.constexpr,
            BUFFERS: gl.constexpr):  # fmt: skip
    """Store sums of weights where maxima were, by query, for all warps."""
    AREAS: gl.constexpr = _areas(TILES, WARPS, BUFFERS)
    maxima = memory + AREAS[1]
    for turn in gl.static_range(len(totals) // 2):
        tile = (thread >> 5) + turn * WARPS
        at_tile = maxima + tile * 32 + (thread & 3) * 8
        store_pair_if(tile < TILES, at_tile, totals[2 * turn], totals[2 * turn + 1])
    barrier(memory + AREAS[3])
    return maxima


@gluon.jit
def _store(
    sums, totals, memory, out, lse, rows, head, kv_heads, split, splits, any_tokens, thread,
    DIM: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Store means and logarithms of all queries; `rows` as in `_score_step`."""
    AREAS: gl.constexpr = _areas(TILES, WARPS, BUFFERS)
    first_query, first_row, num_queries, group = rows
    maxima = _add_up(totals, memory, thread, TILES, WARPS, BUFFERS)
    for turn in gl.static_range(_turns(TILES, WARPS)):
        query = thread + turn * 32 * WARPS
        here = (query < 8 * TILES) & (first_query + query < num_queries)
        query = gl.minimum(query, 8 * TILES - 1)
        total = load_shared(maxima + query * 4)
        reference = -load_shared(memory + AREAS[0] + (query >> 1) * 16 + (query & 1) * 4 + 8)
        row = _row_of(first_query + query, first_row, head, group, kv_heads)
        logarithm = gl.where(total > 0, reference + gl.log2(total), -float("inf"))
        gl.store(lse + row * splits + split, logarithm, mask=here)
    if any_tokens:
        lane = thread & 31
        for i in gl.static_range(2 * TILES):
            query = first_query + i // 2 * 8 + 2 * (lane & 3) + i % 2
            total = load_shared(maxima + (query - first_query) * 4)
            inverse = gl.where(total > 0, 1.0 / total, 0.0)
            row = _row_of(query, first_row, head, group, kv_heads)
            target = out + (row * splits + split) * DIM + (thread >> 5) * 32 + (lane >> 2)
            here = query < num_queries
            for k in gl.static_range(4):
                value = sums[8 * (i // 2) + 2 * k + i % 2] * inverse
                gl.store(target + 8 * k, value, mask=here)


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

    `q`, `scales` and `bounds` are what `quantize_queries_kernel` writes, `tiles` a key head, which
    `tile_groups` programs share. `keys` and `values` are bytes of pages of PAGE tokens, multiples
    of DIM / 2, `key_stride` and `value_stride` apart, and heads are SIZE apart; for HIGH and SCALES
    see `PageLayout`. The tables are those of `Visibility`, with `max_pages` pages a sequence;
    `out` and `lse` those of `attend_tq3`, but where `lse` is -inf for all queries `out` is not
    written. A sequence's tokens are shared evenly among `splits`, of `split_tokens` at least, a
    multiple of DIM / 2. WARPS is DIM / 32.

    With two BUFFERS for weights there is one barrier a step, with one there are two. AHEAD: a step
    loads the keys of the next one, and its own values first; otherwise what the next one needs is
    only asked into the second-level cache, which takes fewer registers. EAGER: let the next kernel
    start, and wait for the one before only here (sm_90).
    """
    if EAGER:
        gdc_launch_dependents()
        gdc_wait()
    thread = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    tile_group = gl.program_id(0) % tile_groups
    head = gl.program_id(0) // tile_groups
    split = gl.program_id(1)
    sequence = gl.program_id(2)
    first_row = gl.load(first_rows + sequence)
    num_queries = (gl.load(first_rows + sequence + 1) - first_row) * group
    rows = (tile_group * (8 * TILES), first_row, num_queries, group)
    if rows[0] >= num_queries:
        return
    place = (sequence * kv_heads + head) * tiles + tile_group * TILES
    span = _find_span(bounds, ends, sequence, place, split, splits, split_tokens, 16 * WARPS, TILES)
    AREAS: gl.constexpr = _areas(TILES, WARPS, BUFFERS)
    memory = shared_memory(split, AREAS[4] + 128)
    constants = _prepare(memory, scales, place, thread, TILES, WARPS, BUFFERS)
    queries = q.to(gl.int64) + place.to(gl.int64) * (DIM * 8) + (thread & 31) * 16
    pools = (
        keys.to(gl.int64) + head * SIZE, key_stride,
        values.to(gl.int64) + head * SIZE, value_stride,
    )  # fmt: skip
    sums, totals = _go_through(
        memory, constants, queries, pools, page_table + sequence * max_pages, max_pages, starts,
        rows, span, thread, DIM, PAGE, HIGH, SCALES, TILES, WARPS, BUFFERS, AHEAD,
    )  # fmt: skip
    _store(
        sums, totals, memory, out, lse, rows, head, kv_heads, split, splits, span[0] < span[1],
        thread, DIM, TILES, WARPS, BUFFERS,
    )  # fmt: skip
