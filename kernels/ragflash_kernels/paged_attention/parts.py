"""Attention over the two parts of a cache: what is there, and its plain torch."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ragflash_kernels.kv_codec import KvFormat, decode_pages
from ragflash_kernels.paged_attention.visibility import Visibility

_MOST_SPLITS = 64  # many splits cost more to merge than they gain
_SMALLEST_SPLIT = 128
_SMALLEST_EXACT_SPLIT = 256  # a page, so that one look-up is enough
_LAST_BIT = 31  # of a visibility word


@dataclass(frozen=True)
class KvPart:
    """Pages of one form, and which of their tokens rows see.

    Attributes:
        keys: float16 `[P, Hkv, T, D]` for `F16`, else bytes `[P, Hkv, size]` as `encode_pages`
            lays them out. A page is contiguous, pages may lie apart.
        values: Likewise.
        visibility: Of the rows.
        key_format: Of `keys`.
        value_format: Of `values`.
        split_tokens: Tokens that are attended to at a time, a power of two, at least 32; None
            for what suits `visibility.max_tokens`. It decides the order of sums.
    """

    keys: Tensor
    values: Tensor
    visibility: Visibility
    key_format: KvFormat = KvFormat.F16
    value_format: KvFormat = KvFormat.F16
    split_tokens: int | None = None

    @property
    def formats(self) -> tuple[KvFormat, KvFormat]:
        """Of keys and values."""
        return self.key_format, self.value_format

    def pick_splits(self) -> tuple[int, int]:
        """Return how many splits there are, at most 64 unless told, and how long they are."""
        exact = self.key_format is KvFormat.F16
        split = self.split_tokens or (_SMALLEST_EXACT_SPLIT if exact else _SMALLEST_SPLIT)
        if self.split_tokens is None:
            while split * _MOST_SPLITS < self.visibility.max_tokens:
                split *= 2
        return -(-self.visibility.max_tokens // split), split

    def pick_shares(self) -> tuple[int, int]:
        """Return likewise where a sequence's tokens are shared evenly: their least length."""
        least = self.split_tokens or _SMALLEST_SPLIT
        splits = -(-self.visibility.max_tokens // least)
        return splits if self.split_tokens else min(splits, _MOST_SPLITS), least


def attend_parts_reference(
    q: Tensor, parts: list[KvPart], scale: float, page_tokens: int
) -> Tensor:
    """Return the mixtures, float32 `[N, Hq, D]`, row by row; rows of no sequence are zero."""
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    first_rows = parts[0].visibility.first_rows.tolist()
    group = q.shape[1] // parts[0].keys.shape[1]
    for sequence, (first, stop) in enumerate(pairwise(first_rows)):
        if first == stop:
            continue
        tokens = [_tokens(part, sequence, page_tokens, q.shape[2]) for part in parts]
        keys, values = (torch.cat(same, 1) for same in zip(*tokens, strict=True))
        for row in range(first, stop):
            seen = torch.cat([_seen(part, sequence, row, page_tokens) for part in parts])
            if not seen.any():
                continue
            k, v = (x[:, seen].repeat_interleave(group, 0) for x in (keys, values))
            scores = (k @ q[row].float()[:, :, None]).mul_(scale)  # [Hq, S, 1]
            out[row] = (scores.softmax(1) * v).sum(1)
    return out


def _tokens(part: KvPart, sequence: int, page_tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return all keys and values of a sequence's pages, float32 `[Hkv, S, D]`."""
    table = part.visibility.page_table[sequence].long()
    found = []
    kinds = zip((part.keys, part.values), part.formats, (False, True), strict=True)
    for pages, kv_format, values in kinds:
        own = pages[table]
        if kv_format is not KvFormat.F16:
            own = decode_pages(
                own, kv_format, page_tokens=page_tokens, head_dim=head_dim, values=values
            )
        found.append(own.float().transpose(0, 1).flatten(1, 2))
    return found[0], found[1]


def _seen(part: KvPart, sequence: int, row: int, page_tokens: int) -> Tensor:
    """Return which of a sequence's tokens a row sees, bool `[S]`."""
    visibility = part.visibility
    token = torch.arange(visibility.page_table.shape[1] * page_tokens, device=part.keys.device)
    end = visibility.ends[sequence]
    seen = token < end
    if visibility.words is not None:
        rows = visibility.first_rows[sequence + 1] - visibility.first_rows[sequence]
        late = (token - end).clamp(0, _LAST_BIT)
        drafted = ((visibility.words[row] >> late) & 1).bool() & (token < end + rows)
        seen = seen | drafted
    return seen & (token >= visibility.starts[row])
