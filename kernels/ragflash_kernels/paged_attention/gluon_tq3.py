"""Launch of the attention over TQ3_0 pages on NVIDIA cards."""

from math import e, log2

import torch
import triton
from torch import Tensor

from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.kv_codec import KvFormat, page_layout
from ragflash_kernels.paged_attention.gluon_kernel import (
    attend_tq3_kernel,
    quantize_queries_kernel,
)
from ragflash_kernels.paged_attention.gluon_ptx import KEY_UNIT
from ragflash_kernels.paged_attention.visibility import Visibility

_QUERIES = 8  # of a tile
_TOKENS = 128  # of a step, where heads have most values
_MOST_TILES = 6
_AHEAD_TILES = 3


def attend_tq3(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visibility: Visibility,
    *,
    page_tokens: int,
    scale: float,
    split_tokens: int,
    out: Tensor,
    lse: Tensor,
    tiles: int | None = None,
    registers: int | None = None,
    ahead: bool | None = None,
    eager: bool = False,
) -> None:
    """Attend to each split of packed tokens, in the space that they are stored in.

    Queries are rounded to 1/127 of their largest value and levels of keys to 1/53, weights and
    values to float16. A row's result depends on `split_tokens`, but neither on other rows nor on
    the three options for tuning.

    Args:
        q: Floats `[N, Hq, D]`, contiguous, rotated; D is 64, 128 or 256.
        keys: Bytes `[P, Hkv, size]` of `TQ3_0`; a page is contiguous, pages may lie apart.
        values: Likewise, encoded as values.
        visibility: Of the rows, without words.
        page_tokens: A multiple of 128.
        scale: Of scores.
        split_tokens: A multiple of 128.
        out: float32 `[N, Hq, splits, D]`, written: weighted means; undefined where `lse` is -inf.
        lse: float32 `[N, Hq, splits]`, written: base-2 logarithms of sums of weights, -inf where a
            row sees nothing.
        tiles: Of eight queries, that a program takes; None for what was found fastest.
        registers: That a thread takes at most; None for as many as it wants.
        ahead: Load the keys of the next step early; None for what was found fastest.
        eager: Programmatic dependent launch (sm_90).

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    _check(q, keys, values, visibility, page_tokens, split_tokens, out, lse)
    num_rows, num_heads, head_dim = q.shape
    kv_heads, sequences = keys.shape[1], visibility.ends.shape[0]
    group = num_heads // kv_heads
    needed = triton.cdiv(min(visibility.max_rows, num_rows) * group, _QUERIES)
    per_program, groups = _share(needed, tiles)
    all_tiles = per_program * groups
    shape = (sequences, kv_heads, all_tiles)
    q8 = torch.empty((*shape, _QUERIES * head_dim), dtype=torch.int8, device=q.device)
    scales = torch.empty((*shape, _QUERIES), device=q.device)
    bounds = torch.empty((*shape, 2), dtype=torch.int32, device=q.device)
    quantize_queries_kernel[all_tiles, kv_heads, sequences](
        q, visibility.first_rows, visibility.starts, q8, scales, bounds,
        scale * log2(e) / KEY_UNIT, kv_heads, group, all_tiles, DIM=head_dim,
        EAGER=eager, num_warps=1, launch_pdl=eager,
    )  # fmt: skip
    layout = page_layout(KvFormat.TQ3_0, page_tokens, head_dim)
    warps = head_dim // 32
    attend_tq3_kernel[groups * kv_heads, lse.shape[2], sequences](
        q8, scales, bounds, keys, values, visibility.page_table, visibility.first_rows,
        visibility.starts, visibility.ends, out, lse, keys.stride(0), values.stride(0), kv_heads,
        group, visibility.page_table.shape[1], lse.shape[2], split_tokens, all_tiles, groups,
        DIM=head_dim, PAGE=page_tokens, HIGH=layout.high, SCALES=layout.scales, SIZE=layout.size,
        TILES=per_program, WARPS=warps, BUFFERS=pick_buffers(per_program),
        AHEAD=per_program <= _AHEAD_TILES if ahead is None else ahead, EAGER=eager,
        num_warps=warps, launch_pdl=eager, maxnreg=registers,
    )  # fmt: skip


def pick_buffers(tiles: int) -> int:
    """Return how many buffers for weights fit 48 KB of shared memory with the rest."""
    return 2 if tiles <= 8 else 1


def _share(needed: int, tiles: int | None) -> tuple[int, int]:
    """Return how many tiles a program takes, and how many programs share them."""
    most = tiles or _MOST_TILES
    groups = triton.cdiv(needed, most)
    return triton.cdiv(needed, groups), groups


def _check(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visibility: Visibility,
    page_tokens: int,
    split_tokens: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    if q.dim() != 3 or q.shape[2] not in {64, 128, 256} or not q.is_contiguous():
        raise KernelInputError(f"q {tuple(q.shape)} is not [N, Hq, 64, 128 or 256], contiguous")
    if page_tokens % _TOKENS or split_tokens % _TOKENS:
        raise KernelInputError(f"pages of {page_tokens} tokens, splits of {split_tokens}")
    if visibility.words is not None:
        raise KernelInputError("rows see packed tokens before the end only: no words")
    num_rows, num_heads, head_dim = q.shape
    size = page_layout(KvFormat.TQ3_0, page_tokens, head_dim).size
    for name, pages in (("keys", keys), ("values", values)):
        if pages.dtype != torch.uint8 or pages.dim() != 3 or pages.shape[2] != size:
            raise KernelInputError(f"{name} are {pages.dtype} {tuple(pages.shape)}")
        if not pages[0].is_contiguous() or pages.stride(0) % 16 or pages.data_ptr() % 16:
            raise KernelInputError(f"pages of {name} are not contiguous or not aligned")
    if num_heads % keys.shape[1] or keys.shape[1] != values.shape[1]:
        raise KernelInputError(f"{num_heads} query heads do not fit {keys.shape[1]} key heads")
    splits = triton.cdiv(visibility.max_tokens, split_tokens)
    if lse.shape != (num_rows, num_heads, splits) or out.shape != (*lse.shape, head_dim):
        raise KernelInputError(f"out {tuple(out.shape)}, lse {tuple(lse.shape)}: {splits} splits")
