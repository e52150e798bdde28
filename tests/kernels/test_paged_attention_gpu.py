"""Attention over exact and packed pages on a card, at the shapes of real models."""

import dataclasses

import pytest
import torch

from ragflash_kernels.kv_codec import KvFormat
from ragflash_kernels.qmatmul.activations import ActivationBuffers
from tests.kernels.attention_cases import Rows, make_case
from tests.kernels.guarded import GuardedMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEADS = {64: (3, 3), 128: (2, 4), 256: (4, 6)}  # of keys, and query heads for each
PAGES = tuple(range(1, 20))
PACKED = tuple(range(3, 23))
TOLERANCE = {KvFormat.TQ3_0: 1e-2}  # its queries and levels of keys are whole numbers


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu().double() - expected).norm() / expected.norm())


def card_case(sequences, head_dim=256, **options):
    options = {"heads": HEADS[head_dim], "page_tokens": 256, "device": "cuda"} | options
    return make_case(sequences, head_dim=head_dim, **options)


@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("kv_format", [kv_format for kv_format in KvFormat if kv_format != "f16"])
def test_equals_attention_row_by_row(kv_format, head_dim, monkeypatch):
    for sequences in (
        [Rows(1, 0, (0,))],
        [Rows(1, 3000, PAGES, PACKED)],
        [Rows(21, 4095, PAGES, PACKED[:1])],
        [Rows(16, 2501, PAGES, PACKED), Rows(1, 17, (25,)), Rows(15, 255, (24, 23), (1,))],
    ):
        case = card_case(sequences, head_dim, kv_format=kv_format)
        guard = GuardedMemory()
        case = dataclasses.replace(case, q=guard.place(case.q))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", guard.empty)
            found = case.run()
        guard.check()
        assert error(found, case.expected()) < TOLERANCE.get(kv_format, 1.5e-3), sequences


def test_windows_and_a_single_key_head():
    case = card_case([Rows(5, 3000, PAGES)], heads=(1, 4), window=512)
    assert error(case.run(), case.expected(window=512)) < 1.5e-3


@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("kv_format", [None, KvFormat.TQ3_0])
def test_a_row_is_the_same_alone_and_among_others(kv_format, head_dim):
    packed = PACKED if kv_format else ()
    sequences = [Rows(16, 4000, PAGES, packed), Rows(5, 900, (41, 42, 43, 44))]
    case = card_case(sequences, head_dim, kv_format=kv_format)
    together = case.run()
    for row, sequence, place in ((0, 0, 0), (15, 0, 15), (18, 1, 2)):
        assert torch.equal(case.alone(row, sequence, place).run()[0], together[row])


@pytest.mark.parametrize("head_dim", HEADS)
def test_the_grid_is_that_of_the_mixtures(head_dim):
    case = card_case([Rows(21, 1000, PAGES, PACKED)], head_dim, kv_format=KvFormat.TQ3_0)
    mixed = case.run()
    found, expected = case.run(quantized=True), ActivationBuffers.from_rows(mixed)
    assert torch.equal(found.to_rows(*mixed.shape), expected.to_rows(*mixed.shape))
    assert torch.equal(case.run(out_dtype=torch.bfloat16), mixed.bfloat16())


@pytest.mark.parametrize("eager", [False, True])
def test_a_graph_follows_its_tables(eager):
    if eager and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs compute capability 9")
    case = card_case([Rows(3, 4000, PAGES, PACKED)], kv_format=KvFormat.TQ3_0)
    case.run(eager=eager)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.run(eager=eager, quantized=True)
    for committed, packed in ((4000, PACKED), (700, PACKED[:2]), (5, ())):
        rows = Rows(3, committed, PAGES, packed)
        case.exact.visibility.ends.fill_(committed)
        case.packed.visibility.ends.fill_(256 * len(packed))
        graph.replay()
        torch.cuda.synchronize()
        expected = dataclasses.replace(case, sequences=[rows]).expected()
        assert error(found.to_rows(*expected.shape), expected) < 1.5e-2
