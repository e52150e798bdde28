"""Sizes and places inside the records that packed matrices are made of; no torch.

A record is the weights of 32 rows and `steps` times 32 columns (a step), contiguous in memory and
laid out so that the lanes of a warp read exactly the fragments of a matrix instruction. Lane
`4 g + c` (g < 8, c < 4) holds rows g, g + 8, g + 16, g + 24 (j = 0 … 3) of a step, and of each its
columns 4 c … 4 c + 3 and 16 + 4 c … 16 + 4 c + 3 (i = 0 … 3, half = 0 and 1). In order:

* low plane: `[steps, 32 lanes, 4 j]` words. Byte i of a word has half 0 in its lower nibble and
  half 1 in its upper one. Of the types with a table, nibble `4 half + i` is an index. Bytes:
  `[steps, 2 halves, 32 lanes, 4 j]` words.
* high plane of types with one bit more: `[pieces, 32 lanes, steps per piece]` words, bit
  `8 i + 2 j + half`; with two bits more: `[4 pieces, 32 lanes, 2 steps, 2]` words, of which
  word `j // 2` has them from bit `8 i + 4 (j % 2) + 2 half` on.
* scales: float16 `[steps / 2, 8 g, 2 steps, 4 j]`; or bytes `[2, 8 g, 4 steps, 4 j]`, of types
  with two scales a step `[4, 8 g, 2 steps, 2 halves, 4 j]`, signed ones with 128 added.
* minima: float16 `[8 g, steps, 4 j]`, or bytes `[32 lanes, 2, 4 j]` of step `c + 4 k`.
* the scales of the bytes, float16 `[8 g, 4 j]`, or `[8 g, 4 j, 2]` with that of the minima.

A word is 32 bits, little-endian. Codes of types without minima are two's complement.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

ROWS_PER_RECORD = 32
COLUMNS_PER_STEP = 32
BLOCK_COLUMNS = 256  # what activations are padded to


class Scales(IntEnum):
    """How a step's scales are stored."""

    FLOAT16 = 0
    BYTES = 1  # unsigned, one a step, with a float16 factor and minima of the same kind
    SIGNED_BYTES = 2  # one a step
    SIGNED_BYTES_OF_16 = 3  # one for each half of a step


@dataclass(frozen=True)
class RecordFormat:
    """How a block format is stored in records.

    Attributes:
        low_bits: 4, or 8 where a weight is a byte.
        high_bits: Bits of a code beyond the low four: 0, 1 or 2.
        table: The code is an index of `IQ4_VALUES`.
        minima: A minimum belongs to every scale.
        max_steps: Steps of a record where the columns allow as many.
    """

    name: str
    low_bits: int
    high_bits: int
    scales: Scales
    minima: bool = False
    table: bool = False
    max_steps: int = 8

    @property
    def code_bits(self) -> int:
        """Bits of a code."""
        return self.low_bits + self.high_bits

    def steps(self, columns: int) -> int:
        """Return the steps of a record, 8, 4 or 2, for a matrix of so many columns."""
        fitting = (s for s in (8, 4) if columns % (s * COLUMNS_PER_STEP) == 0)
        return min(next(fitting, 2), self.max_steps)

    def offsets(self, steps: int) -> "RecordOffsets":
        """Return where the parts of a record of so many steps begin."""
        high = steps * 128 * self.low_bits
        scales = high + steps * 128 * self.high_bits
        per_step = 64 if self.scales in (Scales.FLOAT16, Scales.SIGNED_BYTES_OF_16) else 32
        minima = scales + steps * per_step
        factors = minima + (steps * per_step if self.minima else 0)
        if self.scales is Scales.FLOAT16:
            return RecordOffsets(high, scales, minima, factors, factors)
        return RecordOffsets(high, scales, minima, factors, factors + (128 if self.minima else 64))


@dataclass(frozen=True)
class RecordOffsets:
    """Bytes from a record's start to its parts, and its size; the low plane is at 0."""

    high: int
    scales: int
    minima: int
    factors: int
    size: int


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

RECORD_FORMATS: Mapping[str, RecordFormat] = MappingProxyType(
    {
        record_format.name: record_format
        for record_format in (
            RecordFormat("Q4_0", 4, 0, Scales.FLOAT16),
            RecordFormat("Q4_1", 4, 0, Scales.FLOAT16, minima=True),
            RecordFormat("Q5_0", 4, 1, Scales.FLOAT16),
            RecordFormat("Q5_1", 4, 1, Scales.FLOAT16, minima=True),
            RecordFormat("Q8_0", 8, 0, Scales.FLOAT16, max_steps=4),
            RecordFormat("Q4_K", 4, 0, Scales.BYTES, minima=True),
            RecordFormat("Q5_K", 4, 1, Scales.BYTES, minima=True),
            RecordFormat("Q6_K", 4, 2, Scales.SIGNED_BYTES_OF_16),
            RecordFormat("IQ4_NL", 4, 0, Scales.FLOAT16, table=True),
            RecordFormat("IQ4_XS", 4, 0, Scales.SIGNED_BYTES, table=True),
        )
    }
)
