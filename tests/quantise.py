"""Packs matrices into every block format that ragflash reads, by rounding to the nearest.

The format's own Python library writes only the formats without sub-blocks. Nothing here looks for
the best scales, so files made with it are worse than real ones, and as well formed.
"""

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from ragflash_kernels.dequant.iq4 import LEVELS

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def quantise(values: Floats, kind: GGMLQuantizationType) -> NDArray[np.generic]:
    """Pack rows of float32 `[..., C]` into what `GGUFWriter.add_tensor` takes as raw data."""
    encode = _ENCODERS.get(kind)
    if encode is None:
        return quants.quantize(values, kind)
    per_block = 32 if kind is GGMLQuantizationType.IQ4_NL else 256
    blocks = encode(np.ascontiguousarray(values, np.float32).reshape(-1, per_block))
    return blocks.reshape(*values.shape[:-1], -1)


def _pack(q: NDArray[np.integer], bits: int, run: int) -> Bytes:
    """Fields `[N, C]` into bytes `[N, C * bits / 8]`: runs of `run` bytes, lowest fields first."""
    fields = q.astype(np.uint8).reshape(len(q), -1, 8 // bits, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(fields << shifts, axis=2).reshape(len(q), -1)


def _half(values: Floats) -> tuple[Floats, Bytes]:
    """`[N]` rounded to float16, and its bytes `[N, 2]`."""
    rounded = values.astype("<f2")
    return rounded.astype(np.float32), rounded[:, None].view(np.uint8)


def _divided(values: Floats, steps: Floats) -> Floats:
    """`values / steps` to the nearest integer; 0 where the step is 0."""
    quotient = np.zeros(np.broadcast(values, steps).shape, np.float32)
    return np.rint(np.divide(values, steps, out=quotient, where=steps != 0))


def _affine(blocks: Floats, parts: int, max_q: int, max_scale: int) -> tuple[NDArray, ...]:
    """`d s q - dmin m`: q `[N, 256]`, s and m `[N, parts]`, and the bytes of d and dmin."""
    x = blocks.reshape(len(blocks), parts, -1)
    lowest = np.minimum(x.min(axis=2), 0)
    widths = (np.maximum(x.max(axis=2), 0) - lowest) / max_q
    d, d_bytes = _half(widths.max(axis=1) / max_scale)
    dmin, dmin_bytes = _half(-lowest.min(axis=1) / max_scale)
    scales = np.clip(_divided(widths, d[:, None]), 0, max_scale)
    minima = np.clip(_divided(-lowest, dmin[:, None]), 0, max_scale)
    shifted = x + (dmin[:, None] * minima)[:, :, None]
    q = np.clip(_divided(shifted, (d[:, None] * scales)[:, :, None]), 0, max_q)
    as_bytes = (part.astype(np.uint8) for part in (q.reshape(blocks.shape), scales, minima))
    return *as_bytes, d_bytes, dmin_bytes


def _symmetric(
    blocks: Floats, parts: int, largest: int, max_scale: int
) -> tuple[Floats, Floats, Bytes]:
    """`d s q`, q up to `largest`: x / (d s) `[N, parts, …]`, s `[N, parts]`, and d's bytes."""
    x = blocks.reshape(len(blocks), parts, -1)
    steps = np.abs(x).max(axis=2) / largest
    d, d_bytes = _half(steps.max(axis=1) / max_scale)
    scales = np.clip(_divided(steps, d[:, None]), 0, max_scale)
    steps = (d[:, None] * scales)[:, :, None]
    return np.divide(x, steps, out=np.zeros_like(x), where=steps != 0), scales, d_bytes


def _q2_k(blocks: Floats) -> Bytes:
    q, scales, minima, d, dmin = _affine(blocks, 16, 3, 15)
    return np.concatenate([scales | minima << 4, _pack(q, 2, 32), d, dmin], axis=1)


def _q3_k(blocks: Floats) -> Bytes:
    x, scales, d = _symmetric(blocks, 16, 4, 31)
    q = np.clip(np.rint(x) + 4, 0, 7).astype(np.uint8).reshape(blocks.shape)
    s = scales.astype(np.uint8) + 32
    packed_scales = [_pack(s & 15, 4, 8), _pack(s >> 4, 2, 4)]
    return np.concatenate([_pack(q >> 2, 1, 32), _pack(q & 3, 2, 32), *packed_scales, d], axis=1)


def _six_bit(scales: Bytes, minima: Bytes) -> Bytes:
    """The twelve bytes that eight scales and eight minima share in Q4_K and Q5_K."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return np.concatenate([first, second, scales[:, 4:] & 15 | minima[:, 4:] << 4], axis=1)


def _q4_k(blocks: Floats) -> Bytes:
    q, scales, minima, d, dmin = _affine(blocks, 8, 15, 63)
    return np.concatenate([d, dmin, _six_bit(scales, minima), _pack(q, 4, 32)], axis=1)


def _q5_k(blocks: Floats) -> Bytes:
    q, scales, minima, d, dmin = _affine(blocks, 8, 31, 63)
    packed = [_pack(q >> 4, 1, 32), _pack(q & 15, 4, 32)]
    return np.concatenate([d, dmin, _six_bit(scales, minima), *packed], axis=1)


def _q6_k(blocks: Floats) -> Bytes:
    x, scales, d = _symmetric(blocks, 16, 32, 127)
    q = np.clip(np.rint(x) + 32, 0, 63).astype(np.uint8).reshape(blocks.shape)
    packed = [_pack(q & 15, 4, 64), _pack(q >> 4, 2, 32)]
    return np.concatenate([*packed, scales.astype(np.uint8), d], axis=1)


def _nearest_levels(x: Floats) -> Bytes:
    levels = np.asarray(LEVELS, np.float32)
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, x).astype(np.uint8)


def _iq4_nl(blocks: Floats) -> Bytes:
    d, d_bytes = _half(np.abs(blocks).max(axis=1) / 127)
    x = np.divide(blocks, d[:, None], out=np.zeros_like(blocks), where=d[:, None] != 0)
    return np.concatenate([d_bytes, _pack(_nearest_levels(x), 4, 16)], axis=1)


def _iq4_xs(blocks: Floats) -> Bytes:
    x, scales, d = _symmetric(blocks, 8, 127, 31)
    q = _nearest_levels(x).reshape(blocks.shape)
    s = scales.astype(np.uint8) + 32
    packed_scales = [_pack(s >> 4, 2, 1), _pack(s & 15, 4, 1)]
    return np.concatenate([d, *packed_scales, _pack(q, 4, 16)], axis=1)


_ENCODERS: dict[GGMLQuantizationType, Callable[[Floats], Bytes]] = {
    GGMLQuantizationType.Q2_K: _q2_k,
    GGMLQuantizationType.Q3_K: _q3_k,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
    GGMLQuantizationType.IQ4_NL: _iq4_nl,
    GGMLQuantizationType.IQ4_XS: _iq4_xs,
}
