"""Grid and arguments of the kernel."""

from math import e, log2

import torch
import triton
from torch import Tensor

from ragflash_kernels.chunk_attention.kernel import chunk_attention_kernel
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.prefill_attention.launch import Tile, pick_tile

_NO_WINDOW = 2**30
_FULL_ROWS = 2**15  # rows times heads that fill a card with tiles of 128


def chunk_attention_triton(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    counts: Tensor,
    scale: float,
    window: int | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Attend; arguments as in `chunk_attention`."""
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, page_tokens, _ = keys.shape
    if head_dim not in (64, 128, 256) or page_tokens & (page_tokens - 1):
        raise KernelInputError(f"no kernel for heads of {head_dim} in pages of {page_tokens}")
    out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    large = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] in {9, 10}
    tile = tile_for(num_rows * num_heads, head_dim, large=large)
    chunk_attention_kernel[triton.cdiv(num_rows, tile.rows), num_heads](
        q, keys, values, pages, counts, out, scale * log2(e), keys.stride(0), num_rows,
        window or _NO_WINDOW, num_heads, num_heads // num_kv_heads, PAGE=page_tokens, DIM=head_dim,
        M=tile.rows, N=min(tile.tokens, page_tokens), WINDOWED=window is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def tile_for(query_rows: int, head_dim: int, *, large: bool) -> Tile:
    """Return a tile that fits, a smaller one where few rows would leave a card idle.

    large: A program may use 200 KB of shared memory.
    """
    if large and query_rows < _FULL_ROWS and head_dim <= 128:
        return Tile(64, 64, 4, 2)
    return pick_tile(head_dim, large=large)
