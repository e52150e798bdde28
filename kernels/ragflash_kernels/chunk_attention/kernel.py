"""Plain Triton."""

import triton
import triton.language as tl

from ragflash_kernels.prefill_attention.kernel import add_tokens


@triton.jit(do_not_specialize=["num_rows", "window"])
def chunk_attention_kernel(
    q, keys, values, pages, counts, out, scale, page_stride, num_rows, window, heads, group,
    PAGE: tl.constexpr, DIM: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Attend of M rows of a head, to N tokens at a time.

    Arguments as in `chunk_attention`; queries and `out` are `[num_rows, heads, DIM]`. `scale`
    includes log2(e).
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows take longest
    head = tl.program_id(1)
    before = tl.load(counts)
    rows = tl.load(counts + 1)
    row = tile * M + tl.arange(0, M)
    here = (row < rows)[:, None]
    at = (row[:, None] * heads + head) * DIM + tl.arange(0, DIM)[None, :]
    queries = tl.load(q + at, mask=here, other=0.0)
    offset = head // group * (PAGE * DIM)
    keys += offset
    values += offset
    acc = tl.zeros((M, DIM), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    newest = before + tile * M  # that the first row sees
    tokens = before + rows
    stop = tl.where(tile * M < rows, tl.minimum(newest + M, tokens), 0)
    if WINDOWED:
        whole = tl.maximum(newest - window + 1, 0) // N * N
    else:
        whole = tl.minimum((newest + 1) // N * N, stop)
        acc, top, total = add_tokens(
            acc, top, total, queries, keys, values, pages, page_stride, 0, whole, before + row,
            window, tokens, scale, PAGE, DIM, N, False,
        )  # fmt: skip
    acc, top, total = add_tokens(
        acc, top, total, queries, keys, values, pages, page_stride, whole, stop, before + row,
        window, tokens, scale, PAGE, DIM, N, True,
    )  # fmt: skip
    total = tl.where(row < rows, total, 1.0)
    result = tl.where(here, acc / total[:, None], 0.0)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=(row < num_rows)[:, None])
