"""The attention kernel on a card, at the shapes of real models."""

import dataclasses

import pytest
import torch

from ragflash_kernels.kv_codec import KvFormat
from tests.kernels.attention_cases import Case, Rows, make_case
from tests.kernels.guarded import GuardedMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEADS = {64: (3, 3), 128: (2, 4), 256: (4, 6)}  # of keys, and query heads for each
PAGES = tuple(range(1, 40))


def run(case: Case, formats: tuple[KvFormat, KvFormat], **options) -> torch.Tensor:
    from ragflash_kernels.paged_attention.launch import Visibility, paged_attention_triton

    seen = Visibility.causal(case.sequences, case.q.device, options.pop("window", None))
    return paged_attention_triton(
        case.q, case.keys, case.values, seen, page_tokens=case.page_tokens, scale=0.1,
        key_format=formats[0], value_format=formats[1], **options,
    )  # fmt: skip


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found.cpu().double() - expected).norm() / expected.norm()) < 1.5e-3


@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("kv_format", KvFormat)
def test_equals_the_reference(kv_format, head_dim, monkeypatch):
    formats = (kv_format, kv_format)
    for sequences in (
        [Rows(1, 0, (0,))],
        [Rows(1, 3000, PAGES)],
        [Rows(21, 4095, PAGES)],
        [Rows(16, 2501, PAGES), Rows(1, 17, (45,)), Rows(32, 255, (44, 43))],
    ):
        case = make_case(
            sequences, heads=HEADS[head_dim], head_dim=head_dim, page_tokens=256, formats=formats,
            device="cuda",
        )  # fmt: skip
        guard = GuardedMemory()
        case = dataclasses.replace(
            case, q=guard.place(case.q), keys=guard.place(case.keys),
            values=guard.place(case.values),
        )  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", guard.empty)
            found = run(case, formats)
        guard.check()
        assert close(found, case.expected(0.1)), sequences


def test_windows_and_mixed_formats():
    formats = (KvFormat.TQ4, KvFormat.Q8_0)
    case = make_case(
        [Rows(5, 3000, PAGES)], heads=(2, 2), head_dim=128, page_tokens=256, formats=formats,
        device="cuda",
    )  # fmt: skip
    assert close(run(case, formats, window=700), case.expected(0.1, window=700))


def test_a_row_does_not_depend_on_other_sequences():
    formats = (KvFormat.TQ3_0, KvFormat.TQ3_0)
    long, short = Rows(1, 5000, PAGES), Rows(1, 900, (41, 42, 43, 44))
    case = make_case(
        [long, short], heads=(4, 6), head_dim=256, page_tokens=256, formats=formats, device="cuda"
    )
    alone = dataclasses.replace(case, q=case.q[1:].contiguous(), sequences=[short])
    assert torch.equal(run(alone, formats)[0], run(case, formats)[1])
