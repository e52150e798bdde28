"""Activations on their int8 grid: 32 neighbours share a scale.

The grid is the same for any number of rows, so that a row's product does not depend on how many
rows it is multiplied with. A scale keeps 22 bits of its mantissa: then 1.5 * 2**23 times a scale,
by which the kernels turn integers into floats, is exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ragflash_kernels.qmatmul.formats import BLOCK_COLUMNS, COLUMNS_PER_STEP

MAX_ROWS = 32
ROWS_PER_TILE = 8  # columns of a matrix instruction's right operand
SMALLEST_AMPLITUDE = 2.0**-100  # below it a block counts as zero, so that 1 / scale is finite
LARGEST_AMPLITUDE = 2.0**100  # above it a block counts as infinite: 2**24 times it must be finite
_KEPT_BITS = -4  # as a mask: the two lowest bits of a float32 are cleared
_TF32_BITS = -8192  # what tensor float 32 holds


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round activations to their grid.

    Args:
        x: float32 or float16 `[M, K]`, K a multiple of 32.

    Returns:
        Integers of -127 … 127, int8 `[M, K]`, and scales, float32 `[M, K / 32]`. A block with a
        value that is not finite, or beyond `LARGEST_AMPLITUDE`, has the scale NaN.
    """
    blocks = x.float().reshape(x.shape[0], -1, COLUMNS_PER_STEP)
    amplitude = blocks.abs().amax(2)
    scale = ((amplitude * (1 / 127)).view(torch.int32) & _KEPT_BITS).view(torch.float32)
    finite = amplitude <= LARGEST_AMPLITUDE
    usable = finite & (amplitude >= SMALLEST_AMPLITUDE)
    scale = torch.where(usable, scale, 0)
    inverse = torch.where(usable, 1 / scale, 0)
    q = torch.where(usable[..., None], (blocks * inverse[..., None]).round(), 0).to(torch.int8)
    scale = torch.where(finite, scale, float("nan"))
    return q.flatten(1), scale


@dataclass(frozen=True)
class ActivationBuffers:
    """Where the kernels keep up to `8 tiles` quantised rows, in the order that lanes read.

    A block is 256 columns, of which a step is 32; lane `4 g + c` works on row g of a tile.

    Attributes:
        q: int32 `[blocks, tiles, 4, 32 lanes, 2 steps, 2 halves]`, four neighbours a word.
        scales: float32 `[blocks, tiles, 4 c, 8 steps, 2]`, of rows 2 c and 2 c + 1.
        sums: float32 `[blocks, tiles, 8 steps, 8 rows, 2]`: the sum of a step's values, as a part
            that tensor float 32 holds, and the rest.
    """

    q: Tensor
    scales: Tensor
    sums: Tensor

    @classmethod
    def allocate(cls, rows: int, columns: int, device: torch.device) -> "ActivationBuffers":
        """Return buffers for so many rows, uninitialised."""
        tiles, blocks = -(-rows // ROWS_PER_TILE), -(-columns // BLOCK_COLUMNS)
        return cls(
            torch.empty((blocks, tiles, 4, 32, 2, 2), dtype=torch.int32, device=device),
            torch.empty((blocks, tiles, 4, 8, 2), dtype=torch.float32, device=device),
            torch.empty((blocks, tiles, 8, 8, 2), dtype=torch.float32, device=device),
        )

    @classmethod
    def from_rows(cls, x: Tensor) -> "ActivationBuffers":
        """Return new buffers of float rows `[M, K]`, by plain torch; columns beyond K are zero."""
        tiles, blocks = -(-x.shape[0] // ROWS_PER_TILE), -(-x.shape[1] // BLOCK_COLUMNS)
        rows, columns = tiles * ROWS_PER_TILE, blocks * BLOCK_COLUMNS
        q, scales = quantize_rows(pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0])))
        totals = q.float().view(rows, -1, COLUMNS_PER_STEP).sum(2) * scales
        rough = (totals.view(torch.int32) & _TF32_BITS).view(torch.float32)
        sums = torch.stack((rough, totals - rough), -1).view(tiles, ROWS_PER_TILE, blocks, 8, 2)
        words = q.view(tiles, 8, blocks, 4, 2, 2, 4, 4)  # tile g block pair step half c i
        words = words.permute(2, 0, 3, 1, 6, 4, 5, 7).contiguous().view(torch.int32)
        return cls(
            words.view(blocks, tiles, 4, 32, 2, 2),
            scales.view(tiles, 4, 2, blocks, 8).permute(3, 0, 1, 4, 2).contiguous(),
            sums.permute(2, 0, 3, 1, 4).contiguous(),
        )

    def to_rows(self, rows: int, columns: int) -> Tensor:
        """Return what the grid stands for, float32 `[rows, columns]`."""
        blocks, tiles = self.q.shape[:2]
        words = self.q.view(torch.int8).view(blocks, tiles, 4, 8, 4, 2, 2, 4)
        q = words.permute(1, 3, 0, 2, 5, 6, 4, 7).reshape(tiles * 8, -1, COLUMNS_PER_STEP)
        scales = self.scales.permute(1, 2, 4, 0, 3).reshape(tiles * 8, -1, 1)
        return (q.float() * scales).flatten(1)[:rows, :columns].contiguous()
