"""Four-bit formats whose values stand for 16 unevenly spaced levels."""

import torch
from torch import Tensor

from ragflash_kernels.dequant.fields import bit_fields, half, scaled

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def unpack_iq4_nl(blocks: Tensor) -> Tensor:
    """`d level(q)`, 32 values in the order of Q4_0: d, 16 bytes of q."""
    return _levels(blocks[:, 2:]).mul_(half(blocks, 0))


def unpack_iq4_xs(blocks: Tensor) -> Tensor:
    """`d (s - 32) level(q)` with 8 sub-blocks of 32: d, high s, low s, 128 bytes of q.

    The high two bits of the scales are in two bytes, the low four in the next four.
    """
    scales = bit_fields(blocks[:, 4:8], bits=4, run=1)
    scales += bit_fields(blocks[:, 2:4], bits=2, run=1).mul_(16)
    return scaled(_levels(blocks[:, 8:]), half(blocks, 0) * (scales.float() - 32))


def _levels(packed: Tensor) -> Tensor:
    """`[N, B]` bytes, in runs of 16, to float32 `[N, 2 B]`."""
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=packed.device)
    q = bit_fields(packed, bits=4, run=16)
    return levels.index_select(0, q.flatten().int()).view(q.shape)
