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
    TILE_TOKENS,
    TQ3_EDGES,
    TQ3_LEVELS,
    TQ4_EDGES,
    TQ4_LEVELS,
    KvFormat,
    page_layout,
    rotation_group,
    scale_block,
    signs,
    value_tiles,
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


def encode_reference(x: Tensor, kv_format: KvFormat, out: Tensor, *, values: bool) -> None:
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
    if kv_format is KvFormat.TQ3_0:
        out[:, : layout.scales] = _planes(_groups(codes, values=values))
        if values:
            scales = _split_values(scales.view(count, tokens, -1)).permute(*_VALUE_SCALES)
    elif kv_format is KvFormat.Q8_0:
        out[:, : layout.scales] = codes.to(torch.int8).view(torch.uint8).flatten(1)
    else:
        out[:, : layout.scales] = _pairs(codes).flatten(1)
    out[:, layout.scales :] = scales.reshape(count, -1).view(torch.uint8)


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


# Dimensions of values `[N, page parts, tiles, 8 of a tile, c, 1 of a tile, …]` as they are stored.
_VALUE_GROUPS = (0, 1, 6, 9, 4, 2, 7, 8, 3, 5)  # then block, m, half of 16, g
_VALUE_SCALES = (0, 1, 6, 4, 2, 3, 5)  # then block


def _split_values(x: Tensor) -> Tensor:
    """View `[N, T, …]` as `[N, T / (16 n), n, 2, 4, 2, …]`, n being `value_tiles`."""
    tiles = value_tiles(x.shape[1])
    return x.reshape(len(x), -1, tiles, 2, 4, 2, *x.shape[2:])


def _groups(codes: Tensor, *, values: bool) -> Tensor:
    """Return codes `[N, T, D]` as they are stored, `[N, groups, 8]`."""
    count, tokens, _ = codes.shape
    if values:
        blocks = codes.view(count, tokens, -1, 2, 2, 8)
        return _split_values(blocks).permute(*_VALUE_GROUPS).reshape(count, -1, 8)
    return codes.view(count, tokens, -1, 4, 8).transpose(2, 3).reshape(count, -1, 8)


def _ungroup(groups: Tensor, tokens: int, *, values: bool) -> Tensor:
    """Undo `_groups`."""
    if not values:
        return groups.view(len(groups), tokens, 4, -1, 8).transpose(2, 3).flatten(2)
    tiles = value_tiles(tokens)
    parts = tokens // (TILE_TOKENS * tiles)
    spread = groups.view(len(groups), parts, -1, 8, 4, tiles, 2, 2, 2, 2)
    return _back(spread, _VALUE_GROUPS).reshape(len(groups), tokens, -1)


def _ungroup_scales(scales: Tensor, tokens: int) -> Tensor:
    """Return scales of values as `[N, T, blocks]`."""
    tiles = value_tiles(tokens)
    spread = scales.view(len(scales), tokens // (TILE_TOKENS * tiles), -1, 4, tiles, 2, 2)
    return _back(spread, _VALUE_SCALES).reshape(len(scales), tokens, -1)


def _back(x: Tensor, order: tuple[int, ...]) -> Tensor:
    return x.permute(*sorted(range(len(order)), key=order.__getitem__))


def _planes(groups: Tensor) -> Tensor:
    """Pack int32 `[N, groups, 8]` into bytes of the low plane, then of the high plane."""
    level, negative = groups & 3, groups >> 2
    low = level[:, 0::2] | level[:, 1::2] << 2
    high = negative[:, 0::4].clone()
    for i in range(1, 4):
        high |= negative[:, i::4] << i
    both = torch.cat((low, high), 1)
    return (both[..., 0::2] | both[..., 1::2] << 4).flatten(1).to(torch.uint8)


def _unpack_planes(low: Tensor, high: Tensor) -> Tensor:
    """Undo `_planes`: return int32 `[N, groups, 8]`."""
    levels, negative = (
        torch.stack((plane & 15, plane >> 4), -1).int().view(len(plane), -1, 8)
        for plane in (low, high)
    )
    return torch.stack((levels & 3, levels >> 2), 2).flatten(1, 2) | (
        torch.stack([negative >> i & 1 for i in range(4)], 2).flatten(1, 2) << 2
    )


def _pairs(codes: Tensor) -> Tensor:
    """Pack nibbles int32 `[N, T, D]`, those that are D / 2 apart into a byte."""
    first, second = codes.chunk(2, 2)
    return (first | second << 4).to(torch.uint8)


def decode_reference(
    pages: Tensor, kv_format: KvFormat, page_tokens: int, head_dim: int, *, values: bool
) -> Tensor:
    """Return what bytes `[N, size of a page]` stand for, still rotated: float32 `[N, T, D]`."""
    layout = page_layout(kv_format, page_tokens, head_dim)
    if kv_format is KvFormat.F16:
        return pages.contiguous().view(torch.float16).float().view(-1, page_tokens, head_dim)
    low = pages[:, : layout.high].reshape(len(pages), page_tokens, -1)
    scales = pages[:, layout.scales :].contiguous().view(torch.float16).float()
    match kv_format:
        case KvFormat.Q8_0:
            decoded = low.view(torch.int8).float()
        case KvFormat.Q4_0:
            decoded = _unpack_pairs(low).float() - 8
        case KvFormat.TQ4:
            decoded = _signed_levels(TQ4_LEVELS, low.device)[_unpack_pairs(low)]
        case _:
            groups = _unpack_planes(low.flatten(1), pages[:, layout.high : layout.scales])
            codes = _ungroup(groups, page_tokens, values=values)
            decoded = _signed_levels(TQ3_LEVELS, low.device)[codes]
            if values:
                scales = _ungroup_scales(scales, page_tokens)
    blocks = decoded.reshape(scales.numel(), -1) * scales.reshape(-1, 1)
    return blocks.view(len(pages), page_tokens, head_dim)


def _signed_levels(levels: tuple[int, ...], device: torch.device) -> Tensor:
    both = torch.tensor([*levels, *(-level for level in levels)], device=device)
    return both.float() / LEVEL_UNITS


def _unpack_pairs(plane: Tensor) -> Tensor:
    return torch.cat((plane.int() & 15, plane.int() >> 4), 2)
