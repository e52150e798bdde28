"""The one entry for products: rows on the grid or floats, packed matrices or dense ones."""

import pytest
import torch

from ragflash_kernels.backend import Backend
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.qmatmul import (
    ActivationBuffers,
    PackedMatrix,
    multiply,
    pack_matrix,
    quantize,
    unpack_matrix,
)
from tests.kernels.guarded import GuardedMemory
from tests.kernels.quantised import random_blocks

gpu = pytest.mark.gpu
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def check_grid(rows, weight, backend, monkeypatch, *, limit=1e-6, eager=False):
    """Products of rows on the grid against float64; returns the parts."""
    packed = isinstance(weight, PackedMatrix)
    dense = unpack_matrix(weight, backend=Backend.REFERENCE) if packed else weight
    guard = GuardedMemory()
    x = torch.randn(rows, dense.shape[1], device=dense.device)
    buffers = ActivationBuffers.from_rows(x)
    buffers = ActivationBuffers(*map(guard.place, (buffers.q, buffers.scales, buffers.sums)))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        parts = multiply(buffers, rows, weight, backend=backend, eager=eager)
    guard.check()
    expected = buffers.to_rows(rows, dense.shape[1]).double() @ dense.double().t()
    error = (parts.double().sum(0) - expected).norm() / expected.norm()
    assert parts.dtype == torch.float32
    assert error < limit, float(error)
    return parts


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.TRITON])
def test_grid_times_records(backend, monkeypatch):
    if backend is Backend.TRITON:
        pytest.importorskip("triton")
    weight = pack_matrix(random_blocks("Q5_0", 33, 96), block_format="Q5_0")
    check_grid(17, weight, backend, monkeypatch)


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.TRITON])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "shape"), [(1, (40, 600)), (9, (7, 100)), (17, (32, 256))])
def test_grid_times_floats(rows, shape, dtype, backend, monkeypatch):
    if backend is Backend.TRITON:
        pytest.importorskip("triton")
    check_grid(rows, torch.randn(shape).to(dtype), backend, monkeypatch)


def test_a_row_on_the_grid_that_is_not_finite_gives_nan():
    x = torch.randn(2, 64)
    x[1, 3] = float("inf")
    weight = torch.randn(5, 64)
    for backend in (Backend.REFERENCE, Backend.TRITON):
        parts = multiply(quantize(x), 2, weight, backend=backend).sum(0)
        assert parts[0].isfinite().all()
        assert parts[1].isnan().all()


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.TRITON])
def test_floats_times_records_are_unpacked_into_the_work_space(backend):
    if backend is Backend.TRITON:
        pytest.importorskip("triton")
    weight = pack_matrix(random_blocks("Q4_0", 21, 96), block_format="Q4_0")
    x = torch.randn(40, 96)
    space = torch.full((21 * 96 + 1,), float("nan"))
    product = multiply(x, 40, weight, unpacked=space, backend=backend)
    dense = unpack_matrix(weight)
    assert torch.equal(product, (x @ dense.t())[None])
    assert torch.equal(space[:-1].view(21, 96), dense)
    assert space[-1].isnan()
    assert torch.equal(multiply(x, 40, weight, backend=backend), product)


def test_floats_times_floats_take_the_type_of_the_rows():
    x, weight = torch.randn(3, 8).half(), torch.randn(5, 8)
    product = multiply(x, 3, weight)
    assert torch.equal(product, (x @ weight.half().t())[None])


@gpu
@needs_card
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 5120), (96, 2560), (8960, 1536), (257, 600)])
def test_grid_times_floats_on_a_card(shape, dtype, eager, monkeypatch):
    if eager and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch is of sm_90")
    weight = torch.randn(shape, device="cuda").to(dtype)
    for rows in (1, 8, 16, 21, 32):
        check_grid(rows, weight, Backend.GLUON, monkeypatch, limit=3e-6, eager=eager)


@gpu
@needs_card
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_times_floats_does_not_depend_on_the_others(dtype):
    weight, x = torch.randn(96, 5120, device="cuda").to(dtype), torch.randn(32, 5120, device="cuda")
    together = multiply(quantize(x), 32, weight)
    for rows in (1, 7, 16, 21):
        alone = multiply(quantize(x[-rows:]), rows, weight)
        assert torch.equal(alone, together[:, -rows:])


@gpu
@needs_card
def test_bfloat16_rows_times_records_on_a_card():
    weight = pack_matrix(random_blocks("Q4_K", 300, 512, device="cuda"), block_format="Q4_K")
    x = torch.randn(100, 512, device="cuda").bfloat16()
    space = torch.empty(300 * 512, dtype=torch.bfloat16, device="cuda")
    product = multiply(x, 100, weight, unpacked=space)
    expected = x.double() @ unpack_matrix(weight, backend=Backend.REFERENCE).double().t()
    assert product.dtype == torch.bfloat16
    assert (product[0].double() - expected).norm() / expected.norm() < 6e-3


@pytest.mark.parametrize(
    ("x", "rows", "weight", "message"),
    [
        (torch.zeros(2, 8), 3, torch.zeros(4, 8), r"\[3, 8\]"),
        (torch.zeros(2, 9), 2, torch.zeros(4, 8), r"2, 9"),
        (torch.zeros(2, 8), 2, torch.zeros(4, 8, dtype=torch.int8), "int8"),
        (torch.zeros(2, 8), 2, torch.zeros(8, 4).t(), "weight"),
        (ActivationBuffers.from_rows(torch.zeros(2, 64)), 9, torch.zeros(4, 64), "9 rows"),
        (ActivationBuffers.from_rows(torch.zeros(2, 64)), 2, torch.zeros(4, 300), "300"),
    ],
)
def test_factors_that_do_not_fit_are_refused(x, rows, weight, message):
    with pytest.raises(KernelInputError, match=message):
        multiply(x, rows, weight)


def test_a_work_space_that_is_too_small_is_refused():
    weight = pack_matrix(random_blocks("Q4_0", 21, 96), block_format="Q4_0")
    with pytest.raises(KernelInputError, match="2015"):
        multiply(torch.zeros(2, 96), 2, weight, unpacked=torch.zeros(2015))
