"""Matrices of 4-bit blocks: exact for many rows, within bfloat16 rounding for few."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants

from ragflash.errors import SettingInvalid
from ragflash.gguf.reader import GGUFFile
from ragflash.models.packed import FEW_ROWS, PackedLinear, can_pack
from ragflash.models.registry import load_model
from ragflash.models.weights import WeightReader
from tests.quantise import quantise
from tests.tiny import write_tiny_llama

OUT, IN = 96, 512


def blocks_of(name: str, seed: int = 0) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal((OUT, IN)).astype(np.float32)
    return torch.from_numpy(quantise(values, GGMLQuantizationType[name]))


def dense(name: str, blocks: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(quants.dequantize(blocks.numpy(), GGMLQuantizationType[name]))


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, IN, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K"])
def test_many_rows_are_multiplied_exactly(name):
    blocks, bias, x = blocks_of(name), torch.arange(float(OUT)), rows_of(FEW_ROWS + 1)
    found = PackedLinear(blocks, name, bias)(x)
    torch.testing.assert_close(found, x @ dense(name, blocks).t() + bias, rtol=0, atol=3e-4)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K"])
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
        (["Q4_K"], 32, True),
        (["Q4_1", "Q4_0"], 64, False),
        (["Q8_0"], 64, False),
        (["Q4_0"], 48, False),
    ],
)
def test_what_can_stay_packed(formats, out_features, expected):
    assert can_pack(formats, out_features) is expected


def test_a_file_without_4_bit_matrices_is_refused(tmp_path):
    path = write_tiny_llama(tmp_path / "tiny.gguf", seed=1, quantized=True)
    with GGUFFile.open(path) as file, pytest.raises(SettingInvalid, match="Q4_0 or Q4_1 or Q4_K"):
        load_model(file, weights="packed")


def test_matrices_of_other_formats_beside_packed_ones_are_unpacked(tmp_path):
    """As in files whose V is better kept than Q and K."""
    rng = np.random.default_rng(3)
    writer = GGUFWriter(tmp_path / "mixed.gguf", "llama")
    kinds = {"q": "Q4_K", "k": "Q4_K", "v": "Q6_K"}
    for name, kind in kinds.items():
        values = rng.standard_normal((64, 256)).astype(np.float32)
        block_format = GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", quantise(values, block_format), raw_dtype=block_format)
        writer.add_tensor(f"{name}.bias", values[:, 0].copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    found = []
    with GGUFFile.open(tmp_path / "mixed.gguf") as file:
        for form in ("packed", "dense"):
            reader = WeightReader(file, dtype=torch.float32, device="cpu", form=form)
            linear = reader.linear(
                [f"{name}.weight" for name in kinds],
                in_features=256,
                out_features=[64, 64, 64],
                biases=[f"{name}.bias" for name in kinds],
            )
            found.append(linear(x))
    mixed, exact = found
    torch.testing.assert_close(mixed[:, 128:], exact[:, 128:])
    assert 0 < (mixed[:, :128] - exact[:, :128]).norm() < 0.006 * exact[:, :128].norm()
