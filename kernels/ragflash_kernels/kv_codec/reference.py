"""Plain torch, in the steps of the kernel: both give the same bytes.

Transforms add in pairs in a fixed order; sums over a block are sums of integers, so that no order
of threads matters.
"""

from functools import cache
from math import sqrt

import torch
from torch import Tensor

from ragflash_kernels.kv_codec.formats import (
    AMPLITUDE_UNITS,
    FIT_ROUNDS,
    LARGEST_HALF,
    LEVEL_UNITS,
    SMALLEST_AMPLITUDE,
    TQ3_EDGES,
    TQ3_LEVELS,
    TQ4_EDGES,
    TQ4_LEVELS,
    KvFormat,
    page_layout,
    rotation_group,
    scale_block,
    signs,
)


def bounded(x: Tensor) -> Tensor:
    """Return float32 within what float16 holds; what is not finite becomes NaN."""
    wide = x.float()
    cut = wide.clamp(-LARGEST_HALF, LARGEST_HALF)
    return torch.where(wide.isfinite(), cut, float("nan"))


def rotate_reference(x: Tensor, *, inverse: bool) -> Tensor:
    """Rotate groups of the last dimension: signs, Walsh–Hadamard transform, signs."""
    group = rotation_group(x.shape[-1])
    first, last = sign_vectors(group, x.device)
    if inverse:
        first, last = last, first
    y = x.float().reshape(-1, group) * first
    for _ in range(group.bit_length() - 1):  # lowest bit of the index in, highest out
        y = torch.cat([y[:, 0::2] + y[:, 1::2], y[:, 0::2] - y[:, 1::2]], 1)
    return (y * (1 / sqrt(group)) * last).reshape(x.shape)


@cache
def sign_vectors(group: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the two sign vectors of a group, float32."""
    first, last = (
        torch.tensor(signs(i, group), dtype=torch.float32, device=device) for i in (0, 1)
    )
    return first, last


def encode_reference(x: Tensor, kv_format: KvFormat, out: Tensor) -> None:
    """Quantise float32 `[N, T, D]`, bounded and rotated, into bytes `[N, size of a page]`."""
    count, tokens, head_dim = x.shape
    layout = page_layout(kv_format, tokens, head_dim)
    if kv_format is KvFormat.F16:
        out.copy_(x.half().view(torch.uint8).flatten(1))
        return
    blocks = x.reshape(-1, scale_block(kv_format, head_dim))
    match kv_format:
        case KvFormat.Q8_0:
            scales = blocks.abs().amax(1, keepdim=True) * (1 / 127)
            codes, scales = _quantize_uniform(blocks, scales, -127, 127)
        case KvFormat.Q4_0:
            top, bottom = blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True)
            scales = torch.where(top > -bottom, top, bottom) * (-1 / 8)
            codes, scales = _quantize_uniform(blocks, scales, -8, 7)
            codes = codes + 8
        case KvFormat.TQ4:
            codes, scales = _quantize_levels(blocks, TQ4_LEVELS, TQ4_EDGES)
        case KvFormat.TQ3_0:
            codes, scales = _quantize_levels(blocks, TQ3_LEVELS, TQ3_EDGES)
    codes = codes.to(torch.int32).reshape(count, tokens, head_dim)
    planes = _planes(codes, kv_format)
    out[:, : layout.scales] = torch.cat([plane.flatten(1) for plane in planes], 1)
    out[:, layout.scales :] = scales.view(count, -1).view(torch.uint8)


def _quantize_uniform(
    blocks: Tensor, scale: Tensor, smallest: int, largest: int
) -> tuple[Tensor, Tensor]:
    """Round to multiples of a block's scale; return them and the scales, float16."""
    scale = scale.half()
    inverse = torch.where(scale != 0, 1 / scale.float(), 0)
    return (blocks * inverse).round().clamp(smallest, largest).nan_to_num(0), scale


def _quantize_levels(
    blocks: Tensor, levels: tuple[int, ...], edges: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """Take the nearest level; return sign and index as codes, and the scales, float16.

    The first choice is by the block's root mean square; then the scale is fitted by least squares
    to the levels, and levels are chosen by that scale.
    """
    table = torch.tensor(levels, dtype=torch.int32, device=blocks.device)
    peak = blocks.abs().amax(1, keepdim=True)
    unit = torch.where(peak >= SMALLEST_AMPLITUDE, AMPLITUDE_UNITS / peak, 0)
    amplitude = blocks.abs() * unit
    whole = amplitude.round().nan_to_num(0).to(torch.int32)
    scale = (_sum(whole * whole) * (1 / blocks.shape[1])).sqrt()
    index = torch.zeros_like(whole)
    for _ in range(FIT_ROUNDS):
        index = torch.zeros_like(index)
        for edge in edges:
            index += amplitude > scale * edge
        level = table[index]
        scale = _sum(whole * level) / _sum(level * level) * LEVEL_UNITS
    codes = index + (blocks < 0) * len(levels)
    limit = LARGEST_HALF * LEVEL_UNITS / levels[-1]
    scale = scale * (peak * (1 / AMPLITUDE_UNITS))
    return codes, torch.where(scale > limit, limit, scale).half()


def _sum(whole: Tensor) -> Tensor:
    return whole.sum(1, keepdim=True, dtype=torch.int32).float()


def _planes(codes: Tensor, kv_format: KvFormat) -> list[Tensor]:
    """Pack int32 `[N, T, D]` into the low plane and, of TQ3_0, the high plane."""
    if kv_format is KvFormat.Q8_0:
        return [codes.to(torch.int8).view(torch.uint8)]
    if kv_format is KvFormat.TQ3_0:
        return [_fields(codes & 3, 2), _fields(codes >> 2, 1)]
    return [_fields(codes, 4)]


def _fields(codes: Tensor, bits: int) -> Tensor:
    fields = codes.view(*codes.shape[:2], 8 // bits, -1)
    packed = fields[:, :, 0].clone()
    for i in range(1, 8 // bits):
        packed |= fields[:, :, i] << (bits * i)
    return packed.to(torch.uint8)


def decode_reference(pages: Tensor, kv_format: KvFormat, page_tokens: int, head_dim: int) -> Tensor:
    """Return what bytes `[N, size of a page]` stand for, still rotated: float32 `[N, T, D]`."""
    layout = page_layout(kv_format, page_tokens, head_dim)
    if kv_format is KvFormat.F16:
        return pages.contiguous().view(torch.float16).float().view(-1, page_tokens, head_dim)
    low = pages[:, : layout.high].reshape(len(pages), page_tokens, -1)
    scales = pages[:, layout.scales :].contiguous().view(torch.float16).float()
    match kv_format:
        case KvFormat.Q8_0:
            values = low.view(torch.int8).float()
        case KvFormat.Q4_0:
            values = _unpack_fields(low, 4).float() - 8
        case KvFormat.TQ4:
            values = _signed_levels(TQ4_LEVELS, low.device)[_unpack_fields(low, 4)]
        case _:
            high = pages[:, layout.high : layout.scales].reshape(len(pages), page_tokens, -1)
            codes = _unpack_fields(low, 2) | _unpack_fields(high, 1) << 2
            values = _signed_levels(TQ3_LEVELS, low.device)[codes]
    blocks = values.reshape(scales.numel(), -1) * scales.view(-1, 1)
    return blocks.view(len(pages), page_tokens, head_dim)


def _signed_levels(levels: tuple[int, ...], device: torch.device) -> Tensor:
    both = torch.tensor([*levels, *(-level for level in levels)], device=device)
    return both.float() / LEVEL_UNITS


def _unpack_fields(plane: Tensor, bits: int) -> Tensor:
    mask = (1 << bits) - 1
    return torch.cat([(plane.int() >> shift) & mask for shift in range(0, 8, bits)], 2)
