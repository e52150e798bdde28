"""Attention over pages in plain Triton: partial results of splits, then their sum.

A program takes up to BLOCK_M query rows, all of one sequence and one key head, over the tokens of
one split. Heads are handled a quarter of their values at a time, since that is what a byte of a
packed plane yields with one shift (`kv_codec/formats.py`).
"""

import triton
import triton.language as tl

from ragflash_kernels.paged_attention.quarters import load_quarter


@triton.jit
def _query_quarter(q, row, here, quarter: tl.constexpr, scale, DIM: tl.constexpr):
    at = q + row[:, None] * DIM + quarter * (DIM // 4) + tl.arange(0, DIM // 4)[None, :]
    return (tl.load(at, mask=here[:, None], other=0.0).to(tl.float32) * scale).to(tl.float16)


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
    s = tl.dot(q2, tl.trans(x), s)
    x = load_quarter(place, token, 3, mask, N, DIM, PAGE, FORMAT, False, PTX)
    return tl.dot(q3, tl.trans(x), s)


@triton.jit
def _add_values(acc0, acc1, acc2, acc3, p, fade, place, token, mask, N: tl.constexpr,
                DIM: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr,
                PTX: tl.constexpr):  # fmt: skip
    """Return the four sums, faded, with weights `p [M, N]` times values of a page added."""
    x = load_quarter(place, token, 0, mask, N, DIM, PAGE, FORMAT, True, PTX)
    acc0 = tl.dot(p, x, acc0 * fade)
    x = load_quarter(place, token, 1, mask, N, DIM, PAGE, FORMAT, True, PTX)
    acc1 = tl.dot(p, x, acc1 * fade)
    x = load_quarter(place, token, 2, mask, N, DIM, PAGE, FORMAT, True, PTX)
    acc2 = tl.dot(p, x, acc2 * fade)
    x = load_quarter(place, token, 3, mask, N, DIM, PAGE, FORMAT, True, PTX)
    acc3 = tl.dot(p, x, acc3 * fade)
    return acc0, acc1, acc2, acc3


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


@triton.jit(do_not_specialize=["kv_heads", "group", "max_pages", "splits", "split_tokens"])
def attend_kernel(
    q, keys, values, page_table, first_rows, starts, ends, words, out, lse, scale, kv_heads, group,
    max_pages, splits, split_tokens, DIM: tl.constexpr, PAGE: tl.constexpr,
    KEY_BYTES: tl.constexpr, VALUE_BYTES: tl.constexpr, KEY_FORMAT: tl.constexpr,
    VALUE_FORMAT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Attend of M query rows to one split; see `launch.attend` for what the tensors are.

    A query row is a row and one of the `group` heads that share a key head. `scale` includes
    log2(e). N tokens at a time lie in one page. PTX: on an NVIDIA card, not interpreted.
    """
    split = tl.program_id(0)
    head = tl.program_id(1) % kv_heads
    tile = tl.program_id(1) // kv_heads
    sequence = tl.program_id(2)
    first_row = tl.load(first_rows + sequence)
    num_rows = tl.load(first_rows + sequence + 1) - first_row
    end = tl.load(ends + sequence)
    m = tile * M + tl.arange(0, M)
    here = m < num_rows * group
    row = (first_row + m // group).to(tl.int64)
    q_row = row * (kv_heads * group) + head * group + m % group
    word = tl.load(words + row, mask=here, other=0)
    start = tl.load(starts + row, mask=here, other=2147483647)
    q0 = _query_quarter(q, q_row, here, 0, scale, DIM)
    q1 = _query_quarter(q, q_row, here, 1, scale, DIM)
    q2 = _query_quarter(q, q_row, here, 2, scale, DIM)
    q3 = _query_quarter(q, q_row, here, 3, scale, DIM)
    acc0 = tl.zeros((M, DIM // 4), tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    first = tl.min(start, 0)
    stop = tl.minimum((split + 1) * split_tokens, end + num_rows)
    begin = tl.minimum(tl.maximum(split * split_tokens, first // N * N), stop)
    for at in range(begin, stop, N):
        t = at + tl.arange(0, N)
        readable = (t >= first) & (t < end + num_rows)
        # A pipelined loop loads scalars ahead, also past its end and where it has no turn at all.
        place = tl.minimum(at // PAGE, max_pages - 1)
        page = tl.load(page_table + sequence * max_pages + place).to(tl.int64)
        key_place = keys + (page * kv_heads + head) * KEY_BYTES
        s = _scores(q0, q1, q2, q3, key_place, t % PAGE, readable, N, DIM, PAGE, KEY_FORMAT, PTX)
        late = tl.maximum(tl.minimum(t - end, 31), 0)
        seen = (t < end)[None, :] | (((word[:, None] >> late[None, :]) & 1) == 1)
        seen = seen & readable[None, :] & (t[None, :] >= start[:, None])
        s = tl.where(seen, s, float("-inf"))
        raised = tl.maximum(top, tl.max(s, 1))
        base = tl.where(raised == float("-inf"), 0.0, raised)  # no token seen yet
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        top = raised
        acc0, acc1, acc2, acc3 = _add_values(
            acc0, acc1, acc2, acc3, p.to(tl.float16), fade[:, None],
            values + (page * kv_heads + head) * VALUE_BYTES, t % PAGE, readable,
            N, DIM, PAGE, VALUE_FORMAT, PTX,
        )  # fmt: skip
    target = q_row * splits + split
    _store_partial(out, lse, target, here, acc0, acc1, acc2, acc3, top, total, DIM)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(out, lse, merged, merged_lse, splits, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Merge `[rows, splits, DIM]` by base-2 logarithms of sums; no split seen gives 0."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DIM)
    s = tl.arange(0, SPLITS)
    logarithms = tl.load(lse + row * splits + s, mask=s < splits, other=float("-inf"))
    top = tl.max(logarithms, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(logarithms - base), 0)
    acc = tl.zeros((DIM,), tl.float32)
    for split in range(splits):
        weight = tl.exp2(tl.load(lse + row * splits + split) - base)
        acc += weight * tl.load(out + (row * splits + split) * DIM + d)
    seen_any = total > 0
    safe = tl.where(seen_any, total, 1.0)
    tl.store(merged + row * DIM + d, acc / safe)
    tl.store(merged_lse + row, tl.where(seen_any, base + tl.log2(safe), float("-inf")))
