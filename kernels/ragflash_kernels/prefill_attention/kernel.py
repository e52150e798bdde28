"""Plain Triton: attention of many rows over tokens side by side, and merging of its parts."""

import triton
import triton.language as tl

from ragflash_kernels.columns_kernel import load_columns

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["front", "num_rows"])
def pad_kernel(q, out, front, num_rows, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy floats `[num_rows, WIDTH]` to float16 after `front` rows of zeros, zeros after them.

    Rows of `q` lie `row_stride` values apart.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = (row >= front) & (row < front + num_rows) & (at < WIDTH)
    values = tl.load(q + (row - front) * row_stride + at, mask=here, other=0.0)
    tl.store(out + row * WIDTH + at, values.to(tl.float16), mask=at < WIDTH)


@triton.jit
def add_tokens(acc, top, total, q, keys, values, pages, page_stride, begin, stop, own, window,
               tokens, scale, PAGE: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr,
               MASKED: tl.constexpr):  # fmt: skip
    """Add tokens `begin … stop`, N at a time, to sums, maxima and sums of weights of M rows.

    Tokens lie side by side, or with PAGE in `pages` of so many, a multiple of N. MASKED: a row sees
    the tokens up to its own, the newest `window` of them; else all.
    """
    n = tl.arange(0, N)
    d = tl.arange(0, DIM)[None, :]
    for at in range(begin, stop, N):
        token = at + n
        if PAGE > 0:
            start = tl.load(pages + at // PAGE).to(tl.int64) * page_stride
            place = start + (at % PAGE + n)[:, None] * DIM + d
        else:
            place = token[:, None] * DIM + d
        if MASKED:
            inside = (token < tokens)[:, None]
            k = tl.load(keys + place, mask=inside, other=0.0)
        else:
            k = tl.load(keys + place)
        s = tl.dot(q, tl.trans(k)) * scale
        if MASKED:
            seen = (token[None, :] <= own[:, None]) & (token[None, :] > own[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
        raised = tl.maximum(top, tl.max(s, 1))
        base = tl.where(raised == float("-inf"), 0.0, raised) if MASKED else raised
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        top = raised
        if MASKED:
            v = tl.load(values + place, mask=inside, other=0.0)
        else:
            v = tl.load(values + place)
        acc = tl.dot(p.to(tl.float16), v, acc * fade[:, None])
    return acc, top, total


@triton.jit(do_not_specialize=["rows", "tokens", "first", "window"])
def attend_kernel(
    q, keys, values, out, lse, scale, rows, tokens, first, window, heads, group,
    DIM: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Attend of M rows of a head to tokens side by side, N at a time.

    Queries and `out` are float16 `[rows, heads, DIM]`, keys and values `[heads / group, tokens,
    DIM]`, `lse` float32 `[heads, rows]` natural logarithms of the sums of weights. `scale` includes
    log2(e). CAUSAL: row r sees no token after `first + r`, and if WINDOWED the newest `window` of
    those, which else is more than there are. Not CAUSAL: the third axis of the grid splits the
    tokens into multiples of N, each with an `out` and `lse` of its own.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # of causal rows the last take longest
    head = tl.program_id(1)
    row = tile * M + tl.arange(0, M)
    here = row < rows
    at = (row[:, None] * heads + head) * DIM + tl.arange(0, DIM)[None, :]
    queries = tl.load(q + at, mask=here[:, None], other=0.0)
    split = tl.program_id(2)
    out += split.to(tl.int64) * rows * heads * DIM
    lse += split * rows * heads
    offset = (head // group).to(tl.int64) * tokens * DIM
    keys += offset
    values += offset
    acc = tl.zeros((M, DIM), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    newest = first + tile * M  # that the first row sees
    begin = split * (tokens // tl.num_programs(2))
    whole = begin + tokens // tl.num_programs(2)
    if WINDOWED:
        begin = tl.maximum(newest - window + 1, 0) // N * N
        whole = begin
    elif CAUSAL:
        whole = (newest + 1) // N * N
    if not WINDOWED:
        acc, top, total = add_tokens(
            acc, top, total, queries, keys, values, keys, 0, begin, whole, first + row, window,
            tokens, scale, 0, DIM, N, False,
        )  # fmt: skip
    if CAUSAL:
        acc, top, total = add_tokens(
            acc, top, total, queries, keys, values, keys, 0, whole,
            tl.minimum(newest + M, tokens), first + row, window, tokens, scale, 0, DIM, N, True,
        )  # fmt: skip
    total = tl.where(here, total, 1.0)
    tl.store(out + at, (acc / total[:, None]).to(tl.float16), mask=here[:, None])
    tl.store(lse + head * rows + row, (top + tl.log2(total)) * _LN2, mask=here)


@triton.jit
def _add_part(sums, whole, top, part, lse, place, at, here):
    """Add a part's weighted means to sums, which are weighed by `exp(… - top)`."""
    weight = tl.exp(tl.load(lse + place, mask=here, other=0.0) - top)
    means = tl.load(part + at, mask=here[:, None], other=0.0).to(tl.float32)
    return sums + means * weight[:, None], whole + weight


@triton.jit(do_not_specialize=["begin", "count", "rows"])
def merge_kernel(
    total, total_lse, part0, lse0, part1, lse1, part2, lse2, part3, lse3, result, gate, begin,
    count, rows, heads, gate_row_stride, gate_part_stride, DIM: tl.constexpr, B: tl.constexpr,
    PARTS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, GATE_PARTS: tl.constexpr,
):  # fmt: skip
    """Merge PARTS (up to four) parts of attention, in order, with the total of those before them.

    The total is float32 `[rows, heads, DIM]`, a part float16; each has natural logarithms of its
    sums of weights, float32 `[heads, rows]`. FIRST: there is no total yet. LAST: not the total but
    `result` is written, times the sigmoid of `gate` (`Columns` of GATE_PARTS, or 0). B rows times
    heads are a program's; of all, `count` are wanted from `begin` on.
    """
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    here = i < count
    place = (begin + i) % heads * rows + (begin + i) // heads
    d = tl.arange(0, DIM)[None, :]
    at = (begin + i)[:, None] * DIM + d
    top = tl.load(lse0 + place, mask=here, other=0.0)
    if PARTS > 1:
        top = tl.maximum(top, tl.load(lse1 + place, mask=here, other=0.0))
    if PARTS > 2:
        top = tl.maximum(top, tl.load(lse2 + place, mask=here, other=0.0))
    if PARTS > 3:
        top = tl.maximum(top, tl.load(lse3 + place, mask=here, other=0.0))
    sums = tl.zeros((B, DIM), tl.float32)
    whole = tl.zeros((B,), tl.float32)
    if not FIRST:
        top = tl.maximum(top, tl.load(total_lse + place, mask=here, other=0.0))
        sums, whole = _add_part(sums, whole, top, total, total_lse, place, at, here)
    sums, whole = _add_part(sums, whole, top, part0, lse0, place, at, here)
    if PARTS > 1:
        sums, whole = _add_part(sums, whole, top, part1, lse1, place, at, here)
    if PARTS > 2:
        sums, whole = _add_part(sums, whole, top, part2, lse2, place, at, here)
    if PARTS > 3:
        sums, whole = _add_part(sums, whole, top, part3, lse3, place, at, here)
    sums /= whole[:, None]
    if LAST:
        if GATE_PARTS > 0:
            gate_at = (i // heads * gate_row_stride + i % heads * DIM)[:, None] + d
            sums *= tl.sigmoid(
                load_columns(gate, gate_part_stride, gate_at, here[:, None], GATE_PARTS)
            )
        target = result + i[:, None] * DIM + d
        tl.store(target, sums.to(result.dtype.element_ty), mask=here[:, None])
    else:
        tl.store(total + at, sums, mask=here[:, None])
        tl.store(total_lse + place, top + tl.log(whole), mask=here)
