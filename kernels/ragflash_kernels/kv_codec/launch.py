"""Grids and arguments of the kernels."""

from math import sqrt

import torch
import triton
from torch import Tensor

from ragflash_kernels.kv_codec.formats import (
    TILE_TOKENS,
    KvFormat,
    page_layout,
    rotation_group,
    scale_block,
    value_tiles,
)
from ragflash_kernels.kv_codec.kernel import encode_kernel, rotate_kernel
from ragflash_kernels.kv_codec.reference import sign_vectors

_TOKENS_PER_PROGRAM = 8
_LEVELS = {KvFormat.TQ3_0: 4, KvFormat.TQ4: 8}


def encode_triton(
    x: Tensor, kv_format: KvFormat, offsets: Tensor | None, out: Tensor, *, values: bool
) -> None:
    """Encode float `[pages, heads, T, D]` into bytes `[pages, heads, size of a page]`."""
    pages, heads, page_tokens, head_dim = x.shape
    group = rotation_group(head_dim)
    layout = page_layout(kv_format, page_tokens, head_dim)
    first, last = sign_vectors(group, x.device)
    tokens = min(_TOKENS_PER_PROGRAM, triton.next_power_of_2(page_tokens))
    if values:
        tokens = 2 * TILE_TOKENS
    encode_kernel[pages * heads, triton.cdiv(page_tokens, tokens)](
        x, first if offsets is None else offsets, first, last, out, x.stride(0), x.stride(1),
        x.stride(2), page_tokens, heads, 1 / sqrt(group), DIM=head_dim, GROUP=group,
        STAGES=group.bit_length() - 1 if kv_format.rotated else 0,
        BLOCK=scale_block(kv_format, head_dim), TOKENS=tokens, SIZE=layout.size, HIGH=layout.high,
        SCALES=layout.scales, BITS=8 if kv_format is KvFormat.Q8_0 else 4,
        LEVELS=_LEVELS.get(kv_format, 0), VALUE_TILES=value_tiles(page_tokens) if values else 0,
        HAS_OFFSETS=offsets is not None, num_warps=4 * max(1, tokens // _TOKENS_PER_PROGRAM),
        enable_fp_fusion=False,
    )  # fmt: skip


def rotate_triton(x: Tensor, *, inverse: bool) -> Tensor:
    """Rotate groups of the last dimension of contiguous floats; the result is float32."""
    group = rotation_group(x.shape[-1])
    first, last = sign_vectors(group, x.device)
    if inverse:
        first, last = last, first
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rows = x.numel() // group
    per_program = 8
    rotate_kernel[(triton.cdiv(rows, per_program),)](
        x, first, last, out, rows, group, 1 / sqrt(group), GROUP=group,
        STAGES=group.bit_length() - 1, R=per_program, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
