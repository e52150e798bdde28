"""`dequantize` against the format's own library, on bytes of any value and on packed matrices."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ragflash_kernels.dequant import dequantize, reference
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.quant_layout import BLOCK_FORMATS
from tests.quantise import quantise

FORMATS = sorted(BLOCK_FORMATS)
QUANTISED = [name for name in FORMATS if "Q" in name]


def random_rows(name: str, rows: int, per_row: int, seed: int = 0) -> np.ndarray:
    """Bytes of any value: scales too are infinite, not a number or subnormal now and then."""
    rng = np.random.default_rng(seed)
    row_bytes = per_row * BLOCK_FORMATS[name].bytes_per_block
    return rng.integers(0, 256, (rows, row_bytes), dtype=np.uint8)


def tame_rows(name: str, rows: int, per_row: int, seed: int = 0) -> np.ndarray:
    """Packed values of a normal distribution."""
    sizes = BLOCK_FORMATS[name]
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, per_row * sizes.elements_per_block)).astype(np.float32)
    return quantise(values, gguf.GGMLQuantizationType[name]).view(np.uint8)


def same_bits(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    """Whether float32 values are equal bit by bit; two that are not a number count as equal."""
    mine = ours.numpy()
    equal = mine.view(np.uint32) == theirs.view(np.uint32)
    return mine.shape == theirs.shape and bool(np.all(equal | np.isnan(mine) & np.isnan(theirs)))


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_those_of_the_format_library(name: str) -> None:
    sizes = BLOCK_FORMATS[name]
    expected = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert (sizes.elements_per_block, sizes.bytes_per_block) == expected


@pytest.mark.parametrize("name", FORMATS)
@given(rows=st.integers(1, 9), per_row=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_random_blocks_unpack_bit_for_bit(name: str, rows: int, per_row: int, seed: int) -> None:
    blocks = random_rows(name, rows, per_row, seed)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    values = dequantize(torch.from_numpy(blocks), block_format=name, dtype=torch.float32)
    assert same_bits(values, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_of_several_chunks_unpack_bit_for_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 1000)
    blocks = tame_rows(name, 11, 3)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    values = dequantize(torch.from_numpy(blocks), block_format=name, dtype=torch.float32)
    assert same_bits(values, expected)


@pytest.mark.parametrize("name", QUANTISED)
def test_what_was_packed_comes_back(name: str) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((4, 512)).astype(np.float32) * [[1.0], [0.02], [50.0], [0.0]]
    values[1] = np.abs(values[1])
    packed = quantise(values.astype(np.float32), gguf.GGMLQuantizationType[name])
    unpacked = dequantize(torch.from_numpy(packed), block_format=name, dtype=torch.float32)
    error = np.sqrt(((unpacked.numpy() - values) ** 2).mean(axis=1))
    bits = int(name.lstrip("IQ")[0])
    assert np.all(error[:3] <= 2 * 2.0**-bits * np.sqrt((values[:3] ** 2).mean(axis=1)))
    assert error[3] == 0


class LargestResult(TorchDispatchMode):
    """Notes the bytes of the largest tensor that any operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.num_bytes = max(self.num_bytes, result.numel() * result.element_size())
        return result


@pytest.mark.parametrize("name", FORMATS)
def test_beside_the_result_there_is_one_chunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 4096)
    blocks = torch.from_numpy(tame_rows(name, 64, 512 // BLOCK_FORMATS[name].elements_per_block))
    out = torch.empty(512, 64).t()
    with LargestResult() as largest:
        dequantize(blocks, block_format=name, dtype=torch.float32, out=out)
    assert 0 < largest.num_bytes <= 4096 * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_other_types_round_the_float32_value_once(name: str, dtype: torch.dtype) -> None:
    blocks = torch.from_numpy(tame_rows(name, 4, 3))
    wide = dequantize(blocks, block_format=name, dtype=torch.float32)
    narrow = dequantize(blocks, block_format=name, dtype=dtype)
    assert narrow.dtype == dtype
    assert torch.equal(narrow, wide.to(dtype))


def test_out_is_written_whole_and_returned() -> None:
    blocks = torch.from_numpy(tame_rows("Q8_0", 3, 2))
    out = torch.full((64, 3), float("nan")).t()
    returned = dequantize(blocks, block_format="Q8_0", dtype=torch.float32, out=out)
    assert returned is out
    assert torch.equal(out, dequantize(blocks, block_format="Q8_0", dtype=torch.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_a_matrix_unpack_alike(name: str) -> None:
    sizes = BLOCK_FORMATS[name]
    blocks = torch.from_numpy(tame_rows(name, 6, 3))
    whole = dequantize(blocks, block_format=name, dtype=torch.float32)
    second = slice(sizes.bytes_per_block, 2 * sizes.bytes_per_block)
    for rows in (slice(2, 3), slice(1, 5), slice(None, None, 2)):
        part = dequantize(blocks[rows, second], block_format=name, dtype=torch.float32)
        columns = slice(sizes.elements_per_block, 2 * sizes.elements_per_block)
        assert torch.equal(part, whole[rows, columns])


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_may_lie_anywhere(name: str) -> None:
    blocks = tame_rows(name, 2, 1)
    shifted = torch.from_numpy(np.concatenate([[np.uint8(0)], blocks.ravel()]))[1:]
    values = dequantize(shifted.view(2, -1), block_format=name, dtype=torch.float32)
    assert same_bits(values, gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]))


def test_no_rows_give_an_empty_matrix() -> None:
    empty = torch.empty((0, 36), dtype=torch.uint8)
    assert dequantize(empty, block_format="Q4_0", dtype=torch.float32).shape == (0, 64)


@pytest.mark.parametrize(
    ("blocks", "options", "message"),
    [
        (torch.zeros(1, 18, dtype=torch.uint8), {"block_format": "IQ2_S"}, "IQ2_S"),
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
