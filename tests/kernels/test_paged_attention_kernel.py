"""The attention kernel, interpreted: formats, splits, windows, trees and rows that see nothing."""

import dataclasses

import pytest
import torch

from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.kv_codec import KvFormat
from tests.kernels.attention_cases import Case, Rows, make_case
from tests.kernels.guarded import GuardedMemory

pytest.importorskip("triton")

from ragflash_kernels.paged_attention.launch import (
    Visibility,
    attend,
    paged_attention_triton,
)

CPU = torch.device("cpu")
SEQUENCES = [Rows(2, 37, (3, 1)), Rows(1, 0, (2,))]


def small_case(formats: tuple[KvFormat, KvFormat], sequences: list[Rows] = SEQUENCES) -> Case:
    return make_case(sequences, heads=(1, 3), head_dim=64, page_tokens=32, formats=formats)


def run(case: Case, formats: tuple[KvFormat, KvFormat], window: int | None = None) -> torch.Tensor:
    return paged_attention_triton(
        case.q, case.keys, case.values, Visibility.causal(case.sequences, CPU, window),
        page_tokens=case.page_tokens, scale=0.125, key_format=formats[0],
        value_format=formats[1], split_tokens=32,
    )  # fmt: skip


@pytest.mark.parametrize(
    "formats",
    [
        (KvFormat.F16, KvFormat.F16),
        (KvFormat.TQ3_0, KvFormat.TQ3_0),
        *(
            pytest.param((kv_format, value_format), marks=pytest.mark.slow)
            for kv_format, value_format in (
                (KvFormat.Q8_0, KvFormat.Q8_0),
                (KvFormat.Q4_0, KvFormat.TQ4),
                (KvFormat.TQ4, KvFormat.Q4_0),
                (KvFormat.F16, KvFormat.TQ3_0),
            )
        ),
    ],
)
def test_equals_the_reference(formats, monkeypatch):
    case = small_case(formats)
    guard = GuardedMemory()
    case = dataclasses.replace(
        case, q=guard.place(case.q), keys=guard.place(case.keys), values=guard.place(case.values)
    )
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        found = run(case, formats)
    guard.check()
    expected = case.expected(0.125)
    assert (found - expected).norm() / expected.norm() < 1e-3


def test_a_window_hides_older_tokens():
    formats = (KvFormat.F16, KvFormat.F16)
    case = small_case(formats, [Rows(2, 70, (3, 1, 0))])
    expected = case.expected(0.125, window=9)
    assert (run(case, formats, window=9) - expected).norm() / expected.norm() < 1e-3


def test_a_tree_of_drafts_sees_its_branches():
    formats = (KvFormat.F16, KvFormat.F16)
    case = small_case(formats, [Rows(3, 5, (0,))])
    chain = Visibility.causal(case.sequences, CPU)
    tree = dataclasses.replace(chain, words=torch.tensor([0b001, 0b011, 0b101], dtype=torch.int32))
    found, _ = attend(case.q, case.keys, case.values, tree, page_tokens=32, scale=0.125)
    # The third row hangs on the first: the second token might not be there.
    keys, values = case.keys.clone(), case.values.clone()
    keys[0, :, 6], values[0, :, 6] = keys[0, :, 7], values[0, :, 7]
    other = dataclasses.replace(
        case, q=case.q[[0, 2]], plain_keys=keys, plain_values=values, sequences=[Rows(2, 5, (0,))]
    )
    assert torch.allclose(found[[0, 2]].double(), other.expected(0.125), atol=2e-3)
    assert torch.allclose(found[:2].double(), case.expected(0.125)[:2], atol=2e-3)


def test_a_row_that_sees_nothing_gives_zeros():
    case = small_case((KvFormat.F16, KvFormat.F16), [Rows(1, 0, (0,))])
    blind = dataclasses.replace(
        Visibility.causal(case.sequences, CPU), words=torch.tensor([0], dtype=torch.int32)
    )
    found, lse = attend(case.q, case.keys, case.values, blind, page_tokens=32, scale=0.125)
    assert not found.any()
    assert lse.isneginf().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_tokens": 24}, "24 tokens"),
        ({"page_tokens": 64}, "not pages of 64"),
        ({"key_format": KvFormat.Q8_0}, "keys"),
        ({"split_tokens": 48}, "48"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    case = small_case((KvFormat.F16, KvFormat.F16))
    options = {"page_tokens": 32, "scale": 0.125} | changes
    with pytest.raises(KernelInputError, match=message):
        attend(
            case.q, case.keys, case.values, Visibility.causal(case.sequences, CPU), **options
        )  # fmt: skip


def test_too_many_rows_of_a_sequence_are_refused():
    case = small_case((KvFormat.F16, KvFormat.F16), [Rows(33, 0, (0, 1))])
    with pytest.raises(KernelInputError, match="33 rows"):
        run(case, (KvFormat.F16, KvFormat.F16))
