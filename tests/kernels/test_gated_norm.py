"""Norm and gate of heads against plain torch, interpreted and on a card."""

import pytest
import torch
from torch.nn import functional

from ragflash_kernels.backend import Backend
from ragflash_kernels.columns import Columns
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.gated_norm import gated_norm
from ragflash_kernels.qmatmul.activations import ActivationBuffers
from tests.kernels.guarded import GuardedMemory


def inputs(rows: int, heads: int, dim: int, parts: int, device="cpu", dtype=torch.float32):
    """Heads, gates in parts among other columns, and weights."""
    o = torch.randn(rows, heads, dim, device=device).to(dtype)
    product = torch.randn(parts, rows, heads * dim + 5, device=device).to(dtype)
    return o, Columns.whole(product).split(5, heads * dim)[1], torch.rand(dim, device=device) + 0.5


def expected(o: torch.Tensor, gate: Columns, weight: torch.Tensor) -> torch.Tensor:
    x = o.double()
    normal = x / (x.square().mean(2, keepdim=True) + 1e-6).sqrt() * weight.double()
    return normal.flatten(1) * functional.silu(gate.partials[:, :, gate.start :].double().sum(0))


def run(arguments, monkeypatch, **options):
    guard = GuardedMemory()
    o, gate, weight = arguments
    arguments = (guard.place(o), gate, guard.place(weight))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        found = gated_norm(*arguments, eps=1e-6, **options)
    guard.check()
    return found


def check(arguments, dtype, backend, monkeypatch, tolerance):
    found = run(arguments, monkeypatch, quantized=False, out_dtype=dtype, backend=backend)
    assert found.dtype == dtype
    wanted = expected(*arguments)
    assert float((found.double() - wanted).norm() / wanted.norm()) < tolerance


def check_grid(arguments, backend, monkeypatch):
    """The integers and scales are those of the float32 result, bit for bit."""
    o, gate, _ = arguments
    plain = run(arguments, monkeypatch, quantized=False, out_dtype=torch.float32, backend=backend)
    found = run(arguments, monkeypatch, quantized=True, backend=backend)
    assert isinstance(found, ActivationBuffers)
    shape = (len(o), gate.width)
    assert torch.equal(found.to_rows(*shape), ActivationBuffers.from_rows(plain).to_rows(*shape))


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.TRITON])
@pytest.mark.parametrize(("heads", "dim", "parts"), [(5, 32, 3), (3, 256, 1), (34, 16, 1)])
def test_equals_norm_and_gate(heads, dim, parts, backend, monkeypatch):
    if backend is Backend.TRITON:
        pytest.importorskip("triton")
    arguments = inputs(2, heads, dim, parts)
    check(arguments, torch.float32, backend, monkeypatch, 1e-6)
    check_grid(arguments, backend, monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 9, 32])
@pytest.mark.parametrize(("heads", "dim"), [(48, 128), (5, 32), (3, 256), (34, 16)])
def test_equals_norm_and_gate_on_a_card(heads, dim, rows, monkeypatch):
    arguments = inputs(rows, heads, dim, 7, "cuda")
    check(arguments, torch.float32, Backend.TRITON, monkeypatch, 1e-6)
    check_grid(arguments, Backend.TRITON, monkeypatch)
    arguments = inputs(rows, heads, dim, 1, "cuda", torch.bfloat16)
    check(arguments, torch.bfloat16, Backend.TRITON, monkeypatch, 4e-3)


def test_refuses_what_does_not_fit():
    o, gate, weight = inputs(2, 3, 16, 1)
    for arguments, message in (
        ((o[0], gate, weight), "not .N, Hv, Dv."),
        ((torch.zeros(2, 3, 24), gate, weight), "heads of 24"),
        ((o[:1], gate, weight), "2 rows of 48"),
        ((o, gate, weight.double()), "float64"),
    ):
        with pytest.raises(KernelInputError, match=message):
            gated_norm(*arguments, eps=1e-6, quantized=True)
    with pytest.raises(KernelInputError, match="eps"):
        gated_norm(o, gate, weight, eps=0.0, quantized=True)
