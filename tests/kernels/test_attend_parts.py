"""Attention over exact and packed pages, interpreted: parts, gates, windows, trees, tables."""

import dataclasses

import pytest
import torch

from ragflash_kernels.backend import Backend
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.kv_codec import KvFormat
from ragflash_kernels.paged_attention import KvPart, attend_parts
from ragflash_kernels.qmatmul.activations import ActivationBuffers
from tests.kernels.attention_cases import Case, Rows, make_case
from tests.kernels.guarded import GuardedMemory
from tests.slow import slow

pytest.importorskip("triton")

SEQUENCES = [Rows(2, 37, (3, 1), (2, 0)), Rows(1, 0, (2,))]
SMALL = {"heads": (1, 3), "head_dim": 64, "page_tokens": 32, "split_tokens": 32}
BACKENDS = [Backend.REFERENCE, Backend.TRITON]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu().double() - expected).norm() / expected.norm())


def run_guarded(case: Case, monkeypatch, **options) -> torch.Tensor:
    guard = GuardedMemory()
    placed = dataclasses.replace(case, q=guard.place(case.q))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        found = placed.run(**options)
    guard.check()
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kv_format", [None, KvFormat.TQ3_0, *slow(KvFormat.Q8_0, KvFormat.Q4_0, KvFormat.TQ4)]
)
def test_equals_attention_row_by_row(kv_format, backend, monkeypatch):
    sequences = SEQUENCES
    if kv_format is None:
        sequences = [dataclasses.replace(rows, packed_pages=()) for rows in SEQUENCES]
    case = make_case(sequences, kv_format=kv_format, **SMALL)
    found = run_guarded(case, monkeypatch, backend=backend)
    assert error(found, case.expected()) < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_hides_older_tokens(backend):
    case = make_case([Rows(2, 70, (3, 1, 0))], window=9, gate_parts=0, **SMALL)
    assert error(case.run(backend=backend), case.expected(window=9)) < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 2, 7])
def test_a_tree_of_drafts_sees_its_branches(backend, window):
    rows = Rows(6, 29, (1, 0), parents=(-1, 0, 0, 2, 1, 3))
    case = make_case([rows], window=window, gate_parts=0, **SMALL)
    assert error(case.run(backend=backend), case.expected(window=window)) < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_sees_nothing_gives_zeros(backend, monkeypatch):
    case = make_case([Rows(1, 0, (0,))], **SMALL)
    blind = dataclasses.replace(case.exact.visibility, words=None)
    case = dataclasses.replace(case, exact=dataclasses.replace(case.exact, visibility=blind))
    assert not run_guarded(case, monkeypatch, backend=backend).any()


def test_an_empty_packed_part_changes_nothing():
    case = make_case([Rows(2, 37, (3, 1))], kv_format=KvFormat.Q8_0, **SMALL)
    without = dataclasses.replace(case, packed=None)
    assert torch.equal(case.run(backend=Backend.TRITON), without.run(backend=Backend.TRITON))


def test_a_row_does_not_depend_on_other_rows():
    case = make_case(SEQUENCES, kv_format=KvFormat.Q8_0, **SMALL)
    together = case.run(backend=Backend.TRITON)
    for row, (sequence, place) in enumerate([(0, 0), (0, 1), (1, 0)]):
        alone = case.alone(row, sequence, place).run(backend=Backend.TRITON)
        assert torch.equal(alone[0], together[row])


def test_more_splits_than_are_merged_at_a_time():
    many = SMALL | {"heads": (1, 1)}
    case = make_case([Rows(1, 32 * 34 + 5, tuple(range(35)))], **many)
    assert error(case.run(backend=Backend.TRITON), case.expected()) < 1e-3


@pytest.mark.parametrize("heads", [(1, 4), (1, 5)])  # 256 columns, and 320, which fill no block
def test_the_grid_is_that_of_the_mixtures(heads, monkeypatch):
    case = make_case([Rows(2, 20, (1,))], **SMALL | {"heads": heads})
    found = run_guarded(case, monkeypatch, quantized=True, backend=Backend.TRITON)
    expected = ActivationBuffers.from_rows(case.run(backend=Backend.TRITON))
    width = heads[0] * heads[1] * 64
    assert torch.equal(found.to_rows(2, width), expected.to_rows(2, width))
    # Of the eight rows of a tile two are written, up to the end of the block.
    for name in ("q", "scales", "sums"):
        both = [getattr(buffers, name) for buffers in (found, expected)]
        written = torch.stack([rows_of(name, one) for one in both])
        assert torch.equal(written[0], written[1]), name


def rows_of(name: str, buffer: torch.Tensor) -> torch.Tensor:
    """The first two rows of a buffer."""
    if name == "q":
        return buffer[:, 0, :, :8]
    return buffer[:, 0, 0] if name == "scales" else buffer[:, 0, :, :2]


def test_tables_may_change_between_launches():
    case = make_case([Rows(2, 37, (3, 1), (1,))], kv_format=KvFormat.Q8_0, **SMALL)
    fewer = [Rows(2, 20, (3, 1), ())]
    other = make_case(fewer, kv_format=None, **SMALL)
    for part, end in ((case.exact, 20), (case.packed, 0)):
        part.visibility.ends[:] = end
    shorter = dataclasses.replace(case, sequences=fewer)
    assert other.exact.visibility.max_tokens == case.exact.visibility.max_tokens
    assert error(case.run(backend=Backend.TRITON), shorter.expected()) < 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split_tokens": 48}, "48"),
        ({"key_format": KvFormat.Q8_0}, "exact part"),
        ({"keys": torch.zeros(4, 1, 32, 128).half()}, "keys"),
        ({"values": torch.zeros(4, 2, 32, 64).half()}, "2 value heads"),
        ({"keys": torch.zeros(4, 1, 24, 64).half()}, "24 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    case = make_case([Rows(1, 0, (0,))], **SMALL)
    part = dataclasses.replace(case.exact, **changes)
    with pytest.raises(KernelInputError, match=message):
        dataclasses.replace(case, exact=part).run(backend=Backend.TRITON)


def test_too_many_rows_and_other_gates_are_refused():
    case = make_case([Rows(1, 0, (0,))], **SMALL)
    seen = dataclasses.replace(case.exact.visibility, max_rows=33)
    many = KvPart(case.exact.keys, case.exact.values, seen)
    with pytest.raises(KernelInputError, match="33 rows"):
        attend_parts(case.q, many, None, scale=1, gate=None, quantized=False, backend="triton")
    with pytest.raises(KernelInputError, match="gate"):
        case.run(gate=dataclasses.replace(case.gate, width=64))
