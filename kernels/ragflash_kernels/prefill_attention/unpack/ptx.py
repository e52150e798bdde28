"""The PTX of unpacking, as a string; it runs on sm_80 and later."""

import struct

from ragflash_kernels.kv_codec.formats import LEVEL_UNITS, TQ3_LEVELS

GROUP_CONSTRAINTS = "=&r,=&r,=&r,=&r,r,r,r"


def tq3_group() -> str:
    """Return the look-up of a group of eight codes of TQ3_0 as float16, scaled.

    Results: four words of two values, in order. Arguments: eight nibbles, a sign and two bits of a
    level; two scales for the words 0 and 2, and two for 1 and 3. The nibbles select from tables of
    the levels' lower and upper bytes, four at a time.
    """
    lower, upper = (f"{_levels(1, byte):#x}, {_levels(-1, byte):#x}" for byte in (0, 1))
    words = []
    for first, codes in ((0, "$4"), (2, "c")):
        words.append(
            f"prmt.b32 low, {lower}, {codes}; prmt.b32 high, {upper}, {codes}; "
            f"prmt.b32 ${first}, low, high, 0x5140; prmt.b32 ${first + 1}, low, high, 0x7362; "
            f"mul.rn.f16x2 ${first}, ${first}, $5; mul.rn.f16x2 ${first + 1}, ${first + 1}, $6; "
        )
    return f"{{ .reg .b32 c, low, high; {words[0]}shr.u32 c, $4, 16; {words[1]}}}"


def _levels(sign: int, byte: int) -> int:
    """Return one byte of each of the four levels in float16, the first one lowest."""
    halves = [struct.pack("<e", sign * level / LEVEL_UNITS) for level in TQ3_LEVELS]
    return sum(half[byte] << 8 * at for at, half in enumerate(halves))
