"""Sizes of the GGML block formats, by name; no torch.

A row of a matrix is a whole number of blocks. The layout inside a block is described where it is
unpacked, in `dequant/reference.py` and beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class BlockFormat:
    """How many values a block holds and how many bytes it takes."""

    name: str
    elements_per_block: int
    bytes_per_block: int


BLOCK_FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        block_format.name: block_format
        for block_format in (
            BlockFormat("F32", 1, 4),
            BlockFormat("F16", 1, 2),
            BlockFormat("BF16", 1, 2),
            BlockFormat("Q4_0", 32, 18),
            BlockFormat("Q4_1", 32, 20),
            BlockFormat("Q5_0", 32, 22),
            BlockFormat("Q5_1", 32, 24),
            BlockFormat("Q8_0", 32, 34),
            BlockFormat("Q2_K", 256, 84),
            BlockFormat("Q3_K", 256, 110),
            BlockFormat("Q4_K", 256, 144),
            BlockFormat("Q5_K", 256, 176),
            BlockFormat("Q6_K", 256, 210),
            BlockFormat("IQ4_NL", 32, 18),
            BlockFormat("IQ4_XS", 256, 136),
        )
    }
)
