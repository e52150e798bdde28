"""Blocks of 256 values, in sub-blocks of 16 or 32 whose scales are integers.

`d` and `dmin` are float16. Values lie across bytes so that neighbours sit in neighbouring bytes at
the same bits: 32 bytes of 2-bit fields hold 128 values, the first 32 in the lowest bits of each.
"""

import torch
from torch import Tensor

from ragflash_kernels.dequant.fields import bit_fields, half, lowered, scaled


def unpack_q2_k(blocks: Tensor) -> Tensor:
    """`d s q - dmin m` with 16 sub-blocks: 16 bytes of s (low) and m, 64 of q, d, dmin."""
    scales, minima = blocks[:, :16] & 15, blocks[:, :16] >> 4
    q = bit_fields(blocks[:, 16:80], bits=2, run=32).float()
    return lowered(scaled(q, half(blocks, 80) * scales), half(blocks, 82) * minima)


def unpack_q3_k(blocks: Tensor) -> Tensor:
    """`d (s - 32) (q - 4)` with 16 sub-blocks: 32 bytes of high bits, 64 of q, 12 of s, d.

    The low four bits of the scales are in the first eight bytes, the high two in the last four.
    """
    q = bit_fields(blocks[:, 32:96], bits=2, run=32)
    q += bit_fields(blocks[:, :32], bits=1, run=32).mul_(4)
    scales = bit_fields(blocks[:, 96:104], bits=4, run=8)
    scales += bit_fields(blocks[:, 104:108], bits=2, run=4).mul_(16)
    return scaled(q.float().sub_(4), half(blocks, 108) * (scales.float() - 32))


def unpack_q4_k(blocks: Tensor) -> Tensor:
    """`d s q - dmin m` with 8 sub-blocks: d, dmin, 12 bytes of s and m, 128 of q."""
    return _scaled_and_lowered(q4_k_codes(blocks).float(), blocks)


def unpack_q5_k(blocks: Tensor) -> Tensor:
    """As `unpack_q4_k`, with 32 bytes of fifth bits before q."""
    q = bit_fields(blocks[:, 48:], bits=4, run=32)
    q += bit_fields(blocks[:, 16:48], bits=1, run=32).mul_(16)
    return _scaled_and_lowered(q.float(), blocks)


def unpack_q6_k(blocks: Tensor) -> Tensor:
    """`d s (q - 32)` with 16 sub-blocks: 128 bytes of low q, 64 of high q, signed bytes s, d."""
    q = bit_fields(blocks[:, :128], bits=4, run=64)
    q += bit_fields(blocks[:, 128:192], bits=2, run=32).mul_(16)
    return scaled(q.float().sub_(32), half(blocks, 208) * blocks[:, 192:208].view(torch.int8))


def q4_k_codes(blocks: Tensor) -> Tensor:
    """Return the q of Q4_K blocks, uint8 `[N, 256]`."""
    return bit_fields(blocks[:, 16:], bits=4, run=32)


def q4_k_factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return `d s` and `dmin m` of the eight sub-blocks of Q4_K and Q5_K, float32 `[N, 8]`.

    Bytes 4…7 hold scales 0…3 in their low six bits and bytes 8…11 minima 0…3. Bytes 12…15 hold the
    low halves of scales and minima 4…7, whose upper two bits are on top of bytes 4…7 and 8…11.
    """
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (low & 15) | (first >> 6 << 4)], dim=1)
    minima = torch.cat([second & 63, (low >> 4) | (second >> 6 << 4)], dim=1)
    return half(blocks, 0) * scales, half(blocks, 2) * minima


def _scaled_and_lowered(q: Tensor, blocks: Tensor) -> Tensor:
    scales, minima = q4_k_factors(blocks)
    return lowered(scaled(q, scales), minima)
