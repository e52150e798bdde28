"""Codes, scales and minima of GGML blocks, taken apart but not multiplied.

Codes of formats without minima come as two's complement of `code_bits` bits, table indices as
they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ragflash_kernels.dequant.fields import bit_fields
from ragflash_kernels.quant_layout import BLOCK_FORMATS


@dataclass(frozen=True)
class BlockParts:
    """What rows of blocks hold.

    Attributes:
        codes: uint8 `[N, K]`.
        scales: float16 or uint8 `[N, K / 32]`, or `/ 16`; signed ones have 128 added.
        minima: Of the shape and type of `scales`.
        factors: float16 `[N, K / 256, 1]`, of the scales, or `2`, and of the minima.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None
    factors: Tensor | None = None


def take_apart(blocks: Tensor, block_format: str) -> BlockParts:
    """Take apart uint8 `[N, row_bytes]`."""
    sizes = BLOCK_FORMATS[block_format]
    rows = blocks.shape[0]
    parts = _TAKE_APART[block_format](blocks.reshape(-1, sizes.bytes_per_block))
    minima, factors = parts.minima, parts.factors
    return BlockParts(
        parts.codes.reshape(rows, -1),
        parts.scales.reshape(rows, -1),
        None if minima is None else minima.reshape(rows, -1),
        None if factors is None else factors.reshape(rows, -1, factors.shape[1]),
    )


def _halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """Return the float16 from byte `start` on, `[B, count]`."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return the 32 bits from byte `start` on, as 0 or 16."""
    return bit_fields(blocks[:, start : start + 4], bits=1, run=1) << 4


def _q4_0(blocks: Tensor) -> BlockParts:
    return BlockParts(bit_fields(blocks[:, 2:], bits=4, run=16) ^ 8, _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> BlockParts:
    codes = bit_fields(blocks[:, 4:], bits=4, run=16)
    return BlockParts(codes, _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Tensor) -> BlockParts:
    codes = bit_fields(blocks[:, 6:], bits=4, run=16) | _fifth_bits(blocks, 2)
    return BlockParts(codes ^ 16, _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> BlockParts:
    codes = bit_fields(blocks[:, 8:], bits=4, run=16) | _fifth_bits(blocks, 4)
    return BlockParts(codes, _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Tensor) -> BlockParts:
    return BlockParts(blocks[:, 2:], _halves(blocks, 0))


def _q4_k(blocks: Tensor) -> BlockParts:
    codes = bit_fields(blocks[:, 16:], bits=4, run=32)
    return BlockParts(codes, *_six_bit_scales(blocks), _halves(blocks, 0, 2))


def _q5_k(blocks: Tensor) -> BlockParts:
    codes = bit_fields(blocks[:, 48:], bits=4, run=32)
    codes |= bit_fields(blocks[:, 16:48], bits=1, run=32) << 4
    return BlockParts(codes, *_six_bit_scales(blocks), _halves(blocks, 0, 2))


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight scales and minima that Q4_K and Q5_K pack into bytes 4 … 15."""
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (low & 15) | (first >> 6 << 4)], dim=1)
    minima = torch.cat([second & 63, (low >> 4) | (second >> 6 << 4)], dim=1)
    return scales, minima


def _q6_k(blocks: Tensor) -> BlockParts:
    codes = bit_fields(blocks[:, :128], bits=4, run=64)
    codes |= bit_fields(blocks[:, 128:192], bits=2, run=32) << 4
    return BlockParts(codes ^ 32, blocks[:, 192:208] ^ 128, None, _halves(blocks, 208))


def _iq4_nl(blocks: Tensor) -> BlockParts:
    return BlockParts(bit_fields(blocks[:, 2:], bits=4, run=16), _halves(blocks, 0))


def _iq4_xs(blocks: Tensor) -> BlockParts:
    scales = bit_fields(blocks[:, 4:8], bits=4, run=1)
    scales |= bit_fields(blocks[:, 2:4], bits=2, run=1) << 4
    codes = bit_fields(blocks[:, 8:], bits=4, run=16)
    return BlockParts(codes, scales + (128 - 32), None, _halves(blocks, 0))


_TAKE_APART: Mapping[str, Callable[[Tensor], BlockParts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
