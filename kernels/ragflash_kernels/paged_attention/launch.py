"""Grids and arguments of the kernels, and what a step tells them, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import e, log2
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.kv_codec import KvFormat, page_layout, rotate
from ragflash_kernels.paged_attention.kernel import attend_kernel, merge_kernel

if TYPE_CHECKING:
    from ragflash_kernels.paged_attention import QueryRows

MAX_ROWS = 32  # of a sequence: bits of a visibility word
SPLIT_TOKENS = 1024
MIN_TOKENS = 32  # of a page or a split
_FORMATS = tuple(KvFormat)  # as `kernel.py` numbers them


@dataclass(frozen=True)
class Visibility:
    """Which tokens rows see: int32 tensors on the device, so that a graph can be replayed.

    Of its sequence a row sees the tokens before the end, and token `end + i` for each set bit i of
    its word, unless they are before its start: a chain of drafts has words 1, 3, 7 …, a tree any.

    Attributes:
        page_table: `[S, pages]`: page numbers, of sequence s in row s.
        first_rows: `[S + 1]`: the first query row of each sequence, then the number of rows.
        starts: `[rows]`.
        ends: `[S]`.
        words: `[rows]`.
        max_rows: Rows of the largest sequence, or more.
        max_tokens: Tokens that a row may see, or more.
    """

    page_table: Tensor
    first_rows: Tensor
    starts: Tensor
    ends: Tensor
    words: Tensor
    max_rows: int
    max_tokens: int

    @classmethod
    def causal(
        cls, sequences: "Sequence[QueryRows]", device: torch.device, window: int | None = None
    ) -> "Visibility":
        """Return what rows one after the other see; of a window, the newest tokens only.

        Raises:
            KernelInputError: A sequence has more than `MAX_ROWS` rows.
        """
        most = max(rows.num_rows for rows in sequences)
        if most > MAX_ROWS:
            raise KernelInputError(f"{most} rows of a sequence; {MAX_ROWS} at most")
        pages = max(len(rows.pages) for rows in sequences)
        table = [[*rows.pages, *[0] * (pages - len(rows.pages))] for rows in sequences]
        first_rows = [0]
        words: list[int] = []
        starts: list[int] = []
        for rows in sequences:
            first_rows.append(first_rows[-1] + rows.num_rows)
            words += [(1 << r + 1) - 1 for r in range(rows.num_rows)]
            newest = range(rows.committed + 1, rows.committed + rows.num_rows + 1)
            starts += [0 if window is None else max(0, seen - window) for seen in newest]
        signed = [word - (word >> 31 << 32) for word in words]

        def whole(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return cls(
            whole(table),
            whole(first_rows),
            whole(starts),
            whole([rows.committed for rows in sequences]),
            whole(signed),
            most,
            max(rows.committed + rows.num_rows for rows in sequences),
        )


def paged_attention_triton(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visibility: Visibility,
    *,
    page_tokens: int,
    scale: float,
    key_format: KvFormat = KvFormat.F16,
    value_format: KvFormat = KvFormat.F16,
    split_tokens: int = SPLIT_TOKENS,
) -> Tensor:
    """Attend, head by head; arguments as in `attend`. Queries and sums are rotated as needed."""
    if key_format.rotated:
        q = rotate(q)
    merged, _ = attend(
        q, keys, values, visibility, page_tokens=page_tokens, scale=scale, key_format=key_format,
        value_format=value_format, split_tokens=split_tokens,
    )  # fmt: skip
    return rotate(merged, inverse=True) if value_format.rotated else merged


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visibility: Visibility,
    *,
    page_tokens: int,
    scale: float,
    key_format: KvFormat = KvFormat.F16,
    value_format: KvFormat = KvFormat.F16,
    split_tokens: int = SPLIT_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Attend in the space that keys and values are stored in.

    Sums are taken over splits of a fixed number of tokens, in order, so a row's result depends
    neither on other rows nor on how long other sequences are.

    Args:
        q: Floats `[rows, Hq, D]`, contiguous; rotated if `key_format` is. D is 64, 128 or 256.
        keys: Bytes `[P, Hkv, size]`, or float16 `[P, Hkv, page_tokens, D]`, contiguous.
        values: Likewise.
        visibility: Of the rows.
        page_tokens: A power of two, at least 32.
        scale: Of scores.
        key_format: Of `keys`.
        value_format: Of `values`.
        split_tokens: A power of two, at least 32.

    Returns:
        Weighted means of values, float32 `[rows, Hq, D]`, and base-2 logarithms of the sums of
        weights, `[rows, Hq]`; 0 and -inf for a row that sees nothing.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    _check(q, keys, values, (key_format, value_format), page_tokens)
    if visibility.max_rows > MAX_ROWS or not _is_tokens(split_tokens):
        raise KernelInputError(
            f"{visibility.max_rows} rows of a sequence, splits of {split_tokens} tokens"
        )
    tile = pick_tile(
        key_format, q.shape[2], visibility.max_rows * q.shape[1] // keys.shape[1],
        min(page_tokens, split_tokens), large=_is_large(q.device),
    )  # fmt: skip
    formats = (key_format, value_format)
    return _merge(
        *_attend_splits(
            q, keys, values, visibility, page_tokens, scale, formats, split_tokens, tile
        )
    )


@dataclass(frozen=True)
class Tile:
    """What a program works on at a time."""

    query_rows: int
    tokens: int
    warps: int


def pick_tile(
    kv_format: KvFormat, head_dim: int, query_rows: int, tokens: int, *, large: bool
) -> Tile:
    """Return the fastest tile found on an H200 for so many query rows of a key head.

    Args:
        kv_format: Of keys.
        head_dim: Values of a head.
        query_rows: Of the largest sequence.
        tokens: That a page and a split have at least.
        large: A program may use 200 KB of shared memory; with less, 128 rows do not fit.
    """
    rows = min(64, max(16, triton.next_power_of_2(query_rows)))
    if large and rows == 64:
        rows = 128  # one tile of 128 is faster even for 48 query rows
    elif rows == 64 and head_dim == 256:
        rows = 32  # 64 would spill registers
    wide = rows == 128 or (rows == 16 and kv_format is not KvFormat.Q4_0)
    return Tile(rows, min(tokens, 64 if wide else 32), 8 if rows == 128 else 4)


def _is_large(device: torch.device) -> bool:
    """Return whether it is a data centre's Hopper or Blackwell: 227 KB for a program."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in {9, 10}


def _has_ptx(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def _attend_splits(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visibility: Visibility,
    page_tokens: int,
    scale: float,
    formats: tuple[KvFormat, KvFormat],
    split_tokens: int,
    tile: Tile,
) -> tuple[Tensor, Tensor]:
    num_rows, num_heads, head_dim = q.shape
    splits = triton.cdiv(visibility.max_tokens, split_tokens)
    out = torch.empty((num_rows, num_heads, splits, head_dim), device=q.device)
    lse = torch.empty((num_rows, num_heads, splits), device=q.device)
    kv_heads, group = keys.shape[1], num_heads // keys.shape[1]
    tiles = triton.cdiv(visibility.max_rows * group, tile.query_rows)
    key_bytes, value_bytes = (page_layout(f, page_tokens, head_dim).size for f in formats)
    attend_kernel[splits, kv_heads * tiles, visibility.ends.shape[0]](
        q, keys.view(torch.uint8), values.view(torch.uint8), visibility.page_table,
        visibility.first_rows, visibility.starts, visibility.ends, visibility.words, out, lse,
        scale * log2(e), kv_heads, group, visibility.page_table.shape[1], splits,
        split_tokens, DIM=head_dim, PAGE=page_tokens, KEY_BYTES=key_bytes,
        VALUE_BYTES=value_bytes, KEY_FORMAT=_FORMATS.index(formats[0]),
        VALUE_FORMAT=_FORMATS.index(formats[1]), M=tile.query_rows, N=tile.tokens,
        PTX=_has_ptx(q.device), num_warps=tile.warps,
    )  # fmt: skip
    return out, lse


def _merge(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, num_heads, splits, head_dim = out.shape
    merged = torch.empty((num_rows, num_heads, head_dim), device=out.device)
    merged_lse = torch.empty((num_rows, num_heads), device=out.device)
    merge_kernel[(num_rows * num_heads,)](
        out, lse, merged, merged_lse, splits, DIM=head_dim,
        SPLITS=triton.next_power_of_2(splits), num_warps=2,
    )  # fmt: skip
    return merged, merged_lse


def _is_tokens(count: int) -> bool:
    return count >= MIN_TOKENS and not count & (count - 1)


def _check(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    formats: tuple[KvFormat, KvFormat],
    page_tokens: int,
) -> None:
    head_dim = q.shape[-1]
    if q.dim() != 3 or head_dim not in (64, 128, 256) or not q.is_contiguous():
        raise KernelInputError(f"q {tuple(q.shape)} is not [rows, Hq, 64, 128 or 256], contiguous")
    if not _is_tokens(page_tokens):
        raise KernelInputError(f"pages of {page_tokens} tokens")
    for name, pages, kv_format in zip(("keys", "values"), (keys, values), formats, strict=True):
        size = page_layout(kv_format, page_tokens, head_dim).size
        bytes_a_head = pages[0, 0].numel() * pages.element_size()
        if bytes_a_head != size or not pages.is_contiguous() or pages.device != q.device:
            raise KernelInputError(
                f"{name} {tuple(pages.shape)} on {pages.device} are not pages of {page_tokens} "
                f"tokens of {head_dim} values in {kv_format}"
            )
    if q.shape[1] % keys.shape[1] or keys.shape[1] != values.shape[1]:
        raise KernelInputError(
            f"{q.shape[1]} query heads do not fit {keys.shape[1]} key and {values.shape[1]} "
            "value heads"
        )
