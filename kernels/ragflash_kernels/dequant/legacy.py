"""Blocks of 32 values with one scale `d`, and in the `_1` formats a minimum `m`, both float16.

Four-bit values are stored in pairs: byte i holds value i in its low half and value i + 16 in its
high half. Five-bit values have their fifth bits in a 32-bit word, value i in bit i.
"""

import torch
from torch import Tensor

from ragflash_kernels.dequant.fields import bit_fields, half, read_as


def unpack_q4_0(blocks: Tensor) -> Tensor:
    """`d (q - 8)`: d, 16 bytes of q."""
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(half(blocks, 0))


def unpack_q4_1(blocks: Tensor) -> Tensor:
    """`d q + m`: d, m, 16 bytes of q."""
    return _nibbles(blocks[:, 4:]).mul_(half(blocks, 0)).add_(half(blocks, 2))


def unpack_q5_0(blocks: Tensor) -> Tensor:
    """`d (q - 16)`: d, the word of fifth bits, 16 bytes of q."""
    return _with_fifth_bits(blocks[:, 2:]).sub_(16).mul_(half(blocks, 0))


def unpack_q5_1(blocks: Tensor) -> Tensor:
    """`d q + m`: d, m, the word of fifth bits, 16 bytes of q."""
    return _with_fifth_bits(blocks[:, 4:]).mul_(half(blocks, 0)).add_(half(blocks, 2))


def unpack_q8_0(blocks: Tensor) -> Tensor:
    """`d q`: d, 32 signed bytes."""
    return blocks[:, 2:].view(torch.int8).float().mul_(half(blocks, 0))


def _nibbles(packed: Tensor) -> Tensor:
    """`[N, 16]` bytes to float32 `[N, 32]` of 0…15."""
    return bit_fields(packed, bits=4, run=16).float()


def _with_fifth_bits(packed: Tensor) -> Tensor:
    """`[N, 4 + 16]` bytes to float32 `[N, 32]` of 0…31."""
    word = read_as(packed[:, :4], torch.int32)
    positions = torch.arange(32, dtype=torch.int32, device=packed.device)
    return _nibbles(packed[:, 4:]).add_((word >> positions).bitwise_and_(1), alpha=16)
