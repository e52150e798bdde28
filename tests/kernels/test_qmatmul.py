"""Records against the format library, the grid, the reference, and the kernels interpreted."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragflash_kernels.backend import Backend, pick_backend
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.qmatmul import PackedMatrix, pack_matrix, qmatmul, unpack_matrix
from ragflash_kernels.qmatmul.activations import ActivationBuffers, quantize_rows
from ragflash_kernels.qmatmul.formats import RECORD_FORMATS, Scales
from ragflash_kernels.quant_layout import BLOCK_FORMATS
from tests.kernels.guarded import GuardedMemory
from tests.kernels.quantised import random_blocks

FORMATS = list(RECORD_FORMATS)
INTERPRETED = ["Q4_K", "Q6_K", "Q5_0", "Q8_0", "IQ4_XS"]  # every way to store codes and scales


def columns_of(name: str, steps: int) -> int:
    """Columns that make records of so many steps, an odd number of records."""
    return 3 * 32 * steps if BLOCK_FORMATS[name].elements_per_block == 32 else 768


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 32, 70])
@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_records_hold_what_the_format_library_reads(name, rows, steps):
    blocks = random_blocks(name, rows, columns_of(name, steps), seed=rows)
    expected = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name])
    values = unpack_matrix(pack_matrix(blocks, block_format=name)).numpy()
    assert values.shape == expected.shape
    assert np.array_equal(values, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_records_take_at_most_three_percent_more(name):
    for columns in (1024, 5120, 17408):
        blocks = torch.zeros(
            (64, columns // BLOCK_FORMATS[name].elements_per_block, 1), dtype=torch.uint8
        ).repeat(1, 1, BLOCK_FORMATS[name].bytes_per_block)
        packed = pack_matrix(blocks.flatten(1), block_format=name)
        assert packed.records.numel() <= 1.03 * blocks.numel()


@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_records_are_aligned_for_sixteen_byte_loads(name):
    for steps in {RECORD_FORMATS[name].steps(columns_of(name, s)) for s in (1, 2, 4, 8)}:
        offsets = RECORD_FORMATS[name].offsets(steps)
        parts = (offsets.high, offsets.scales, offsets.minima, offsets.factors, offsets.size)
        assert all(part % 16 == 0 for part in parts)


def test_slabs_are_packed_as_the_whole(monkeypatch):
    blocks = random_blocks("Q4_K", 200, 512)
    whole = pack_matrix(blocks, block_format="Q4_K")
    monkeypatch.setattr("ragflash_kernels.qmatmul.packing._SLAB_ELEMENTS", 64 * 512)
    assert torch.equal(pack_matrix(blocks, block_format="Q4_K").records, whole.records)


@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-90, 90), rows=st.integers(1, 3))
def test_grid_is_within_half_a_step_and_the_same_for_any_rows(seed, exponent, rows):
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    q, scales = quantize_rows(x)
    assert q.abs().max() <= 127
    grid = q.double().unflatten(1, (-1, 32)) * scales.double()[..., None]
    off = (grid - x.double().unflatten(1, (-1, 32))).abs().amax(2)
    assert (off <= scales.double() * 0.50001).all()
    assert torch.equal(scales.double() * 12582912, (scales * 12582912).double())
    alone_q, alone_scales = quantize_rows(x[-1:])
    assert torch.equal(alone_q[0], q[-1])
    assert torch.equal(alone_scales[0], scales[-1])


def test_grid_of_zeros_tiny_and_huge_values():
    x = torch.zeros(4, 32)
    x[1, 3] = 1e-38
    x[2, 3] = 1e31
    x[3, 3] = float("nan")
    q, scales = quantize_rows(x)
    assert not q.any()
    assert scales[:2].tolist() == [[0.0], [0.0]]
    assert scales[2:].isnan().all()


@pytest.mark.parametrize("name", FORMATS)
def test_reference_multiplies_the_grid(name):
    columns = columns_of(name, 2)
    blocks = random_blocks(name, 37, columns)
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(1))
    y = qmatmul(x, pack_matrix(blocks, block_format=name))
    dense = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name])
    close = x.double() @ torch.from_numpy(dense).double().t()
    assert y.dtype == torch.float32
    assert (y - close).norm() / close.norm() < 0.01


def exact(x: torch.Tensor, weight: PackedMatrix) -> torch.Tensor:
    q, scales = quantize_rows(x)
    grid = q.double().unflatten(1, (-1, 32)) * scales.double()[..., None]
    return grid.flatten(1) @ unpack_matrix(weight).double().t()


@pytest.mark.parametrize("name", INTERPRETED)
@pytest.mark.parametrize("num_rows", [1, pytest.param(19, marks=pytest.mark.slow)])
def test_interpreted_kernel_equals_the_reference(name, num_rows, monkeypatch):
    pytest.importorskip("triton")
    columns = 256 if BLOCK_FORMATS[name].elements_per_block == 256 else 96
    guard = GuardedMemory()
    weight = pack_matrix(random_blocks(name, 21, columns), block_format=name)
    weight = PackedMatrix(guard.place(weight.records), name, 21, columns)
    generator = torch.Generator().manual_seed(2)
    x = guard.place(torch.randn(num_rows, columns, generator=generator).half())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        y = qmatmul(x, weight, backend=Backend.TRITON)
        dense = unpack_matrix(weight, dtype=torch.float16, backend=Backend.TRITON)
    guard.check()
    assert torch.equal(dense, unpack_matrix(weight).half())
    expected = exact(x, weight)
    assert (y - expected).norm() / expected.norm() < 1e-6


def test_interpreted_quantiser_equals_the_reference_bit_for_bit():
    pytest.importorskip("triton")
    from ragflash_kernels.qmatmul.launch import quantize_rows_triton

    x = torch.randn(9, 320, generator=torch.Generator().manual_seed(3))
    x[2, 64:96] = 0
    found, expected = quantize_rows_triton(x), ActivationBuffers.from_rows(x)
    assert torch.equal(found.to_rows(9, 512), expected.to_rows(9, 512))
    sums = found.sums.permute(1, 3, 0, 2, 4).flatten(0, 1)[:9]
    assert not (sums[..., 0].contiguous().view(torch.int32) & 8191).any()
    assert torch.equal(sums, expected.sums.permute(1, 3, 0, 2, 4).flatten(0, 1)[:9])


def test_the_device_picks_the_backend():
    assert pick_backend(torch.device("cpu")) is Backend.REFERENCE


@pytest.mark.parametrize(
    ("blocks", "name", "message"),
    [
        (torch.zeros(1, 18, dtype=torch.uint8), "F16", "F16"),
        (torch.zeros(1, 17, dtype=torch.uint8), "Q4_0", "17 bytes"),
        (torch.zeros(0, 18, dtype=torch.uint8), "Q4_0", "uint8"),
        (torch.zeros(1, 18), "Q4_0", "float32"),
        (torch.zeros(18, dtype=torch.uint8), "Q4_0", "uint8"),
    ],
)
def test_matrices_that_cannot_be_packed_are_refused(blocks, name, message):
    with pytest.raises(KernelInputError, match=message):
        pack_matrix(blocks, block_format=name)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 64), "64"),
        (torch.zeros(33, 32), "33"),
        (torch.zeros(0, 32), "0, 32"),
        (torch.zeros(32), "rows"),
        (torch.zeros(1, 32, dtype=torch.float64), "float64"),
        (torch.zeros(32, 2).t(), "strides"),
        (torch.zeros(1, 32, device="meta"), "meta"),
    ],
)
def test_activations_that_do_not_fit_are_refused(x, message):
    weight = pack_matrix(torch.zeros(1, 18, dtype=torch.uint8), block_format="Q4_0")
    with pytest.raises(KernelInputError, match=message):
        qmatmul(x, weight)


def test_unpacking_into_what_does_not_fit_is_refused():
    weight = pack_matrix(torch.zeros(1, 18, dtype=torch.uint8), block_format="Q4_0")
    with pytest.raises(KernelInputError, match="int8"):
        unpack_matrix(weight, dtype=torch.int8)
    with pytest.raises(KernelInputError, match=r"out is \(1, 31\)"):
        unpack_matrix(weight, out=torch.zeros(1, 31))


def test_every_kind_of_scale_is_interpreted_or_like_one_that_is():
    kinds = {RECORD_FORMATS[name].scales for name in INTERPRETED}
    assert kinds == set(Scales)
