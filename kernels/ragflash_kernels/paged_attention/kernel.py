"""Attention over pages in plain Triton: partial results of splits, then what they add up to.

A program takes up to M query rows, all of one sequence and one key head, over the tokens of one
split. Heads are handled a quarter of their values at a time (`quarters.py`).
"""

import triton
import triton.language as tl

from ragflash_kernels.columns_kernel import load_columns
from ragflash_kernels.paged_attention.quarters import F16, load_quarter
from ragflash_kernels.paged_attention.query_kernel import rotate
from ragflash_kernels.qmatmul.kernel import store_quantized


@triton.jit
def _query_quarter(q, row, here, quarter: tl.constexpr, scale, DIM: tl.constexpr):
    at = q + row[:, None] * DIM + quarter * (DIM // 4) + tl.arange(0, DIM // 4)[None, :]
    return (tl.load(at, mask=here[:, None], other=0.0).to(tl.float32) * scale).to(tl.float16)


@triton.jit
def _load_queries(q, row, here, scale, DIM: tl.constexpr):
    q0 = _query_quarter(q, row, here, 0, scale, DIM)
    q1 = _query_quarter(q, row, here, 1, scale, DIM)
    q2 = _query_quarter(q, row, here, 2, scale, DIM)
    q3 = _query_quarter(q, row, here, 3, scale, DIM)
    return q0, q1, q2, q3


@triton.jit
def _store_quarter(place, row, here, values, quarter: tl.constexpr, DIM: tl.constexpr):
    at = row[:, None] * DIM + quarter * (DIM // 4) + tl.arange(0, DIM // 4)[None, :]
    tl.store(place + at, values, mask=here[:, None])


@triton.jit
def _scores(q0, q1, q2, q3, place, token, mask, N: tl.constexpr, DIM: tl.constexpr,
            PAGE: tl.constexpr, FORMAT: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Return float32 `[M, N]`: queries times keys of a page."""
    x = load_quarter(place, token, 0, mask, N, DIM, PAGE, FORMAT, False, PTX)
    s = tl.dot(q0, tl.trans(x))
    x = load_quarter(place, token, 1, mask, N, DIM, PAGE, FORMAT, False, PTX)
    s = tl.dot(q1, tl.trans(x), s)
    x = load_quarter(place, token, 2, mask, N, DIM, PAGE, FORMAT, False, PTX)
    # Two chains of products are shorter than one; unpacked keys leave no registers for a second.
    other = tl.zeros_like(s) if FORMAT == F16 else s
    other = tl.dot(q2, tl.trans(x), other)
    x = load_quarter(place, token, 3, mask, N, DIM, PAGE, FORMAT, False, PTX)
    other = tl.dot(q3, tl.trans(x), other)
    return s + other if FORMAT == F16 else other


@triton.jit
def _add_values(acc0, acc1, acc2, acc3, total, p, fade, place, token, mask, N: tl.constexpr,
                DIM: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr,
                PTX: tl.constexpr):  # fmt: skip
    """Return the four sums, faded, with weights `p [M, N]` times values of a page added.

    `total [M, 16]` are sums of weights, by a product as well: its order is the same in every tile.
    `[M, 1]` takes fewer registers.
    """
    if total.shape[1] > 1:
        total = tl.dot(p, tl.full((N, total.shape[1]), 1.0, tl.float16), total * fade)
    else:
        total = total * fade + tl.sum(p.to(tl.float32), 1)[:, None]
    x = load_quarter(place, token, 0, mask, N, DIM, PAGE, FORMAT, True, PTX)
    acc0 = tl.dot(p, x, acc0 * fade)
    x = load_quarter(place, token, 1, mask, N, DIM, PAGE, FORMAT, True, PTX)
    acc1 = tl.dot(p, x, acc1 * fade)
    x = load_quarter(place, token, 2, mask, N, DIM, PAGE, FORMAT, True, PTX)
    acc2 = tl.dot(p, x, acc2 * fade)
    x = load_quarter(place, token, 3, mask, N, DIM, PAGE, FORMAT, True, PTX)
    acc3 = tl.dot(p, x, acc3 * fade)
    return acc0, acc1, acc2, acc3, total


@triton.jit
def _drafted(word, t, end):
    """Return `[M, N]`: whether tokens are before the end, or in the words of rows."""
    late = tl.maximum(tl.minimum(t - end, 31), 0)
    return (t < end)[None, :] | (((word[:, None] >> late[None, :]) & 1) == 1)


@triton.jit
def _weigh(s, top):
    """Return float16 weights of scores `[M, N]`, the factor of former sums, the new maximum."""
    raised = tl.maximum(top, tl.max(s, 1))
    base = tl.where(raised == float("-inf"), 0.0, raised)  # no token seen yet
    p = tl.exp2(s - base[:, None]).to(tl.float16)
    return p, tl.exp2(top - base), raised


@triton.jit
def _store_partial(out, lse, target, here, acc0, acc1, acc2, acc3, top, total,
                   DIM: tl.constexpr):  # fmt: skip
    """Store weighted means and base-2 logarithms of the sums of weights."""
    seen_any = total > 0
    safe = tl.where(seen_any, total, 1.0)
    inverse = tl.where(seen_any, 1.0 / safe, 0.0)[:, None]
    _store_quarter(out, target, here, acc0 * inverse, 0, DIM)
    _store_quarter(out, target, here, acc1 * inverse, 1, DIM)
    _store_quarter(out, target, here, acc2 * inverse, 2, DIM)
    _store_quarter(out, target, here, acc3 * inverse, 3, DIM)
    logarithm = tl.where(seen_any, top + tl.log2(safe), float("-inf"))
    tl.store(lse + target, logarithm, mask=here)


@triton.jit
def _attend_split(
    q0, q1, q2, q3, keys, values, pages, page, begin, stop, first, last, start, end, word,
    DRAFTS: tl.constexpr, max_pages, DIM: tl.constexpr, PAGE: tl.constexpr,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, KEY_FORMAT: tl.constexpr,
    VALUE_FORMAT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return four sums of values, maxima and sums of weights of tokens `begin` … `stop - 1`.

    `page` is that of `begin`; tokens from `first` to `last - 1` may be read.
    """
    acc0 = tl.zeros((M, DIM // 4), tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M, 16 if KEY_FORMAT == F16 else 1), tl.float32)
    for at in range(begin, stop, N):
        t = at + tl.arange(0, N)
        readable = (t >= first) & (t < last)
        key_place = keys + page.to(tl.int64) * KEY_STRIDE
        s = _scores(q0, q1, q2, q3, key_place, t % PAGE, readable, N, DIM, PAGE, KEY_FORMAT, PTX)
        seen = readable[None, :] & (t[None, :] >= start[:, None])
        if DRAFTS:
            seen = seen & _drafted(word, t, end)
        p, fade, top = _weigh(tl.where(seen, s, float("-inf")), top)
        acc0, acc1, acc2, acc3, total = _add_values(
            acc0, acc1, acc2, acc3, total, p, fade[:, None],
            values + page.to(tl.int64) * VALUE_STRIDE, t % PAGE, readable,
            N, DIM, PAGE, VALUE_FORMAT, PTX,
        )  # fmt: skip
        # A turn ahead, and beyond the last one, so that keys and values need not wait for it.
        page = tl.load(pages + tl.minimum((at + N) // PAGE, max_pages - 1))
    return acc0, acc1, acc2, acc3, top, tl.max(total, 1)  # all columns are the same


@triton.jit(do_not_specialize=["kv_heads", "group", "max_pages", "splits", "tiles", "split_tokens"])
def attend_kernel(
    q, keys, values, page_table, first_rows, starts, ends, words, out, lse, scale, kv_heads, group,
    max_pages, splits, tiles, split_tokens, DIM: tl.constexpr, PAGE: tl.constexpr,
    KEY_BYTES: tl.constexpr, VALUE_BYTES: tl.constexpr, KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr, KEY_FORMAT: tl.constexpr, VALUE_FORMAT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PTX: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Attend of M query rows to one split of at most `split_tokens`; see `launch.attend`.

    A query row is a row and one of the `group` heads that share a key head. `scale` includes
    log2(e). N tokens at a time lie in one page; sizes and strides are bytes. PTX: on an NVIDIA
    card. EAGER: start the next kernel, and wait for the one before when all that is read of tables
    is there, as that one does not write them (sm_90).
    """
    split = tl.program_id(0) // tiles
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    if EAGER:
        tl.extra.cuda.gdc_launch_dependents()
    pages = page_table + sequence * max_pages
    place = tl.minimum(split * split_tokens // PAGE, max_pages - 1)
    page = tl.load(pages + place)
    first_row = tl.load(first_rows + sequence)
    num_rows = tl.load(first_rows + sequence + 1) - first_row
    end = tl.load(ends + sequence)
    m = tl.program_id(0) % tiles * M + tl.arange(0, M)
    here = m < num_rows * group
    row = (first_row + m // group).to(tl.int64)
    q_row = (row * kv_heads + head) * group + m % group
    target = q_row * splits + split
    start = tl.load(starts + row, mask=here, other=2147483647)
    first = tl.min(start, 0)
    last = end
    if words is not None:
        last += num_rows
        word = tl.load(words + row, mask=here, other=0)
    stop = tl.minimum((split + 1) * split_tokens, last)
    begin = tl.minimum(tl.maximum(split * split_tokens, first // N * N), stop)
    if EAGER:
        tl.extra.cuda.gdc_wait()
    q0, q1, q2, q3 = _load_queries(q, q_row, here, scale, DIM)
    if begin >= stop:
        tl.store(lse + target, float("-inf"), mask=here)
        return
    if begin // PAGE != place:
        page = tl.load(pages + begin // PAGE)
    if words is None:
        word = start
    acc0, acc1, acc2, acc3, top, total = _attend_split(
        q0, q1, q2, q3, keys + head * KEY_BYTES, values + head * VALUE_BYTES, pages, page, begin,
        stop, first, last, start, end, word, words is not None, max_pages, DIM, PAGE, KEY_STRIDE,
        VALUE_STRIDE, KEY_FORMAT, VALUE_FORMAT, M, N, PTX,
    )  # fmt: skip
    _store_partial(out, lse, target, here, acc0, acc1, acc2, acc3, top, total, DIM)


@triton.jit
def _load_logarithms(lse, splits, SPLITS: tl.constexpr):
    s = tl.arange(0, SPLITS)
    return tl.load(lse + s, mask=s < splits, other=float("-inf"))


@triton.jit
def _add_chunk(acc, total, out, lse, at, base, splits, d, DIM: tl.constexpr,
               CHUNK: tl.constexpr):  # fmt: skip
    """Return `acc [CHUNK, values]` and `total [CHUNK]` with the splits from `at` on added."""
    split = at + tl.arange(0, CHUNK)
    weight = tl.exp2(tl.load(lse + split, mask=split < splits, other=float("-inf")) - base)
    place = out + split[:, None] * DIM + d[None, :]
    values = tl.load(place, mask=(weight != 0)[:, None], other=0.0)
    return acc + weight[:, None] * values, total + weight


@triton.jit
def _add_splits(out, lse, logarithms, base, splits, d, DIM: tl.constexpr, SPLITS: tl.constexpr,
                CHUNK: tl.constexpr):  # fmt: skip
    """Return the weighted sum over splits of `out [splits, DIM]` at `d`, and that of weights.

    Splits are summed by their place in a chunk, then places, so that the order does not depend on
    how many there are. Where a logarithm is -inf, `out` may hold anything.
    """
    acc = tl.zeros((CHUNK, d.shape[0]), tl.float32)
    total = tl.zeros((CHUNK,), tl.float32)
    if SPLITS <= 2 * CHUNK:  # all loads can be on their way at once
        for at in tl.static_range(0, SPLITS, CHUNK):
            acc, total = _add_chunk(acc, total, out, lse, at, base, splits, d, DIM, CHUNK)
    else:
        s = tl.arange(0, SPLITS)
        live = logarithms != float("-inf")
        first = tl.min(tl.where(live, s, SPLITS), 0)
        stop = tl.max(tl.where(live, s + 1, 0), 0)
        for at in range(first // CHUNK * CHUNK, stop, CHUNK):
            acc, total = _add_chunk(acc, total, out, lse, at, base, splits, d, DIM, CHUNK)
    return tl.sum(acc, 0), tl.sum(total, 0)


@triton.jit
def _write(
    mixed, row, column, inside, columns, tiles, out, scales_out, sums_out, WIDTH: tl.constexpr,
    QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Write WIDTH columns of a row, where they are inside, from `column` on."""
    if QUANTIZED:
        steps: tl.constexpr = WIDTH // 32
        values = tl.reshape(tl.where(inside, mixed, 0.0), (steps, 32))
        step = column % 256 // 32 + tl.arange(0, steps)
        store_quantized(values, row, column // 256, step, tiles, out, scales_out, sums_out)
    else:
        target = out + row.to(tl.int64) * columns + column + tl.arange(0, WIDTH)
        tl.store(target, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["heads", "exact_splits", "packed_splits", "tiles"])
def merge_parts_kernel(
    exact, exact_lse, packed, packed_lse, first, last, gate, out, scales_out, sums_out,
    gate_part_stride, gate_row_stride, heads, exact_splits, packed_splits, tiles, root,
    DIM: tl.constexpr, WIDTH: tl.constexpr, EXACT_SPLITS: tl.constexpr,
    PACKED_SPLITS: tl.constexpr, CHUNK: tl.constexpr, ROTATED: tl.constexpr,
    GATE_PARTS: tl.constexpr, QUANTIZED: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Merge the splits of WIDTH values of a head of a row, and write them for the next product.

    See `launch.merge_parts` for what the tensors are; `first` and `last` are the signs of the
    rotation, `[WIDTH]`, and WIDTH is the smaller of DIM and 128. EXACT_SPLITS and PACKED_SPLITS are
    powers of two, at least the numbers of splits; PACKED_SPLITS and GATE_PARTS are 0 for what is
    not there. On the grid, heads beyond `heads` are zeros that fill a block of 256 columns.
    EAGER: start the next kernel, and wait for the one before (sm_90).
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * WIDTH
    head = tl.minimum(column // DIM, heads - 1)
    at = tl.arange(0, WIDTH)
    d = tl.multiple_of(column % DIM, WIDTH) + at  # loads of 16 bytes
    if EAGER:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    inside = column + at < heads * DIM
    if GATE_PARTS > 0:
        gate_at = row * gate_row_stride + column + at
        gated = load_columns(gate, gate_part_stride, gate_at, inside, GATE_PARTS)
    row_head = row.to(tl.int64) * heads + head
    place = row_head * exact_splits
    logarithms = _load_logarithms(exact_lse + place, exact_splits, EXACT_SPLITS)
    top = tl.max(logarithms, 0)
    if PACKED_SPLITS > 0:
        packed_place = row_head * packed_splits
        packed_logarithms = _load_logarithms(
            packed_lse + packed_place, packed_splits, PACKED_SPLITS
        )
        packed_top = tl.max(packed_logarithms, 0)
        top = tl.maximum(top, packed_top)
    base = tl.where(top == float("-inf"), 0.0, top)
    acc, total = _add_splits(
        exact + place * DIM, exact_lse + place, logarithms, base, exact_splits, d, DIM,
        EXACT_SPLITS, CHUNK,
    )  # fmt: skip
    if PACKED_SPLITS > 0:
        if packed_top != float("-inf"):
            packed_acc, packed_total = _add_splits(
                packed + packed_place * DIM, packed_lse + packed_place, packed_logarithms, base,
                packed_splits, d, DIM, PACKED_SPLITS, CHUNK,
            )  # fmt: skip
            if ROTATED:
                packed_acc = rotate(packed_acc, last, first, root, WIDTH)
            acc += packed_acc
            total += packed_total
    mixed = acc / tl.where(total == 0, 1.0, total)
    if GATE_PARTS > 0:
        mixed *= tl.sigmoid(gated)
    _write(
        mixed, row, column, inside, heads * DIM, tiles, out, scales_out, sums_out, WIDTH, QUANTIZED
    )
