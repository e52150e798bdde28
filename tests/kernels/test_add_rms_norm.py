"""The fused norm against its two steps, interpreted and on a card."""

import pytest
import torch

from ragflash_kernels.backend import Backend
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.rms_norm import add_rms_norm, rms_norm
from tests.kernels.guarded import GuardedMemory

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check(width, dtype, residual_dtype, device, backend, monkeypatch):
    guard = GuardedMemory()
    x = guard.place(torch.randn(3, width, device=device).to(dtype))
    residual = guard.place(torch.randn(3, width, device=device).to(residual_dtype))
    weight = guard.place(torch.rand(width, device=device) + 0.5)
    total = (x.float() + residual.float()).to(residual_dtype)
    expected = rms_norm(total.double(), weight.double(), eps=1e-5)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        found = add_rms_norm(x, residual, weight, eps=1e-5, backend=backend)
    guard.check()
    assert found.dtype == dtype
    assert torch.equal(residual, total)
    assert torch.allclose(found.double(), expected.double(), rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.TRITON])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [1, 576])
def test_equals_sum_and_norm(width, dtype, backend, monkeypatch):
    if backend is Backend.TRITON:
        pytest.importorskip("triton")
    check(width, dtype, torch.float32, "cpu", backend, monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("residual_dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [1, 100, 576, 5120, 17408])
def test_equals_sum_and_norm_on_a_card(width, dtype, residual_dtype, monkeypatch):
    check(width, dtype, residual_dtype, "cuda", Backend.TRITON, monkeypatch)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 8), (2, 9), (8,)), "2, 9"),
        (((2, 8), (2, 8), (9,)), "9"),
        (((8,), (8,), (8,)), "not twice"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(KernelInputError, match=message):
        add_rms_norm(*(torch.zeros(shape) for shape in shapes), eps=1e-5)


def test_views_and_a_bad_eps_are_refused():
    x = torch.zeros(8, 2).t()
    with pytest.raises(KernelInputError, match="contiguous"):
        add_rms_norm(x, torch.zeros(2, 8), torch.zeros(8), eps=1e-5)
    with pytest.raises(KernelInputError, match="eps"):
        add_rms_norm(torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(8), eps=0)
