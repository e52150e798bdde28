"""`dequantize` against the gguf package, and against blocks packed by hand."""

import struct

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragflash_kernels.dequant import dequantize
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.quant_layout import BLOCK_FORMATS

FORMATS = sorted(BLOCK_FORMATS)
QUANTISED = [name for name in FORMATS if name.startswith("Q")]


def random_rows(name: str, rows: int, per_row: int, seed: int = 0) -> np.ndarray:
    """Random block bytes whose scales are finite, `[rows, row_bytes]`."""
    rng = np.random.default_rng(seed)
    sizes = BLOCK_FORMATS[name]
    if sizes.elements_per_block == 1:
        values = rng.standard_normal((rows, per_row)).astype(np.float32)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8)
    blocks = rng.integers(0, 256, (rows, per_row, sizes.bytes_per_block), dtype=np.uint8)
    scales = rng.standard_normal((rows, per_row, 2)).astype(np.float16).view(np.uint8)
    num_scale_bytes = 4 if name.endswith("_1") else 2
    blocks[:, :, :num_scale_bytes] = scales[:, :, :num_scale_bytes]
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_those_of_the_format_library(name: str) -> None:
    sizes = BLOCK_FORMATS[name]
    expected = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert (sizes.elements_per_block, sizes.bytes_per_block) == expected


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "per_row"), [(1, 1), (3, 5), (17, 2)])
def test_random_blocks_unpack_bit_for_bit(name: str, rows: int, per_row: int) -> None:
    blocks = random_rows(name, rows, per_row, seed=rows)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    values = dequantize(torch.from_numpy(blocks), block_format=name, dtype=torch.float32)
    assert values.shape == expected.shape
    assert np.array_equal(values.numpy().view(np.uint32), expected.view(np.uint32))


def test_hand_made_q4_0_block() -> None:
    packed = bytes((15 - i) << 4 | i for i in range(16))
    block = struct.pack("<e", 0.5) + packed
    expected = [(i - 8) * 0.5 for i in range(16)] + [(15 - i - 8) * 0.5 for i in range(16)]
    assert unpack(block, "Q4_0") == expected


def test_hand_made_q4_1_block() -> None:
    block = struct.pack("<ee", 2.0, -3.0) + bytes([0xF0] * 16)
    assert unpack(block, "Q4_1") == [-3.0] * 16 + [27.0] * 16


def test_hand_made_q5_0_block() -> None:
    fifth_bits = 1 << 0 | 1 << 17  # of the first value, and of the second in the high halves
    block = struct.pack("<eI", 1.0, fifth_bits) + bytes([0x21] * 16)
    expected = [1.0 - 16] * 16 + [2.0 - 16] * 16
    expected[0] += 16
    expected[17] += 16
    assert unpack(block, "Q5_0") == expected


def test_hand_made_q5_1_block() -> None:
    block = struct.pack("<eeI", 0.25, 10.0, 1 << 31) + bytes(16)
    assert unpack(block, "Q5_1") == [10.0] * 31 + [14.0]


def test_hand_made_q8_0_block() -> None:
    block = struct.pack("<e32b", 0.125, *range(-16, 16))
    assert unpack(block, "Q8_0") == [i * 0.125 for i in range(-16, 16)]


def test_hand_made_unquantised_rows() -> None:
    assert unpack(struct.pack("<2f", 1.5, -0.1), "F32") == [1.5, float(np.float32(-0.1))]
    assert unpack(struct.pack("<2e", 1.5, -2.0), "F16") == [1.5, -2.0]
    assert unpack(bytes.fromhex("803f 20c0"), "BF16") == [1.0, -2.5]


@pytest.mark.parametrize("name", QUANTISED)
@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(0.001, 1000), centre=st.floats(-50, 50))
def test_round_trip_stays_within_one_step(
    name: str, seed: int, spread: float, centre: float
) -> None:
    rng = np.random.default_rng(seed)
    values = (centre + spread * rng.standard_normal((2, 64))).astype(np.float32)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    unpacked = dequantize(torch.from_numpy(blocks), block_format=name, dtype=torch.float32)
    levels = 2 ** int(name[1]) - 1
    in_blocks = values.reshape(-1, 32)
    widest = 2 * np.abs(in_blocks).max(axis=1, keepdims=True)  # range that a step divides
    error = np.abs(unpacked.numpy().reshape(-1, 32) - in_blocks)
    # Half a step at best, a whole one where the top level is clipped; float16 scales add a little.
    assert np.all(error <= widest * (1.01 / levels + 2**-10) + 1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_other_types_round_the_float32_value_once(name: str, dtype: torch.dtype) -> None:
    blocks = torch.from_numpy(random_rows(name, 4, 3))
    wide = dequantize(blocks, block_format=name, dtype=torch.float32)
    narrow = dequantize(blocks, block_format=name, dtype=dtype)
    assert narrow.dtype == dtype
    assert torch.equal(narrow, wide.to(dtype))


def test_out_is_written_whole_and_returned() -> None:
    blocks = torch.from_numpy(random_rows("Q8_0", 3, 2))
    out = torch.full((3, 64), float("nan"))
    returned = dequantize(blocks, block_format="Q8_0", dtype=torch.float32, out=out)
    assert returned is out
    assert torch.equal(out, dequantize(blocks, block_format="Q8_0", dtype=torch.float32))


def test_rows_of_a_larger_matrix_unpack_alike() -> None:
    blocks = torch.from_numpy(random_rows("Q4_1", 6, 3))
    whole = dequantize(blocks, block_format="Q4_1", dtype=torch.float32)
    every_second = dequantize(blocks[::2, 20:40], block_format="Q4_1", dtype=torch.float32)
    assert torch.equal(every_second, whole[::2, 32:64])


def test_no_rows_give_an_empty_matrix() -> None:
    empty = torch.empty((0, 36), dtype=torch.uint8)
    assert dequantize(empty, block_format="Q4_0", dtype=torch.float32).shape == (0, 64)


@pytest.mark.parametrize(
    ("blocks", "options", "message"),
    [
        (torch.zeros(1, 18, dtype=torch.uint8), {"block_format": "Q4_K"}, "Q4_K"),
        (torch.zeros(1, 17, dtype=torch.uint8), {}, "17 bytes"),
        (torch.zeros(1, 18, dtype=torch.int8), {}, "uint8"),
        (torch.zeros(18, dtype=torch.uint8), {}, "uint8"),
        (torch.zeros(18, 18, dtype=torch.uint8).T, {}, "contiguous"),
        (torch.zeros(1, 18, dtype=torch.uint8), {"dtype": torch.int32}, "int32"),
        (torch.zeros(1, 18, dtype=torch.uint8), {"out": torch.zeros(1, 31)}, "out is"),
        (torch.zeros(1, 18, dtype=torch.uint8), {"out": torch.zeros(1, 32).half()}, "out is"),
    ],
)
def test_wrong_input_is_refused(
    blocks: torch.Tensor, options: dict[str, object], message: str
) -> None:
    arguments: dict[str, object] = {"block_format": "Q4_0", "dtype": torch.float32, **options}
    with pytest.raises(KernelInputError, match=message):
        dequantize(blocks, **arguments)  # type: ignore[arg-type]


def unpack(block: bytes, name: str) -> list[float]:
    blocks = torch.frombuffer(bytearray(block), dtype=torch.uint8)[None]
    return dequantize(blocks, block_format=name, dtype=torch.float32)[0].tolist()
