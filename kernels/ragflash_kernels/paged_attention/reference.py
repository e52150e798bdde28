"""Plain torch: batched products over views of pages, without a gather.

Scores stand token-first, `[Hkv, S, rows]`, since the product of many keys with few queries is
fastest that way round; rows are taken in blocks, so that scores stay in the cache and a block
sees no token after its last row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ragflash_kernels.paged_attention import QueryRows

_ROW_BLOCK = 64  # 32 and 128 are up to a quarter slower for prefill of 512 rows


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive pages, which are one strided view: tokens `start … end - 1` of a sequence."""

    start: int
    end: int
    first_page: int
    num_pages: int

    @property
    def page_tokens(self) -> int:
        return (self.end - self.start) // self.num_pages

    def view(self, pages: torch.Tensor, head: int) -> torch.Tensor:
        """Return one head's tokens `[pages, tokens, D]`."""
        return pages[self.first_page : self.first_page + self.num_pages, head, : self.page_tokens]


def paged_attention_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sequences: Sequence["QueryRows"],
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend block by block; arguments as in `paged_attention`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    scaled = q * scale
    start = 0
    for rows in sequences:
        for first in range(0, rows.num_rows, _ROW_BLOCK):
            last = min(first + _ROW_BLOCK, rows.num_rows)
            block = slice(start + first, start + last)
            num_tokens, hidden = rows.committed + last, 0
            if window is not None:  # pages that the block's first row does not see are not read
                hidden = max(0, rows.committed + first + 1 - window)
            skipped = hidden // keys.shape[2]
            num_tokens -= skipped * keys.shape[2]
            runs = list(_runs(rows.pages[skipped:], num_tokens, keys.shape[2]))
            out[block] = _attend(scaled[block], keys, values, runs, window)
        start += rows.num_rows
    return out


def _runs(pages: Sequence[int], num_tokens: int, page_tokens: int) -> Iterator[_Run]:
    """Cut the pages of the first tokens where their numbers jump; a partial page is alone."""
    whole, partial = divmod(num_tokens, page_tokens)
    breaks = [i for i in range(1, whole) if pages[i] != pages[i - 1] + 1]
    for begin, end in pairwise([0, *breaks, whole] if whole else [0]):
        yield _Run(begin * page_tokens, end * page_tokens, pages[begin], end - begin)
    if partial:
        yield _Run(whole * page_tokens, num_tokens, pages[whole], 1)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    runs: list[_Run],
    window: int | None,
) -> torch.Tensor:
    """Return the attention of `q`, whose last row sees `runs` up to their end."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    grouped = q.view(num_rows, num_kv_heads, group, head_dim)
    queries = grouped.permute(1, 3, 0, 2).reshape(num_kv_heads, head_dim, -1)  # [Hkv, D, rows]
    scores = _scores(queries, keys, runs)
    if num_rows > 1:
        row = torch.arange(num_rows, device=q.device)
        hidden = (row[:, None] > row).repeat_interleave(group, dim=1)
        scores[:, -num_rows:].masked_fill_(hidden, float("-inf"))
    if window is not None:
        _hide_old(scores, num_rows, group, window)
    weights = scores.softmax(dim=1, dtype=torch.float32).to(q.dtype)
    mixed = _mix(weights, values, runs).view(num_kv_heads, num_rows, group, head_dim)
    return mixed.transpose(0, 1).reshape(num_rows, num_heads, head_dim)


def _hide_old(scores: torch.Tensor, num_rows: int, group: int, window: int) -> None:
    """Mask in `[Hkv, S, rows]` what lies `window` tokens or more before a row's own token."""
    num_tokens = scores.shape[1]
    first_seen = torch.arange(num_tokens - num_rows, num_tokens, device=scores.device) - window + 1
    num_affected = max(0, num_tokens - window)
    token = torch.arange(num_affected, device=scores.device)
    hidden = (token[:, None] < first_seen).repeat_interleave(group, dim=1)
    scores[:, :num_affected].masked_fill_(hidden, float("-inf"))


def _scores(queries: torch.Tensor, keys: torch.Tensor, runs: list[_Run]) -> torch.Tensor:
    """Return `[Hkv, S, rows]`: one product over heads for a single page, over pages for more."""
    num_kv_heads, _, num_rows = queries.shape
    scores = queries.new_empty(num_kv_heads, runs[-1].end, num_rows)
    for run in runs:
        if run.num_pages == 1:
            k = keys[run.first_page, :, : run.page_tokens]
            scores[:, run.start : run.end] = torch.bmm(k, queries)
            continue
        for head in range(num_kv_heads):
            k = run.view(keys, head)
            products = scores[head, run.start : run.end].view(*k.shape[:2], num_rows)
            torch.bmm(k, queries[head].expand(len(k), -1, -1), out=products)
    return scores


def _mix(weights: torch.Tensor, values: torch.Tensor, runs: list[_Run]) -> torch.Tensor:
    """Return the weighted sums of values, float32 `[Hkv, rows, D]`, by the same products."""
    num_kv_heads, _, num_rows = weights.shape
    mixed = torch.zeros(
        (num_kv_heads, num_rows, values.shape[3]), dtype=torch.float32, device=weights.device
    )
    for run in runs:
        if run.num_pages == 1:
            shares = weights[:, run.start : run.end].transpose(1, 2)
            mixed += torch.bmm(shares, values[run.first_page, :, : run.page_tokens])
            continue
        for head in range(num_kv_heads):
            v = run.view(values, head)
            shares = weights[head, run.start : run.end].view(*v.shape[:2], num_rows)
            mixed[head] += torch.bmm(shares.transpose(1, 2), v).sum(dim=0, dtype=torch.float32)
    return mixed
