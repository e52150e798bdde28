"""Matrices that stay in 4-bit blocks, for a CPU that has no room or time for unpacked ones.

Few rows multiply the codes: torch has a vectorised product of bfloat16 rows with 4-bit codes, one
scale and one offset for each 32 of them. Rows, scales, offsets and results are rounded to bfloat16
there, so a product is about 0.3 % off; llama.cpp rounds rows to 8 bits in the same place. Many rows
multiply the matrix unpacked anew for them, without any of that rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ragflash_kernels.dequant import dequantize

FEW_ROWS = 64  # from there on unpacking costs less than it saves
_GROUP = 32
_COLUMN_BLOCK = 32  # torch's product takes a multiple of these output values
_CENTRE = 8  # torch's codes are signed


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a block of 32 values has its numbers: `scale · code + minimum`."""

    bytes_per_block: int
    has_minimum: bool


_LAYOUTS = {"Q4_0": _Layout(18, has_minimum=False), "Q4_1": _Layout(20, has_minimum=True)}
PACKABLE_FORMATS = tuple(_LAYOUTS)


def can_pack(block_formats: Sequence[str], out_features: int) -> bool:
    """Whether matrices of these formats, side by side, can stay packed."""
    is_known = block_formats[0] in _LAYOUTS and len(set(block_formats)) == 1
    return is_known and out_features % _COLUMN_BLOCK == 0


class PackedLinear:
    """A matrix of 4-bit blocks, and optionally a bias `[out]`.

    Args:
        blocks: uint8 `[out, row bytes]` on a CPU.
        block_format: `Q4_0` or `Q4_1`.
        bias: Of the type that is computed in.
    """

    def __init__(
        self, blocks: torch.Tensor, block_format: str, bias: torch.Tensor | None = None
    ) -> None:
        self._blocks = blocks
        self._block_format = block_format
        self._bias = bias
        codes, scales, minima = _split(blocks, _LAYOUTS[block_format])
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
    blocks: torch.Tensor, layout: _Layout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes int32 `[out, in]`, and scales and minima float32 `[out, in / 32]`.

    After `block_q4_0` and `block_q4_1` of GGML: low halves of all bytes come before high ones.
    """
    each = blocks.view(len(blocks), -1, layout.bytes_per_block)
    num_factors = 2 if layout.has_minimum else 1
    factors = each[..., : 2 * num_factors].contiguous().view(torch.float16).float()
    pairs = each[..., 2 * num_factors :]
    codes = torch.cat((pairs & 15, pairs >> 4), dim=-1).flatten(1).int()
    scales = factors[..., 0]
    return codes, scales, factors[..., 1] if layout.has_minimum else -_CENTRE * scales
