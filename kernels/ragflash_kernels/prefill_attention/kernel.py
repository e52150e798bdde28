"""Plain Triton: unpacking of pages, attention of many rows, merging of its parts."""

import triton
import triton.language as tl

from ragflash_kernels.paged_attention.quarters import F16, load_quarter

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["page_list"])
def unpack_kernel(
    pages, page_list, out, page_stride, num_tokens, head_stride, SIZE: tl.constexpr,
    DIM: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr,
    VALUES: tl.constexpr, T: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Write T tokens of a listed page and a head as float16 to `[heads, …, DIM]`.

    Args:
        pages: Bytes; a head's page takes SIZE of them.
        page_list: Page numbers.
        out: Heads lie `head_stride` values apart.
        page_stride: Bytes from page to page.
        num_tokens: Of the list that hold anything; zeros are written for later ones.
        head_stride: See `out`.
        SIZE: See `pages`.
        DIM: Values of a head.
        PAGE: Tokens of a page.
        FORMAT: One of `paged_attention/quarters.py`.
        VALUES: They are values, not keys.
        T: Divides PAGE.
        PTX: On an NVIDIA card, not interpreted.
    """
    first = tl.program_id(0) * T
    head = tl.program_id(1).to(tl.int64)
    page = tl.load(page_list + first // PAGE).to(tl.int64)
    place = pages + page * page_stride + head * SIZE
    token = first + tl.arange(0, T)
    here = token < num_tokens
    target = out + head * head_stride + token[:, None].to(tl.int64) * DIM
    if FORMAT == F16:
        e = tl.arange(0, DIM)[None, :]
        halves = place.to(tl.pointer_type(tl.float16)) + (token % PAGE)[:, None] * DIM
        tl.store(target + e, tl.load(halves + e, mask=here[:, None], other=0.0))
    else:
        width: tl.constexpr = DIM // 4
        e = tl.arange(0, width)[None, :]
        for quarter in tl.static_range(4):
            values = load_quarter(
                place, token % PAGE, quarter, here, T, DIM, PAGE, FORMAT, VALUES, PTX
            )  # fmt: skip
            tl.store(target + quarter * width + e, values)


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
def _add_tokens(acc, top, total, q, keys, values, begin, stop, own, window, tokens, scale,
                DIM: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add tokens `begin … stop`, N at a time, to sums, maxima and sums of weights of M rows.

    MASKED: a row sees the tokens up to its own, the newest `window` of them; else all.
    """
    n = tl.arange(0, N)
    d = tl.arange(0, DIM)[None, :]
    for at in range(begin, stop, N):
        token = at + n
        if MASKED:
            inside = (token < tokens)[:, None]
            k = tl.load(keys + token[:, None] * DIM + d, mask=inside, other=0.0)
        else:
            k = tl.load(keys + token[:, None] * DIM + d)
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
            v = tl.load(values + token[:, None] * DIM + d, mask=inside, other=0.0)
        else:
            v = tl.load(values + token[:, None] * DIM + d)
        acc = tl.dot(p.to(tl.float16), v, acc * fade[:, None])
    return acc, top, total


@triton.jit(do_not_specialize=["rows", "tokens", "first", "window"])
def attend_kernel(
    q, keys, values, out, lse, scale, rows, tokens, first, window, heads, group,
    DIM: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Attend of M rows of a head over tokens side by side.

    Args:
        q: float16 `[rows, heads, DIM]`.
        keys: float16 `[heads / group, tokens, DIM]`.
        values: Likewise.
        out: As `q`.
        lse: float32 `[heads, rows]`: natural logarithms of the sums of weights.
        scale: Of scores, times log2(e).
        rows: Rows of `q`.
        tokens: Of a key head; a multiple of N unless CAUSAL.
        first: If CAUSAL, row r sees no token after `first + r`.
        window: If WINDOWED, the newest tokens that a row sees; else more than there are.
        heads: Of queries.
        group: Query heads of a key head.
        DIM: Values of a head.
        M: Rows of a program.
        N: Tokens of a turn.
        CAUSAL: Whether `first` counts.
        WINDOWED: Whether `window` counts; CAUSAL then.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # of causal rows the last take longest
    head = tl.program_id(1)
    row = tile * M + tl.arange(0, M)
    here = row < rows
    at = (row[:, None] * heads + head) * DIM + tl.arange(0, DIM)[None, :]
    queries = tl.load(q + at, mask=here[:, None], other=0.0)
    offset = (head // group).to(tl.int64) * tokens * DIM
    keys += offset
    values += offset
    acc = tl.zeros((M, DIM), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    newest = first + tile * M  # that the first row sees
    begin = 0
    whole = tokens
    if WINDOWED:
        begin = tl.maximum(newest - window + 1, 0) // N * N
        whole = begin
    elif CAUSAL:
        whole = (newest + 1) // N * N
    if not WINDOWED:
        acc, top, total = _add_tokens(
            acc, top, total, queries, keys, values, begin, whole, first + row, window, tokens,
            scale, DIM, N, False,
        )  # fmt: skip
    if CAUSAL:
        acc, top, total = _add_tokens(
            acc, top, total, queries, keys, values, whole, tl.minimum(newest + M, tokens),
            first + row, window, tokens, scale, DIM, N, True,
        )  # fmt: skip
    total = tl.where(here, total, 1.0)
    tl.store(out + at, (acc / total[:, None]).to(tl.float16), mask=here[:, None])
    tl.store(lse + head * rows + row, (top + tl.log2(total)) * _LN2, mask=here)


@triton.jit(do_not_specialize=["begin", "count", "rows"])
def merge_kernel(
    total, total_lse, part, lse, result, begin, count, rows, heads, DIM: tl.constexpr,
    B: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Weigh a part of attention with the total of those before it.

    Args:
        total: float32 `[rows, heads, DIM]`: of the parts before; then with this one.
        total_lse: float32 `[heads, rows]`: natural logarithms of sums of weights.
        part: float16 `[rows, heads, DIM]`.
        lse: As `total_lse`.
        result: Floats: what is written, from `begin` on, instead of the total if LAST.
        begin: Rows times heads that are left out before the first.
        count: Rows times heads.
        rows: See above.
        heads: See above.
        DIM: Values of a head.
        B: Rows times heads of a program.
        FIRST: There is no total yet.
        LAST: The total is not needed any more.
    """
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    here = i < count
    at = begin + i
    place = at % heads * rows + at // heads
    d = tl.arange(0, DIM)[None, :]
    sums = tl.load(part + at[:, None] * DIM + d, mask=here[:, None], other=0.0).to(tl.float32)
    top = tl.load(lse + place, mask=here, other=0.0)
    if not FIRST:
        before = tl.load(total_lse + place, mask=here, other=0.0)
        largest = tl.maximum(top, before)
        weight = tl.exp(top - largest)
        faded = tl.exp(before - largest)
        both = weight + faded
        top = largest + tl.log(both)
        former = tl.load(total + at[:, None] * DIM + d, mask=here[:, None], other=0.0)
        sums = former * (faded / both)[:, None] + sums * (weight / both)[:, None]
    if LAST:
        target = result + i[:, None] * DIM + d
        tl.store(target, sums.to(result.dtype.element_ty), mask=here[:, None])
    else:
        tl.store(total + at[:, None] * DIM + d, sums, mask=here[:, None])
        tl.store(total_lse + place, top, mask=here)
