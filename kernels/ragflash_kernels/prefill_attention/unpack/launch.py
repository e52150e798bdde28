"""Grids and arguments of the kernels."""

import torch
from torch import Tensor

from ragflash_kernels.kv_codec import KvFormat, page_layout
from ragflash_kernels.kv_codec.formats import TILE_TOKENS, value_tiles
from ragflash_kernels.prefill_attention.unpack.kernel import (
    copy_kernel,
    unpack_kernel,
    unpack_tq3_keys_kernel,
    unpack_tq3_values_kernel,
)

TOKENS = 16  # of a program
_FORMATS = tuple(KvFormat)  # as `paged_attention/quarters.py` numbers them


def unpack_pages(
    pages: Tensor,
    page_list: Tensor,
    kv_format: KvFormat,
    page_tokens: int,
    out: Tensor,
    *,
    values: bool,
    num_tokens: int | None = None,
) -> None:
    """Write listed pages to float16 `[Hkv, n · page_tokens, D]`; see `decode_pages_into`.

    Of `F16` pages, places after the first `num_tokens` become 0 whatever they hold.
    """
    num_kv_heads, tokens, head_dim = out.shape
    has_ptx = out.is_cuda and torch.version.hip is None
    arguments = (
        pages.view(torch.uint8), page_list, out, pages.stride(0) * pages.element_size(),
        tokens * head_dim,
    )  # fmt: skip
    size = page_layout(kv_format, page_tokens, head_dim).size
    shape = {"SIZE": size, "DIM": head_dim, "PAGE": page_tokens, "num_warps": 4}
    grid = (tokens // TOKENS, num_kv_heads)
    if kv_format is KvFormat.F16:
        seen = tokens if num_tokens is None else num_tokens
        copy_kernel[grid](*arguments, seen, T=TOKENS, **shape)
    elif kv_format is not KvFormat.TQ3_0:
        unpack_kernel[grid](
            *arguments, FORMAT=_FORMATS.index(kv_format), T=TOKENS, PTX=has_ptx, **shape
        )  # fmt: skip
    elif values:
        tiles = value_tiles(page_tokens)
        unpack_tq3_values_kernel[tokens // (TILE_TOKENS * tiles), num_kv_heads, head_dim // 64](
            *arguments, TILES=tiles, PTX=has_ptx, **shape
        )
    else:
        unpack_tq3_keys_kernel[grid](*arguments, T=TOKENS, PTX=has_ptx, **shape)
