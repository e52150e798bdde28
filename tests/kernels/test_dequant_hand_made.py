"""Blocks put together byte by byte, with values worked out on paper from the format's text."""

import struct
from collections.abc import Mapping

import numpy as np
import torch

from ragflash_kernels.dequant import dequantize
from ragflash_kernels.quant_layout import BLOCK_FORMATS

IQ4_LEVELS = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def unpack(block: bytes, name: str) -> list[float]:
    blocks = torch.frombuffer(bytearray(block), dtype=torch.uint8)[None]
    return dequantize(blocks, block_format=name, dtype=torch.float32)[0].tolist()


def block_with(name: str, contents: Mapping[int, bytes]) -> bytes:
    """A block of zeros with some bytes put at offsets."""
    block = bytearray(BLOCK_FORMATS[name].bytes_per_block)
    for offset, content in contents.items():
        assert not any(block[offset : offset + len(content)])
        block[offset : offset + len(content)] = content
    assert len(block) == BLOCK_FORMATS[name].bytes_per_block
    return bytes(block)


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def changed(values: list[float], changes: Mapping[int, float]) -> list[float]:
    return [changes.get(i, value) for i, value in enumerate(values)]


def test_unquantised_rows() -> None:
    assert unpack(struct.pack("<2f", 1.5, -0.1), "F32") == [1.5, float(np.float32(-0.1))]
    assert unpack(struct.pack("<2e", 1.5, -2.0), "F16") == [1.5, -2.0]
    assert unpack(bytes.fromhex("803f 20c0"), "BF16") == [1.0, -2.5]


def test_q4_0_block() -> None:
    packed = bytes((15 - i) << 4 | i for i in range(16))
    expected = [(i - 8) * 0.5 for i in range(16)] + [(15 - i - 8) * 0.5 for i in range(16)]
    assert unpack(half(0.5) + packed, "Q4_0") == expected


def test_q4_1_block() -> None:
    block = half(2.0) + half(-3.0) + bytes([0xF0] * 16)
    assert unpack(block, "Q4_1") == [-3.0] * 16 + [27.0] * 16


def test_q5_0_block() -> None:
    fifth_bits = 1 << 0 | 1 << 17  # of the first value, and of the second in the high halves
    block = struct.pack("<eI", 1.0, fifth_bits) + bytes([0x21] * 16)
    expected = changed([1.0 - 16] * 16 + [2.0 - 16] * 16, {0: 1.0, 17: 2.0})
    assert unpack(block, "Q5_0") == expected


def test_q5_1_block() -> None:
    block = struct.pack("<eeI", 0.25, 10.0, 1 << 31) + bytes(16)
    assert unpack(block, "Q5_1") == [10.0] * 31 + [14.0]


def test_q8_0_block() -> None:
    block = struct.pack("<e32b", 0.125, *range(-16, 16))
    assert unpack(block, "Q8_0") == [i * 0.125 for i in range(-16, 16)]


def test_q2_k_block() -> None:
    # Minimum 15 - k above scale k in byte k; the bytes 0xE4 hold 0, 1, 2, 3 from the lowest bits.
    scales = bytes((15 - k) << 4 | k for k in range(16))
    packed = bytearray([0xE4] * 64)
    packed[33] = 0x0C  # second half, second byte: only its second field, 3
    block = bytes(scales) + bytes(packed) + half(2.0) + half(0.5)
    expected = [2.0 * k * (k % 8 // 2) - 0.5 * (15 - k) for k in range(16) for _ in range(16)]
    assert expected[16 * 7] == 38.0  # k = 7, fourth field: 2 * 7 * 3 - 0.5 * 8
    changes = {
        128 + 1: -3.5,  # k = 8, first field: 0 - 0.5 * 7
        160 + 1: 57.5,  # k = 10, second: 2 * 10 * 3 - 0.5 * 5
        192 + 1: -1.5,  # k = 12, third
        224 + 1: -0.5,  # k = 14, fourth
    }
    assert unpack(block, "Q2_K") == changed(expected, changes)


def test_q3_k_block() -> None:
    block = block_with(
        "Q3_K",
        {
            5: b"\x01",  # high bit of value 5
            6: b"\x80",  # of value 128 + 96 + 6 = 230
            32: b"\x03",  # low bits of value 0
            95: b"\x40",  # of value 255
            96: b"\x21",  # low halves of scales 0 and 8
            104: b"\xe4",  # high bits 0, 1, 2, 3 of scales 0, 4, 8, 12
            108: half(0.5),
        },
    )
    scales = changed([-32.0] * 16, {0: -31.0, 4: -16.0, 8: 2.0, 12: 16.0})
    expected = [0.5 * scale * -4 for scale in scales for _ in range(16)]
    assert expected[64] == 32.0
    changes = {0: 15.5, 5: 0.0, 230: 0.0, 255: 48.0}
    assert unpack(block, "Q3_K") == changed(expected, changes)


# Sub-blocks 0, 4 and 7 have scales 2, 20, 49 and minima 3, 37, 31; the others have 0 and 0.
SIX_BIT_SCALES = {
    0: half(0.5),
    2: half(0.25),
    4: bytes([0b01_000010, 0, 0, 0b11_000000]),
    8: bytes([0b10_000011, 0, 0, 0b01_000000]),
    12: bytes([0x54, 0, 0, 0xF1]),
}
LOWERED_BY_MINIMA = [
    *([-0.75] * 32),
    *([0.0] * 96),
    *([-9.25] * 32),
    *([0.0] * 64),
    *([-7.75] * 32),
]


def test_q4_k_block() -> None:
    block = block_with(
        "Q4_K",
        {
            **SIX_BIT_SCALES,
            16: b"\x21",  # value 0 is 1, value 32 is 2
            16 + 64 + 7: b"\xf9",  # value 128 + 7 is 9, value 160 + 7 is 15
            16 + 127: b"\x30",  # value 224 + 31 is 3
        },
    )
    changes = {
        0: 0.25,  # 0.5 * 2 * 1 - 0.75
        135: 80.75,  # 0.5 * 20 * 9 - 9.25
        255: 65.75,  # 0.5 * 49 * 3 - 7.75
    }
    assert unpack(block, "Q4_K") == changed(LOWERED_BY_MINIMA, changes)


def test_q5_k_block() -> None:
    block = block_with(
        "Q5_K",
        {
            **SIX_BIT_SCALES,
            16: b"\x11",  # fifth bits of values 0 and 128
            16 + 31: b"\x80",  # of value 255
            48: b"\x21",
            48 + 127: b"\x30",
        },
    )
    changes = {
        0: 16.25,  # 0.5 * 2 * 17 - 0.75
        128: 150.75,  # 0.5 * 20 * 16 - 9.25
        255: 457.75,  # 0.5 * 49 * 19 - 7.75
    }
    assert unpack(block, "Q5_K") == changed(LOWERED_BY_MINIMA, changes)


def test_q6_k_block() -> None:
    block = block_with(
        "Q6_K",
        {
            0: b"\x21",  # low bits of value 0 are 1, of value 64 are 2
            64 + 32 + 5: b"\x70",  # of value 128 + 96 + 5 = 229 are 7
            128: b"\xe4",  # high bits of values 0, 32, 64, 96 are 0, 1, 2, 3
            128 + 32 + 5: b"\x40",  # of value 229 are 1
            192: struct.pack("<16b", *range(-8, 8)),
            208: half(0.5),
        },
    )
    expected = [0.5 * scale * -32 for scale in range(-8, 8) for _ in range(16)]
    changes = {
        0: 124.0,  # 0.5 * -8 * (1 - 32)
        32: 48.0,  # 0.5 * -6 * (16 - 32)
        64: -4.0,  # 0.5 * -4 * (34 - 32)
        96: -16.0,  # 0.5 * -2 * (48 - 32)
        229: -27.0,  # 0.5 * 6 * (23 - 32)
    }
    assert unpack(block, "Q6_K") == changed(expected, changes)


def test_iq4_nl_block() -> None:
    packed = bytes((15 - i) << 4 | i for i in range(16))
    expected = [2.0 * level for level in (*IQ4_LEVELS, *reversed(IQ4_LEVELS))]
    assert unpack(half(2.0) + packed, "IQ4_NL") == expected


def test_iq4_xs_block() -> None:
    packed = bytearray([0x88] * 128)  # level 8 is 1
    packed[0] = 0x0F  # value 0 is 113, value 16 is -127
    high_scales = struct.pack("<H", 2 << 0 | 3 << 14)
    low_scales = bytes([0x31, 0, 0, 0x50])
    block = half(0.5) + high_scales + low_scales + bytes(packed)
    scales = [33 - 32, 3 - 32, -32, -32, -32, -32, -32, 48 + 5 - 32]
    expected = [0.5 * scale for scale in scales for _ in range(32)]
    assert unpack(block, "IQ4_XS") == changed(expected, {0: 56.5, 16: -63.5})
