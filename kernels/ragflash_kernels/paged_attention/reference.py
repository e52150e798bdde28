"""Plain torch: two batched products a head, over views of consecutive pages, without a gather.

Scores stand token-first, `[S, rows]`, since the product of many keys with few queries is fastest
that way round; rows are taken in blocks, so that scores stay in the cache and a block sees no
token after its last row.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ragflash_kernels.paged_attention import QueryRows

_ROW_BLOCK = 64  # 32 and 128 are up to a quarter slower for prefill of 512 rows


def paged_attention_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sequences: Sequence["QueryRows"],
    scale: float,
) -> torch.Tensor:
    """Attend block by block; arguments as in `paged_attention`."""
    out = torch.empty_like(q)
    scaled = q * scale
    start = 0
    for rows in sequences:
        for first in range(0, rows.num_rows, _ROW_BLOCK):
            last = min(first + _ROW_BLOCK, rows.num_rows)
            block = slice(start + first, start + last)
            runs = list(_runs(rows.pages, rows.committed + last, keys.shape[2]))
            _attend(scaled[block], keys, values, runs, out[block])
        start += rows.num_rows
    return out


def _runs(
    pages: Sequence[int], num_tokens: int, page_tokens: int
) -> Iterator[tuple[int, int, int]]:
    """Yield `(first page, pages, tokens a page)` of stretches that are one strided view."""
    whole, partial = divmod(num_tokens, page_tokens)
    breaks = [i for i in range(1, whole) if pages[i] != pages[i - 1] + 1]
    for begin, end in pairwise([0, *breaks, whole] if whole else [0]):
        yield pages[begin], end - begin, page_tokens
    if partial:
        yield pages[whole], 1, partial


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    runs: list[tuple[int, int, int]],
    out: torch.Tensor,
) -> None:
    """Write the attention of `q`, whose last row sees every token of `runs`, to `out`."""
    num_rows, num_heads, head_dim = q.shape
    group = num_heads // keys.shape[1]
    num_tokens = sum(count * tokens for _, count, tokens in runs)
    scores = q.new_empty(num_tokens, num_rows * group)
    row = torch.arange(num_rows, device=q.device)
    hidden = (row[:, None] > row).repeat_interleave(group, dim=1)  # [token, row · group]
    for head in range(keys.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        queries = q[:, heads].reshape(-1, head_dim).t()
        for tokens, k in _views(keys[:, head], runs):
            products = scores[tokens].view(*k.shape[:2], -1)
            torch.bmm(k, queries.expand(len(k), -1, -1), out=products)
        scores[-num_rows:].masked_fill_(hidden, float("-inf"))
        weights = scores.softmax(dim=0, dtype=torch.float32).to(q.dtype)
        mixed = q.new_zeros((num_rows * group, head_dim), dtype=torch.float32)
        for tokens, v in _views(values[:, head], runs):
            shares = weights[tokens].view(*v.shape[:2], -1)
            mixed += torch.bmm(shares.transpose(1, 2), v).sum(dim=0, dtype=torch.float32)
        out[:, heads] = mixed.view(num_rows, group, head_dim)


def _views(
    pages: torch.Tensor, runs: list[tuple[int, int, int]]
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the token range and the view `[pages, tokens, D]` of each run."""
    start = 0
    for page, count, tokens in runs:
        end = start + count * tokens
        yield slice(start, end), pages[page : page + count, :tokens]
        start = end
