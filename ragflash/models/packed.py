"""Matrices that stay in 4-bit blocks, for a CPU that has no room or time for unpacked ones.

Few rows multiply the codes: torch has a vectorised product of bfloat16 rows with 4-bit codes, one
scale and one offset for each 32 of them. Rows, scales, offsets and results are rounded to bfloat16
there, so a product is about 0.3 % off; llama.cpp rounds rows to 8 bits in the same place. Many rows
multiply the matrix unpacked anew for them, without any of that rounding.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from ragflash_kernels.dequant import dequantize
from ragflash_kernels.dequant.fields import bit_fields, half
from ragflash_kernels.dequant.k_quants import q4_k_codes, q4_k_factors

FEW_ROWS = 64  # from there on unpacking costs less than it saves
_GROUP = 32
_COLUMN_BLOCK = 32  # torch's product takes a multiple of these output values
_CENTRE = 8  # torch's codes are signed
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q4_K": 144}
PACKABLE_FORMATS = tuple(_BLOCK_BYTES)


def can_pack(block_formats: Sequence[str], out_features: int) -> bool:
    """Whether matrices of these formats, side by side, can stay packed."""
    is_known = block_formats[0] in _BLOCK_BYTES and len(set(block_formats)) == 1
    return is_known and out_features % _COLUMN_BLOCK == 0


class PackedLinear:
    """A matrix of 4-bit blocks, and optionally a bias `[out]`.

    Args:
        blocks: uint8 `[out, row bytes]` on a CPU.
        block_format: One of `PACKABLE_FORMATS`.
        bias: Of the type that is computed in.
    """

    def __init__(
        self, blocks: torch.Tensor, block_format: str, bias: torch.Tensor | None = None
    ) -> None:
        self._blocks = blocks
        self._block_format = block_format
        self._bias = bias
        codes, scales, minima = _split(blocks, block_format)
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(codes, 1)
        factors = torch.stack((scales.t(), (minima + _CENTRE * scales).t()), dim=-1)
        self._factors = factors.to(torch.bfloat16).contiguous()  # [in / 32, out, 2]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        y: torch.Tensor
        if len(x) <= FEW_ROWS:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu.default(
                x.to(torch.bfloat16), self._codes, _GROUP, self._factors
            ).to(x.dtype)
        else:
            weight = dequantize(self._blocks, block_format=self._block_format, dtype=x.dtype)
            y = functional.linear(x, weight)
        return y if self._bias is None else y + self._bias


def _split(
    blocks: torch.Tensor, block_format: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes int32 `[out, in]`, and scales and minima float32 `[out, in / 32]`.

    A value is `scale · code + minimum`, as in `block_q4_0`, `block_q4_1` and `block_q4_K` of GGML.
    """
    rows = len(blocks)
    each = blocks.reshape(-1, _BLOCK_BYTES[block_format])
    if block_format == "Q4_K":
        scales, lowered = q4_k_factors(each)
        codes, minima = q4_k_codes(each), -lowered
    else:
        num_factors = 2 if block_format == "Q4_1" else 1
        codes = bit_fields(each[:, 2 * num_factors :], bits=4, run=16)
        scales = half(each, 0)
        minima = half(each, 2) if num_factors == 2 else -_CENTRE * scales
    return codes.view(rows, -1).int(), scales.view(rows, -1), minima.view(rows, -1)
