"""Attention of a chunk whose lengths only the device knows, interpreted and on a card."""

import pytest
import torch

from ragflash_kernels.backend import Backend
from ragflash_kernels.chunk_attention import chunk_attention
from ragflash_kernels.errors import KernelInputError
from tests.kernels.guarded import GuardedMemory
from tests.kernels.prefill_cases import PrefillCase, make_case, relative_error

NAN = float("nan")


def run(case: PrefillCase, num_padding: int, backend, *, guard=None, **options) -> torch.Tensor:
    """Attend with rows of NaN behind those of the case, and pages that are none behind its own."""
    num_rows, device = len(case.q), case.q.device
    q = torch.full((num_rows + num_padding, *case.q.shape[1:]), NAN).half().to(device)
    q[:num_rows] = case.q
    pages = torch.cat((case.exact_pages, torch.full((5,), -1, device=device))).int()
    counts = torch.tensor([case.exact_before, num_rows], dtype=torch.int32, device=device)
    found = chunk_attention(
        guard.place(q) if guard else q, case.exact_keys, case.exact_values, pages, counts,
        backend=backend, **options,
    )  # fmt: skip
    assert not found[num_rows:].any()
    return found[:num_rows]


def small_case(num_rows: int, before: int) -> PrefillCase:
    return make_case(num_rows, before, heads=(3, 1), head_dim=64, page_tokens=32)


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.TRITON])
@pytest.mark.parametrize("window", [None, 1, 20, 90])
@pytest.mark.parametrize(("num_rows", "before"), [(33, 0), (40, 31), (70, 96), (1, 63)])
def test_equals_attention_over_pages(num_rows, before, window, backend, monkeypatch):
    case, guard = small_case(num_rows, before), GuardedMemory()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        found = run(
            case, 71, backend, guard=guard, scale=0.3, window=window, out_dtype=torch.float32
        )
    guard.check()
    assert relative_error(found, case.expected(0.3, window)) < 1e-3


def test_a_row_does_not_depend_on_padding():
    case = small_case(40, 31)
    options = {"scale": 0.3, "out_dtype": torch.half}
    expected = run(case, 0, Backend.TRITON, **options)
    for padding in (1, 24, 100):
        assert torch.equal(run(case, padding, Backend.TRITON, **options), expected)


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.TRITON])
def test_no_rows_give_zeros(backend):
    case = small_case(33, 0)
    counts = torch.zeros(2, dtype=torch.int32)
    found = chunk_attention(
        case.q.half().contiguous(), case.exact_keys, case.exact_values, case.exact_pages, counts,
        scale=1.0, out_dtype=torch.float32, backend=backend,
    )  # fmt: skip
    assert not found.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((32, 8), 128), ((24, 4), 256)])
@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize(("num_rows", "before"), [(33, 0), (500, 37), (512, 3000), (2001, 255)])
def test_equals_the_reference_on_a_card(num_rows, before, window, heads, head_dim):
    case = make_case(
        num_rows, before, heads=heads, head_dim=head_dim, page_tokens=256, device="cuda",
        dtype=torch.float16,
    )  # fmt: skip
    options = {"scale": head_dim**-0.5, "window": window, "out_dtype": torch.float32}
    expected = run(case, 0, Backend.REFERENCE, **options)
    found = run(case, 150, Backend.TRITON, **options)
    assert relative_error(found, expected) < 2e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(4, 3, 64)}, "q is torch.float32"),
        ({"q": torch.zeros(4, 3, 32).half()}, "heads of 32"),
        ({"keys": torch.zeros(4, 1, 32, 64)}, "keys are"),
        ({"values": torch.zeros(5, 1, 32, 64).half()}, "differently"),
        ({"pages": torch.zeros(4)}, "pages is"),
        ({"counts": torch.zeros(3, dtype=torch.int32)}, "3 counts"),
        ({"window": 0}, "window of 0"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    pages = torch.zeros(4, 1, 32, 64).half()
    arguments = {
        "q": torch.zeros(4, 3, 64).half(), "keys": pages, "values": pages,
        "pages": torch.zeros(4, dtype=torch.int32), "counts": torch.zeros(2, dtype=torch.int32),
        "scale": 1.0,
    }  # fmt: skip
    with pytest.raises(KernelInputError, match=message):
        chunk_attention(**arguments | changes)
