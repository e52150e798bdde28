"""The largest logit against a plain search, interpreted and on a card."""

import pytest
import torch

from ragflash_kernels.backend import Backend
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.sample import largest
from tests.kernels.guarded import GuardedMemory

NAN, INF = float("nan"), float("inf")


def check(logits, valid, device, backend, monkeypatch):
    guard = GuardedMemory()
    expected = []
    for row in logits:
        numbers = [-INF if value != value else value for value in row[:valid].tolist()]  # noqa: PLR0124
        expected.append(numbers.index(max(numbers)))
    placed = guard.place(logits.to(device))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        found = largest(placed, valid, backend=backend)
    guard.check()
    assert found.dtype == torch.int32
    assert found.tolist() == expected


def rows_with_ties(columns):
    logits = torch.randint(-9, 10, (4, columns), generator=torch.Generator().manual_seed(0)).float()
    logits[1] = NAN
    logits[2] = -INF
    logits[3, ::3] = NAN
    return logits


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.TRITON])
@pytest.mark.parametrize(("columns", "valid"), [(1, 1), (300, 300), (5000, 4097), (5000, 2048)])
def test_the_first_of_the_largest(columns, valid, backend, monkeypatch):
    if backend is Backend.TRITON:
        pytest.importorskip("triton")
    check(rows_with_ties(columns), valid, "cpu", backend, monkeypatch)


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.TRITON])
def test_infinities_and_padding(backend, monkeypatch):
    if backend is Backend.TRITON:
        pytest.importorskip("triton")
    logits = torch.tensor([[-INF, NAN, -INF, 5.0], [1.0, INF, INF, 5.0], [NAN, -INF, NAN, 5.0]])
    check(logits, 3, "cpu", backend, monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("columns", "valid"), [(1, 1), (49152, 49152), (248320, 248077), (262144, 262144)]
)
def test_the_first_of_the_largest_on_a_card(columns, valid, monkeypatch):
    check(rows_with_ties(columns), valid, "cuda", Backend.TRITON, monkeypatch)
    check(torch.randn(21, columns), valid, "cuda", Backend.TRITON, monkeypatch)


@pytest.mark.parametrize(
    ("logits", "valid", "message"),
    [
        (torch.zeros(3), 1, "not float32"),
        (torch.zeros(3, 4, dtype=torch.float16), 1, "float16"),
        (torch.zeros(3, 4).t(), 1, "strides"),
        (torch.zeros(3, 4), 0, "0 valid"),
        (torch.zeros(3, 4), 5, "5 valid"),
    ],
)
def test_what_does_not_fit_is_refused(logits, valid, message):
    with pytest.raises(KernelInputError, match=message):
        largest(logits, valid)
