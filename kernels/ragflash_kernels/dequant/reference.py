"""Unpacking in plain torch, one function a block format.

Blocks are little-endian. `d` is a block's scale and `m` its minimum, both float16. Four-bit
values are stored in pairs: byte i holds value i in its low half and value i + 16 in its high half.
Five-bit values have their fifth bits in a 32-bit word, value i in bit i. Source: `ggml-common.h`
and `ggml-quants.c` of the GGML library, which define the formats.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ragflash_kernels.quant_layout import BLOCK_FORMATS


def dequantize_reference(blocks: Tensor, block_format: str) -> Tensor:
    """Unpack uint8 `[R, row_bytes]` to float32 `[R, C]`."""
    sizes = BLOCK_FORMATS[block_format]
    rows, row_bytes = blocks.shape
    per_row = row_bytes // sizes.bytes_per_block
    values = _UNPACK[block_format](blocks.reshape(rows * per_row, sizes.bytes_per_block))
    return values.reshape(rows, per_row * sizes.elements_per_block)


def _half(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at byte `offset` of each block, as float32 `[blocks, 1]`."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """`[blocks, 16]` bytes to `[blocks, 32]` values of 0…15."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """`[blocks, 4]` bytes to `[blocks, 32]` values of 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(2) >> shifts) & 1  # [blocks, 4, 8]
    return bits.reshape(packed.shape[0], 32) << 4


def _unpack_f32(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float32)


def _unpack_f16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float16).float()


def _unpack_bf16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _unpack_q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _unpack_q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _unpack_q5_0(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (q.float() - 16)


def _unpack_q5_1(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * q.float() + _half(blocks, 2)


def _unpack_q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


_UNPACK: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F32": _unpack_f32,
    "F16": _unpack_f16,
    "BF16": _unpack_bf16,
    "Q4_0": _unpack_q4_0,
    "Q4_1": _unpack_q4_1,
    "Q5_0": _unpack_q5_0,
    "Q5_1": _unpack_q5_1,
    "Q8_0": _unpack_q8_0,
}
