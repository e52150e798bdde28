"""Plain torch: products over views of pages, without a gather.

How a sum is cut decides its last bits, so it is cut where pages end, wherever they lie: a prompt
whose pages are scattered is computed as one whose pages are in a row. Rows are taken in blocks, so
that scores stay in the cache and a block reads no token that none of its rows sees.

On a CPU that is torch's attention with pages as its batch, whose results are then weighed by their
sums of exponentials. Its threads have a buffer each, side by side; the last bits of a page depend
on how its thread's is aligned, so several rows are filled up to a number at which all are alike. A
row alone costs less on one thread than filled up. Windows that hide tokens, half precision and
cards have products of their own here. Their scores stand token-first, `[Hkv, S, rows]`, since the
product of many keys with few queries is fastest that way round.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ragflash_kernels.parents import ancestors, depths

if TYPE_CHECKING:
    from ragflash_kernels.paged_attention import QueryRows

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ALIKE_ROWS = 8  # so many rows of scores and mixture are whole lines of the processor's cache
_ROW_BLOCK = 64  # 32 and 128 are up to a quarter slower for prefill of 512 rows


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive pages, and the places in each of them: one strided view of tokens in order."""

    pages: slice
    places: slice

    @property
    def num_pages(self) -> int:
        return int(self.pages.stop - self.pages.start)

    @property
    def num_tokens(self) -> int:
        return self.num_pages * int(self.places.stop - self.places.start)


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows `first … last - 1` of a sequence, and which of its tokens they see."""

    rows: "QueryRows"
    first: int
    last: int
    window: int | None

    @property
    def depths(self) -> Sequence[int]:
        """How many rows come before each on its path."""
        if self.rows.parents is None:
            return range(self.first, self.last)
        return depths(self.rows.parents, self.rows.num_rows)[self.first : self.last]

    @property
    def begin(self) -> int:
        """First token that any row sees."""
        if self.window is None:
            return 0
        return max(0, self.rows.committed + min(self.depths) + 1 - self.window)

    @property
    def is_windowed(self) -> bool:
        """Whether a row does not see the first token."""
        return self.window is not None and max(self.oldest()) + self.begin > 0

    @property
    def num_common(self) -> int:
        """Tokens before all rows."""
        return self.rows.committed + (self.first if self.rows.parents is None else 0)

    def hidden(self) -> torch.Tensor:
        """Return `[rows, last tokens]`, which of the last tokens are on no path to a row."""
        parents = self.rows.parents
        if parents is None:
            order = torch.arange(self.last - self.first)
            return order[:, None] < order
        hidden = ~ancestors(parents)[self.first : self.last, : self.last]
        if self.window is not None:
            tokens = torch.tensor(depths(parents, self.rows.num_rows)[: self.last])
            hidden |= tokens <= torch.tensor(self.depths)[:, None] - self.window
        return hidden[:, max(0, self.begin - self.rows.committed) :]

    def oldest(self) -> list[int]:
        """Return the first token that a window shows each row, counted from `begin`."""
        assert self.window is not None
        start = self.rows.committed + 1 - self.window - self.begin
        return [start + depth for depth in self.depths]


def paged_attention_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sequences: Sequence["QueryRows"],
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend block by block; arguments as in `paged_attention`."""
    mixed = []
    start = 0
    for rows in sequences:
        for first in range(0, rows.num_rows, _ROW_BLOCK):
            last = min(first + _ROW_BLOCK, rows.num_rows)
            at, block = slice(start + first, start + last), _Block(rows, first, last, window)
            runs = _runs(rows.pages, block.begin, rows.committed + last, keys.shape[2])
            if rows.num_rows == 1 and q.is_cpu:
                mixed.append(_attend_alone(q[at], keys, values, runs, scale))
            elif q.is_cpu and q.dtype == torch.float32 and not block.is_windowed:
                mixed.append(_attend_together(q[at], keys, values, block, scale))
            else:
                mixed.append(_attend(q[at] * scale, keys, values, runs, block))
        start += rows.num_rows
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


@lru_cache(maxsize=64)  # all layers of a step ask the same
def _runs(pages: tuple[int, ...], begin: int, end: int, page_tokens: int) -> tuple[_Run, ...]:
    """Say where tokens `begin … end - 1` are; a partial page is alone."""
    runs: list[_Run] = []
    whole = slice(0, page_tokens)
    for index in range(begin // page_tokens, -(-end // page_tokens)):
        first, page = index * page_tokens, pages[index]
        places = slice(max(begin - first, 0), min(end - first, page_tokens))
        if runs and places == whole == runs[-1].places and runs[-1].pages.stop == page:
            runs[-1] = _Run(slice(runs[-1].pages.start, page + 1), whole)
        else:
            runs.append(_Run(slice(page, page + 1), places))
    return tuple(runs)


def _attend_alone(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    runs: Sequence[_Run],
    scale: float,
) -> torch.Tensor:
    """Return `[1, Hq, D]`, what one row of that shape mixes from all tokens of `runs`."""
    grouped = q.reshape(1, keys.shape[1], -1, q.shape[2])
    with _one_thread():
        parts = [_mix_pages(grouped, keys, values, run, scale) for run in runs]
    return _joined(parts).to(q.dtype).reshape(q.shape)


def _attend_together(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: _Block,
    scale: float,
) -> torch.Tensor:
    """Return `[rows, Hq, D]`, what the rows of a block mix of what they see.

    Pages that all rows see whole are a batch; the tokens behind them, some of them hidden from
    some rows, are one part, so that each row sees something of it.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    grouped = q.view(num_rows, num_kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)[None]
    padding = -(num_rows * group) % _ALIKE_ROWS
    if padding:
        grouped = functional.pad(grouped, (0, 0, 0, padding))
    pages, page_tokens = block.rows.pages, keys.shape[2]
    edge = block.num_common // page_tokens * page_tokens
    whole = _runs(pages, 0, edge, page_tokens)
    rest = _runs(pages, edge, block.rows.committed + block.last, page_tokens)
    parts = [_mix_pages(grouped, keys, values, run, scale) for run in whole]
    last_keys, last_values = (_side_by_side(pool, rest) for pool in (keys, values))
    mask = _mask(block, last_keys.shape[2], group, padding)
    parts.append(_flash(grouped, last_keys, last_values, scale=scale, attn_mask=mask))
    mixed = _joined(parts)[:, : num_rows * group]
    return mixed.view(num_kv_heads, num_rows, group, head_dim).transpose(0, 1).reshape(q.shape)


def _side_by_side(pool: torch.Tensor, runs: Sequence[_Run]) -> torch.Tensor:
    """Return `[1, Hkv, tokens, D]`."""
    pages = [*_by_page(pool, runs)]
    return (pages[0] if len(pages) == 1 else torch.cat(pages, dim=1))[None]


@lru_cache(maxsize=8)  # all layers of a step ask the same
def _mask(block: _Block, num_tokens: int, group: int, padding: int) -> torch.Tensor:
    """Return `[1, 1, rows · group + padding, tokens]`: -inf for what is hidden, else 0."""
    hidden = functional.pad(block.hidden().repeat_interleave(group, dim=0), (0, 0, 0, padding))
    mask = torch.zeros(len(hidden), num_tokens)
    mask[:, -hidden.shape[1] :].masked_fill_(hidden, float("-inf"))
    return mask[None, None]


def _mix_pages(
    grouped: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, run: _Run, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with `[1, Hkv, rows, D]` to each page; see `_joined` for what it gives."""
    mixed: tuple[torch.Tensor, torch.Tensor] = _flash(
        grouped.expand(run.num_pages, -1, -1, -1),
        keys[run.pages, :, run.places],
        values[run.pages, :, run.places],
        scale=scale,
    )
    return mixed


def _joined(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return `[Hkv, rows, D]` of mixtures `[pages, Hkv, rows, D]` and sums of exponentials.

    A softmax over each page, then over their sums, is a softmax over all (Dao et al. 2022,
    arXiv:2205.14135).
    """
    mixed, sums = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    if len(mixed) == 1:
        return mixed[0]
    return (mixed * sums.softmax(dim=0).unsqueeze(-1)).sum(dim=0)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Have torch compute on the calling thread alone."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    runs: Sequence[_Run],
    block: _Block,
) -> torch.Tensor:
    """Return the attention of `q`, the rows of a block, to what they see of `runs`."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    grouped = q.view(num_rows, num_kv_heads, group, head_dim)
    queries = grouped.permute(1, 3, 0, 2).reshape(num_kv_heads, head_dim, -1)  # [Hkv, D, rows]
    scores = _scores(queries, keys, runs)
    if num_rows > 1 or block.rows.parents is not None:
        hidden = block.hidden().t().to(q.device).repeat_interleave(group, dim=1)
        scores[:, -len(hidden) :].masked_fill_(hidden, float("-inf"))
    if block.window is not None:
        _hide_old(scores, block.oldest(), group)
    if scores.dtype == torch.float32:  # in place: scores of a long text are tens of megabytes
        weights = torch.softmax(scores, dim=1, out=scores)
    else:
        weights = scores.softmax(dim=1, dtype=torch.float32).to(q.dtype)
    mixed = _mix(weights, values, runs).view(num_kv_heads, num_rows, group, head_dim)
    return mixed.transpose(0, 1).reshape(q.shape).to(q.dtype)


def _hide_old(scores: torch.Tensor, oldest: Sequence[int], group: int) -> None:
    """Mask in `[Hkv, S, rows]` the tokens before the oldest one that each row sees."""
    num_affected = max(0, *oldest)
    token = torch.arange(num_affected, device=scores.device)
    first_seen = torch.tensor(oldest, device=scores.device)
    hidden = (token[:, None] < first_seen).repeat_interleave(group, dim=1)
    scores[:, :num_affected].masked_fill_(hidden, float("-inf"))


def _scores(queries: torch.Tensor, keys: torch.Tensor, runs: Sequence[_Run]) -> torch.Tensor:
    """Return `[Hkv, S, rows]`."""
    num_kv_heads, _, num_rows = queries.shape
    num_tokens = sum(run.num_tokens for run in runs)
    scores = queries.new_empty(num_kv_heads, num_tokens, num_rows)
    start = 0
    for k in _by_page(keys, runs):
        end = start + k.shape[1]
        scores[:, start:end] = torch.bmm(k, queries)
        start = end
    return scores


def _mix(weights: torch.Tensor, values: torch.Tensor, runs: Sequence[_Run]) -> torch.Tensor:
    """Return the weighted sums of values, float32 `[Hkv, rows, D]`."""
    num_kv_heads, _, num_rows = weights.shape
    mixed = torch.zeros(
        (num_kv_heads, num_rows, values.shape[3]), dtype=torch.float32, device=weights.device
    )
    start = 0
    for v in _by_page(values, runs):
        end = start + v.shape[1]
        mixed += torch.bmm(weights[:, start:end].transpose(1, 2), v)
        start = end
    return mixed


def _by_page(pool: torch.Tensor, runs: Sequence[_Run]) -> Iterator[torch.Tensor]:
    """Go through what pages hold of a sequence, `[Hkv, tokens, D]` each."""
    for run in runs:
        yield from pool[run.pages, :, run.places]
