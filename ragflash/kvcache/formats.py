"""How keys and values can be stored, and what each form takes.

`q8_0` and `q4_0` are GGML blocks of 32 values with a 16-bit scale. `tq4` and `tq3_0` rotate each
head first and store indices of fixed levels, 4 or 3 bits a value, with one 16-bit scale for 32.
"""

from dataclasses import dataclass
from typing import Literal

KVFormatName = Literal["f16", "q8_0", "q4_0", "tq4", "tq3_0"]


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Bytes that a block of values takes."""

    block_values: int
    block_bytes: int

    def stored_bytes(self, num_values: int) -> int:
        """Return the bytes of `num_values`; a part of a block takes a whole one."""
        return -(-num_values // self.block_values) * self.block_bytes


KV_FORMATS: dict[KVFormatName, KVFormat] = {
    "f16": KVFormat(1, 2),
    "q8_0": KVFormat(32, 34),
    "q4_0": KVFormat(32, 18),
    "tq4": KVFormat(32, 18),
    "tq3_0": KVFormat(32, 14),
}
