"""The PTX of unpacking: every string is built by a function that says what it is.

In inline assembly `$0 …` are first the results, then the arguments. It runs on sm_80 and later.
"""

import struct

from ragflash_kernels.kv_codec.formats import LEVEL_UNITS, TQ4_LEVELS

TQ4_CONSTRAINTS = "=&r,=&r,r"


def tq4_values(quarter: int) -> str:
    """Return the look-up of four values of TQ4, as float16 without their scale.

    Results: two words of two values. Argument: four bytes of the plane. Level indices become
    nibbles, two byte permutations look up the lower and the upper bytes of the levels, two more
    join them.

    Args:
        quarter: Of a head, 0 … 3.
    """
    lower, upper = ([_table(TQ4_LEVELS[i : i + 4], byte) for i in (0, 4)] for byte in (0, 1))
    shift = 4 * (quarter // 2)
    return (
        "{ .reg .b32 s, t, low, high; "
        f"shr.u32 s, $2, {shift}; and.b32 s, s, 0x07070707; {_TO_NIBBLES}"
        f"prmt.b32 low, {lower[0]:#x}, {lower[1]:#x}, s; "
        f"prmt.b32 high, {upper[0]:#x}, {upper[1]:#x}, s; "
        f"shl.b32 s, $2, {4 - shift}; {_JOIN} }}"
    )


# Indices in the bytes of s, below 8, become nibbles, the first one lowest.
_TO_NIBBLES = "shr.u32 t, s, 4; or.b32 s, s, t; prmt.b32 s, s, 0, 0x4420; "
# Lower and upper bytes and signs, in the top bits of the bytes of s, become four float16.
_JOIN = (
    "lop3.b32 high, s, 0x80808080, high, 0xEA; "  # s & mask | high
    "prmt.b32 $0, low, high, 0x5140; prmt.b32 $1, low, high, 0x7362;"
)


def _table(levels: tuple[int, ...], byte: int) -> int:
    """Return one byte of each of four levels in float16, the first one lowest."""
    halves = [struct.pack("<e", level / LEVEL_UNITS) for level in levels]
    return sum(half[byte] << 8 * at for at, half in enumerate(halves))
