"""Attention of a chunk: the reference, and the pieces and kernels of a card, interpreted."""

import dataclasses

import pytest
import torch

from ragflash_kernels.columns import Columns
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.kv_codec import KvFormat, decode_pages, encode_pages
from ragflash_kernels.prefill_attention import (
    PrefillBackend,
    PrefillWorkspace,
    decode_pages_into,
    pick_prefill_backend,
    prefill_attention,
)
from tests.kernels.guarded import GuardedMemory
from tests.kernels.prefill_cases import PrefillCase, make_case, relative_error

PACKED = [kv_format for kv_format in KvFormat if kv_format is not KvFormat.F16]
TQ3 = (KvFormat.TQ3_0, KvFormat.TQ3_0)
# What the interpreter computes in float16 parts.
TOLERANCE = 1e-3


def small_case(
    num_rows: int,
    exact_before: int,
    packed_pages: int = 0,
    formats: tuple[KvFormat, KvFormat] | None = None,
) -> PrefillCase:
    return make_case(
        num_rows, exact_before, packed_pages, heads=(3, 1), head_dim=64, page_tokens=32,
        formats=formats,
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("exact_before", [0, 31, 32, 90])
@pytest.mark.parametrize("num_rows", [1, 33, 70])
def test_the_reference_equals_attention_over_pages(num_rows, exact_before, window):
    case = small_case(num_rows, exact_before)
    found = case.run(PrefillBackend.REFERENCE, scale=0.3, window=window)
    torch.testing.assert_close(found, case.expected(0.3, window), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kv_format", PACKED)
def test_the_reference_sees_packed_history_first(kv_format):
    case = small_case(40, 70, 3, (kv_format, KvFormat.Q8_0))
    found = case.run(PrefillBackend.REFERENCE, scale=0.3)
    torch.testing.assert_close(found, case.expected(0.3), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("num_rows", "exact_before", "packed_pages", "formats"),
    [
        (33, 0, 0, None),
        (40, 31, 0, None),
        (40, 96, 0, None),
        (5, 70, 3, TQ3),
        pytest.param(70, 32, 0, TQ3, marks=pytest.mark.slow),
        pytest.param(33, 1, 2, (KvFormat.Q4_0, KvFormat.Q8_0), marks=pytest.mark.slow),
        pytest.param(33, 1, 2, (KvFormat.Q8_0, KvFormat.TQ4), marks=pytest.mark.slow),
    ],
)
def test_pieces_equal_the_reference(num_rows, exact_before, packed_pages, formats, monkeypatch):
    case = small_case(num_rows, exact_before, packed_pages, formats)
    guard = GuardedMemory()
    case = dataclasses.replace(case, q=guard.place(case.q))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        found = case.run(PrefillBackend.TRITON, scale=0.125, segment_tokens=64)
    guard.check()
    assert relative_error(found, case.expected(0.125)) < TOLERANCE


@pytest.mark.parametrize(("window", "formats"), [(9, None), (50, None), (20, TQ3)])
def test_a_window_hides_older_tokens(window, formats):
    case = small_case(40, 70, 2, formats)
    found = case.run(PrefillBackend.TRITON, scale=0.125, window=window, segment_tokens=160)
    assert relative_error(found, case.expected(0.125, window)) < TOLERANCE


def test_large_scores_do_not_overflow():
    case = small_case(33, 40)
    found = case.run(PrefillBackend.TRITON, scale=1e3, segment_tokens=64)
    assert relative_error(found, case.run(PrefillBackend.REFERENCE, scale=1e3)) < 0.02


def test_more_pieces_than_four_are_merged_in_goes():
    case = small_case(33, 160, 5, (KvFormat.Q8_0, KvFormat.Q8_0))  # four splits, then one, twice
    found = case.run(PrefillBackend.TRITON, scale=0.125, segment_tokens=160)
    assert relative_error(found, case.expected(0.125)) < TOLERANCE


@pytest.mark.parametrize("backend", [PrefillBackend.REFERENCE, PrefillBackend.TRITON])
def test_a_gate_of_several_parts_multiplies_the_result(backend):
    case = small_case(33, 40)
    columns = Columns(torch.randn(2, 33, 3 * 64 + 32), 16, 3 * 64)
    found = case.run(backend, scale=0.125, segment_tokens=64, gate=columns, out_dtype=torch.half)
    expected = case.expected(0.125) * columns.sum().view(33, 3, 64).sigmoid()
    assert found.dtype is torch.half
    assert relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("kv_format", PACKED)
def test_listed_pages_are_decoded_in_order(kv_format, values):
    pages = encode_pages(torch.randn(4, 2, 32, 64).half(), kv_format, values=values)
    listed = torch.tensor([3, 1], dtype=torch.int32)
    guard = GuardedMemory()
    out = guard.empty(2, 64, 64, dtype=torch.float16)
    shape = {"page_tokens": 32, "head_dim": 64, "values": values}
    decode_pages_into(pages, listed, kv_format, out=out, **shape)
    guard.check()
    plain = decode_pages(pages[[3, 1]], kv_format, rotated=True, **shape)
    assert relative_error(out, plain.transpose(0, 1).flatten(1, 2)) < 5e-4


def test_a_cpu_takes_the_reference():
    assert pick_prefill_backend(torch.device("cpu"), 256) is PrefillBackend.REFERENCE


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"exact_before": -1}, {}, "-1"),
        ({"exact_before": 300}, {}, "do not fit"),
        ({"q": torch.zeros(5, 3, 32)}, {}, "heads of 32"),
        ({"exact_values": torch.zeros(5, 1, 32, 64)}, {}, "values"),
        ({}, {"window": 0}, "window of 0"),
        ({}, {"gate": Columns.whole(torch.zeros(1, 5, 64))}, "rows of 64"),
        ({}, {"window": 40}, "reaches beyond"),
        ({}, {"backend": PrefillBackend.TRITON}, "workspace"),
    ],
)
def test_what_does_not_fit_is_refused(changes, options, message):
    case = dataclasses.replace(small_case(5, 70, 2, TQ3), **changes)
    with pytest.raises(KernelInputError, match=message):
        prefill_attention(
            case.q, case.exact_keys, case.exact_values, case.exact_pages, case.exact_before,
            case.packed, scale=1.0, **options,
        )  # fmt: skip


def test_a_workspace_that_is_too_small_is_refused():
    case = small_case(40, 70)
    workspace = PrefillWorkspace(
        max_rows=33, num_heads=3, num_kv_heads=1, head_dim=64, device="cpu", page_tokens=32,
        segment_tokens=64,
    )  # fmt: skip
    assert workspace.nbytes < 200_000
    with pytest.raises(KernelInputError, match="too small"):
        prefill_attention(
            torch.cat((case.q, case.q), 0)[:70], case.exact_keys, case.exact_values,
            case.exact_pages, 40, scale=1.0, workspace=workspace, backend=PrefillBackend.TRITON,
        )  # fmt: skip
