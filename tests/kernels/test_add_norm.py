"""The fused norm against its steps, interpreted and on a card."""

import pytest
import torch

from ragflash_kernels.backend import Backend
from ragflash_kernels.columns import Columns
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.qmatmul.activations import ActivationBuffers, quantize_rows
from ragflash_kernels.rms_norm import add_norm, rms_norm
from tests.kernels.guarded import GuardedMemory

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SCALES = {"delta_scale": 0.5, "residual_scale": 1.25}


def expect(delta, residual, weight, post):
    """The residual and its norm in float64."""
    if delta is None:
        return residual.double(), rms_norm(residual.double(), weight, eps=1e-5)
    added = delta.partials.double().sum(0)[:, delta.start : delta.start + delta.width]
    if post is not None:
        added = rms_norm(added, post, eps=1e-5)
    total = (residual.double() + added * 0.5) * 1.25
    return total, rms_norm(total, weight, eps=1e-5)


def check(rows, width, parts, backend, monkeypatch, *, device="cpu", post=False,
          out_dtype=None, delta_dtype=torch.float32, eager=False):  # fmt: skip
    guard = GuardedMemory()
    delta = None
    if parts:
        partials = torch.randn(parts, rows, width + 64, device=device).to(delta_dtype)
        delta = Columns(guard.place(partials), 32, width)
    residual = guard.place(torch.randn(rows, width, device=device))
    weight = guard.place(torch.rand(width, device=device) + 0.5)
    post_weight = guard.place(torch.rand(width, device=device) + 0.5) if post else None
    total, norm = expect(delta, residual, weight, post_weight)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        found = add_norm(
            delta, residual, weight, eps=1e-5, quantized=out_dtype is None, backend=backend,
            post_weight=post_weight, out_dtype=out_dtype or torch.bfloat16, eager=eager, **SCALES,
        )  # fmt: skip
    guard.check()
    assert torch.allclose(residual.double(), total, rtol=1e-5, atol=1e-5)
    if out_dtype is not None:
        assert found.dtype == out_dtype
        assert torch.allclose(found.double(), norm.double(), rtol=TOLERANCE[out_dtype], atol=1e-5)
        return
    values = found.to_rows(rows, width)
    step = norm.abs().amax() / 127
    assert (values - norm).abs().max() <= step * 0.51
    blocks = found.q.shape[0]
    beyond = found.to_rows(rows, blocks * 256)[:, width:]
    assert torch.equal(beyond, torch.zeros_like(beyond))


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.TRITON])
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "width", "parts", "post"),
    [
        (1, 576, 3, False),
        (9, 64, 1, True),
        (2, 320, 2, True),
        (3, 640, 0, False),
        (2, 1088, 2, False),
    ],
)
def test_equals_sum_and_norm(rows, width, parts, post, out_dtype, backend, monkeypatch):
    if backend is Backend.TRITON:
        pytest.importorskip("triton")
    check(rows, width, parts, backend, monkeypatch, post=post, out_dtype=out_dtype)


def test_interpreted_grid_is_that_of_the_norm():
    pytest.importorskip("triton")
    residual, weight = torch.randn(3, 320), torch.rand(320)
    plain, found = (
        add_norm(
            None, residual, weight, eps=1e-6, quantized=quantized, out_dtype=torch.float32,
            backend=Backend.TRITON,
        )
        for quantized in (False, True)
    )  # fmt: skip
    expected = ActivationBuffers.from_rows(plain)
    assert torch.equal(found.to_rows(3, 320), expected.to_rows(3, 320))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("width", [576, 640, 2816, 5120, 8192])
def test_equals_sum_and_norm_on_a_card(width, post, eager, monkeypatch):
    if eager and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch is of sm_90")
    for rows, parts in ((1, 12), (9, 1), (21, 7), (32, 0)):
        check(rows, width, parts, Backend.GLUON, monkeypatch, device="cuda", post=post, eager=eager)
    for delta_dtype, out_dtype in ((torch.bfloat16, torch.bfloat16), (torch.float32,) * 2):
        check(100, width, 1, Backend.GLUON, monkeypatch, device="cuda", post=post, eager=eager,
              delta_dtype=delta_dtype, out_dtype=out_dtype)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_rows_grid_on_a_card_is_that_of_its_norm():
    residual, weight = torch.randn(21, 5120, device="cuda"), torch.rand(5120, device="cuda")
    plain = add_norm(None, residual, weight, eps=1e-6, quantized=False, out_dtype=torch.float32)
    found = add_norm(None, residual, weight, eps=1e-6, quantized=True).to_rows(21, 5120)
    # Squares are added in another order: the last bit of a norm decides ties of the grid.
    _, scales = quantize_rows(plain)
    steps = (found - plain).abs().view(21, -1, 32) / scales[..., None]
    assert steps.max() < 0.5 + 1e-3
    alone = add_norm(None, residual[20:], weight, eps=1e-6, quantized=True)
    assert torch.equal(alone.to_rows(1, 5120)[0], found[20])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 2, 9), (2, 8), (8,)), "2 rows of 9"),
        (((1, 3, 8), (2, 8), (8,)), "3 rows of 8"),
        (((1, 2, 8), (2, 8), (9,)), "weight"),
        (((1, 2, 8), (8,), (8,)), "residual"),
        (((1, 2, 8193), (2, 8193), (8193,)), "8192"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    delta, residual, weight = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(KernelInputError, match=message):
        add_norm(Columns.whole(delta), residual, weight, eps=1e-5, quantized=True)


@pytest.mark.parametrize(
    ("residual", "weight", "eps", "message"),
    [
        (torch.zeros(8, 2).t(), torch.zeros(8), 1e-5, "contiguous"),
        (torch.zeros(2, 8).half(), torch.zeros(8), 1e-5, "float16"),
        (torch.zeros(2, 8), torch.zeros(8).half(), 1e-5, "float16"),
        (torch.zeros(2, 8), torch.zeros(8), 0, "eps"),
    ],
)
def test_layouts_dtypes_and_a_bad_eps_are_refused(residual, weight, eps, message):
    with pytest.raises(KernelInputError, match=message):
        add_norm(None, residual, weight, eps=eps, quantized=True)
