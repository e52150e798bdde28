"""Inline PTX carried out in Python: what it unpacks is what the formats say."""

import re
import struct

import pytest

from ragflash_kernels.kv_codec.formats import LEVEL_UNITS, TQ3_LEVELS, TQ4_LEVELS
from ragflash_kernels.paged_attention import ptx as attention_ptx
from ragflash_kernels.prefill_attention.unpack import ptx as unpack_ptx
from ragflash_kernels.qmatmul import ptx as product_ptx
from ragflash_kernels.qmatmul.formats import IQ4_VALUES

MASK = 0xFFFFFFFF


def permute(low: int, high: int, selector: int) -> int:
    both = low | high << 32
    nibbles = [(selector >> 4 * i) & 15 for i in range(4)]
    assert all(nibble < 8 for nibble in nibbles)  # above, a byte's sign is spread
    return sum((both >> 8 * nibble & 255) << 8 * i for i, nibble in enumerate(nibbles))


def look_up(a: int, b: int, c: int, table: int) -> int:
    bits = [
        (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1))) & 1 for i in range(32)
    ]
    return sum(bit << i for i, bit in enumerate(bits))


def multiply_halves(a: int, b: int) -> int:
    both = (struct.unpack("<2e", struct.pack("<I", word)) for word in (a, b))
    products = [x * y for x, y in zip(*both, strict=True)]
    return int.from_bytes(struct.pack("<2e", *products), "little")


OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b & MASK,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": lambda a, b, c: permute(a, b, c & 0xFFFF),
    "lop3.b32": look_up,
    "mul.rn.f16x2": multiply_halves,
}


def carry_out(text: str, arguments: dict[str, int]) -> dict[str, int]:
    registers = dict(arguments)
    for statement in re.sub(r"[{}]", "", text).split(";"):
        operation, _, operands = statement.strip().partition(" ")
        if not operation or operation == ".reg":
            continue
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[s] if s in registers else int(s, 0) for s in sources]
        registers[target] = OPERATIONS[operation](*values)
    return registers


def halves(words: list[int]) -> list[float]:
    return list(struct.unpack("<4e", struct.pack("<2I", *words)))


def as_half(value: float) -> float:
    return struct.unpack("<e", struct.pack("<e", value))[0]


@pytest.mark.parametrize("quarter", range(4))
def test_values_of_tq4(quarter):
    for first in range(256):
        codes = [first, first ^ 255, 37, 200]
        found = carry_out(
            attention_ptx.tq4_values(quarter), {"$2": int.from_bytes(bytes(codes), "little")}
        )
        expected = []
        for byte in codes:
            code = byte >> 4 * (quarter // 2) & 15
            level = TQ4_LEVELS[code & 7] * (-1 if code & 8 else 1)
            expected.append(as_half(level / LEVEL_UNITS))
        assert halves([found["$0"], found["$1"]]) == expected


@pytest.mark.parametrize("word", [0x76543210, 0x01234567, 0x37152604])
def test_a_group_of_tq3(word):
    one, two = 0x40003C00, 0xBC003800  # 1 and 2, 0.5 and -1
    found = carry_out(unpack_ptx.tq3_group(), {"$4": word, "$5": one, "$6": two})
    codes = [word >> 4 * i & 15 for i in range(8)]
    levels = [TQ3_LEVELS[code & 3] / LEVEL_UNITS * (-1 if code & 4 else 1) for code in codes]
    scaled = [level * (1, 2, 0.5, -1)[i % 4] for i, level in enumerate(levels)]
    results = halves([found["$0"], found["$1"]]) + halves([found["$2"], found["$3"]])
    assert results == [as_half(value) for value in scaled]


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("bits", range(3))
@pytest.mark.parametrize("signed", [False, True])
def test_nibbles_with_high_bits(bits, row, signed):
    word, high = 0x8F3A51C6, 0xB27D94E8
    words = {"$2": word} | ({"$3": high} if bits else {})
    found = carry_out(product_ptx.nibbles(bits, row, signed=signed), words)
    for half in range(2):
        for i in range(4):
            code = word >> (8 * i + 4 * half) & 15
            if bits:
                at = 2 * row + half if bits == 1 else 4 * (row % 2) + 2 * half
                code |= (high >> (8 * i + at) & ((1 << bits) - 1)) << 4
            expected = code << (4 - bits) if signed else code
            assert found[f"${half}"] >> 8 * i & 255 == expected


def test_table_of_levels():
    for word in (0x76543210, 0xFEDCBA98, 0x0F1E2D3C):
        found = carry_out(product_ptx.table(), {"$2": word})
        for half in range(2):
            for i in range(4):
                level = IQ4_VALUES[word >> 4 * (4 * half + i) & 15]
                assert found[f"${half}"] >> 8 * i & 255 == level & 255
