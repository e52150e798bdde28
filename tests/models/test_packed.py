"""Matrices of 4-bit blocks: exact for many rows, within bfloat16 rounding for few."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from ragflash.errors import SettingInvalid
from ragflash.gguf.reader import GGUFFile
from ragflash.models.packed import FEW_ROWS, PackedLinear, can_pack
from ragflash.models.registry import load_model
from tests.tiny import write_tiny_llama

OUT, IN = 96, 128


def blocks_of(name: str, seed: int = 0) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal((OUT, IN)).astype(np.float32)
    return torch.from_numpy(quants.quantize(values, GGMLQuantizationType[name]))


def dense(name: str, blocks: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(quants.dequantize(blocks.numpy(), GGMLQuantizationType[name]))


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, IN, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1"])
def test_many_rows_are_multiplied_exactly(name):
    blocks, bias, x = blocks_of(name), torch.arange(float(OUT)), rows_of(FEW_ROWS + 1)
    found = PackedLinear(blocks, name, bias)(x)
    torch.testing.assert_close(found, x @ dense(name, blocks).t() + bias, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("count", [1, 2, 7, FEW_ROWS])
def test_few_rows_are_within_bfloat16_rounding(name, count):
    blocks, x = blocks_of(name), rows_of(count)
    found = PackedLinear(blocks, name)(x)
    exact = x @ dense(name, blocks).t()
    assert found.dtype == torch.float32
    assert (found - exact).norm() < 0.006 * exact.norm()


def test_a_row_gives_the_same_whatever_few_rows_stand_beside():
    linear, x = PackedLinear(blocks_of("Q4_1"), "Q4_1"), rows_of(16)
    together = linear(x)
    for row in range(16):
        torch.testing.assert_close(together[row], linear(x[row : row + 1])[0], rtol=0.01, atol=0.02)


@pytest.mark.parametrize(
    ("formats", "out_features", "expected"),
    [
        (["Q4_1", "Q4_1"], 64, True),
        (["Q4_0"], 32, True),
        (["Q4_1", "Q4_0"], 64, False),
        (["Q8_0"], 64, False),
        (["Q4_0"], 48, False),
    ],
)
def test_what_can_stay_packed(formats, out_features, expected):
    assert can_pack(formats, out_features) is expected


def test_a_file_without_4_bit_matrices_is_refused(tmp_path):
    path = write_tiny_llama(tmp_path / "tiny.gguf", seed=1, quantized=True)
    with GGUFFile.open(path) as file, pytest.raises(SettingInvalid, match="Q4_0 or Q4_1"):
        load_model(file, weights="packed")
