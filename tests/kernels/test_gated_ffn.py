"""The gate of a feed-forward part against its formula, interpreted and on a card."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from ragflash_kernels.backend import Backend
from ragflash_kernels.columns import Columns
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.gated_ffn import Activation, gated
from ragflash_kernels.qmatmul.activations import ActivationBuffers
from tests.kernels.guarded import GuardedMemory

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
ACTIVATIONS = {
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
}


def check(rows, width, parts, activation, backend, monkeypatch, *, device="cpu", out_dtype=None,
          dtype=torch.float32, eager=False):  # fmt: skip
    guard = GuardedMemory()
    product = guard.place(torch.randn(parts, rows, 2 * width, device=device).to(dtype) * 2)
    gate, up = Columns.whole(product).split(width, width)
    total = product.double().sum(0)
    expected = ACTIVATIONS[activation](total[:, :width]) * total[:, width:]
    with monkeypatch.context() as patch, np.errstate(over="ignore"):  # of interpreted exponentials
        patch.setattr(torch, "empty", guard.empty)
        found = gated(
            gate, up, activation, quantized=out_dtype is None,
            out_dtype=out_dtype or torch.bfloat16, eager=eager, backend=backend,
        )  # fmt: skip
    guard.check()
    if out_dtype is not None:
        assert found.dtype == out_dtype
        assert torch.allclose(found.double(), expected, rtol=TOLERANCE[out_dtype], atol=3e-6)
        return
    values = found.to_rows(rows, found.q.shape[0] * 256)
    assert torch.equal(values[:, width:], torch.zeros_like(values[:, width:]))
    assert (values[:, :width] - expected).abs().max() <= expected.abs().max() / 127 * 0.51


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.TRITON])
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width", "parts"), [(1, 96, 3), (9, 320, 1)])
def test_equals_the_formula(rows, width, parts, out_dtype, activation, backend, monkeypatch):
    if backend is Backend.TRITON:
        pytest.importorskip("triton")
    check(rows, width, parts, activation, backend, monkeypatch, out_dtype=out_dtype)


@pytest.mark.parametrize("activation", list(Activation))
def test_large_gates_stay_finite(activation):
    pytest.importorskip("triton")
    gate = Columns.whole(torch.tensor([[[-1e4, 100.0, 1e4]]]))
    up = Columns.whole(torch.ones(1, 1, 3))
    for backend in (Backend.REFERENCE, Backend.TRITON):
        with np.errstate(over="ignore"):
            found = gated(
                gate, up, activation, quantized=False, out_dtype=torch.float32, backend=backend
            )
        assert torch.equal(found.abs(), torch.tensor([[0.0, 100.0, 1e4]]))


def test_factors_of_different_shapes_and_unknown_functions_are_refused():
    gate, up = (Columns.whole(torch.zeros(1, 2, width)) for width in (8, 9))
    with pytest.raises(KernelInputError, match="2 of 9"):
        gated(gate, up, "silu", quantized=True)
    with pytest.raises(KernelInputError, match="relu"):
        gated(gate, gate, "relu", quantized=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("width", [1536, 2048, 9728, 17408])
def test_equals_the_formula_on_a_card(width, activation, eager, monkeypatch):
    if eager and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch is of sm_90")
    options = {"device": "cuda", "eager": eager}
    for rows, parts in ((1, 7), (16, 1), (21, 5)):
        check(rows, width, parts, activation, Backend.GLUON, monkeypatch, **options)
    for dtype in (torch.float32, torch.bfloat16):
        check(100, width, 1, activation, Backend.GLUON, monkeypatch, out_dtype=dtype,
              dtype=dtype, **options)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_grid_on_a_card_is_that_of_the_values():
    gate, up = Columns.whole(torch.randn(7, 21, 3072, device="cuda")).split(1536, 1536)
    plain = gated(gate, up, "silu", quantized=False, out_dtype=torch.float32)
    found = gated(gate, up, "silu", quantized=True)
    expected = ActivationBuffers.from_rows(plain)
    assert torch.equal(found.to_rows(21, 1536), expected.to_rows(21, 1536))
