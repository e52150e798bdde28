"""The kernels of the gated delta rule on a card, at the sizes of a 27B hybrid."""

import pytest
import torch

from ragflash_kernels.gated_delta import DeltaStates, delta_commit, delta_prefill, delta_step
from tests.kernels.delta_cases import (
    REAL,
    TOY,
    Layer,
    copy_states,
    guard_states,
    int32,
    path_to,
    pick_rows,
    random_tree,
    relative,
    rows_of,
    same,
)
from tests.kernels.guarded import GuardedMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EAGER = [False, True]


def skip_unless_possible(eager: bool) -> None:
    if eager and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch is of sm_90")


def step(
    layer: Layer, columns: tuple, states: DeltaStates, edges: list[int], slots: list[int],
    eager: bool = False, parents: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return delta_step(
        *columns, **layer.weights, states=states, first_rows=int32(*edges, device="cuda"),
        slots=int32(*slots, device="cuda"), max_rows=32, eager=eager,
        parents=parents,
    )  # fmt: skip


@pytest.mark.parametrize("eager", EAGER)
@pytest.mark.parametrize("sizes", [TOY, REAL])
@pytest.mark.parametrize(
    ("edges", "counts"), [([0, 1], [1]), ([0, 32], [21]), ([0, 5, 5, 16, 17], [2, 0, 11, 0])]
)
def test_rows_and_their_commit_equal_the_equations(sizes, edges, counts, eager, monkeypatch):
    skip_unless_possible(eager)
    layer, guard = Layer.random(sizes, "cuda"), GuardedMemory()
    columns = layer.columns(min(edges[-1] + 3, 32), parts=7)
    states = guard_states(layer.states(layers=2, slots=4), guard)
    before = copy_states(states)
    slots = [2, 0, 3, 1][: len(counts)]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        out = step(layer, columns, states.layer(1), edges, slots, eager)
    assert not out[edges[-1] :].any()
    assert same(states.memories, before.memories)
    delta_commit(states, int32(*slots, device="cuda"), int32(*counts, device="cuda"))
    guard.check()
    for slot, first, end, count in zip(slots, edges[:-1], edges[1:], counts, strict=True):
        start = before.memories[1, slot], before.tails[1, slot]
        if first < end:
            expected, _, _ = layer.by_rows(rows_of(columns, first, end), *start)
            assert relative(out[first:end], expected) < 5e-6
        if count == 0:
            assert same(states.memories[1, slot], before.memories[1, slot])
            assert same(states.tails[1, slot], before.tails[1, slot])
        else:
            _, memory, tail = layer.by_rows(rows_of(columns, first, first + count), *start)
            assert relative(states.memories[1, slot], memory) < 5e-6
            assert relative(states.tails[1, slot], tail) < 1e-6


@pytest.mark.parametrize("eager", EAGER)
def test_a_row_depends_by_no_bit_on_what_follows_or_on_what_is_committed(eager):
    skip_unless_possible(eager)
    layer = Layer.random(REAL, "cuda")
    columns = layer.columns(32, parts=7)
    together, apart = (layer.states(slots=1) for _ in range(2))
    slots = int32(0, device="cuda")
    expected = step(layer, columns, together.layer(0), [0, 32], [0], eager)
    delta_commit(together, slots, int32(32, device="cuda"))
    for first, end in ((0, 1), (1, 2), (2, 18), (18, 32)):
        found = step(layer, rows_of(columns, first, end), apart.layer(0), [0, end - first], [0])
        assert torch.equal(found, expected[first:end])
        delta_commit(apart, slots, int32(end - first, device="cuda"))
    assert torch.equal(apart.memories, together.memories)
    assert torch.equal(apart.tails, together.tails)


@pytest.mark.parametrize("eager", EAGER)
@pytest.mark.parametrize("spread", [2, 4, 31])
def test_a_path_of_a_tree_is_by_every_bit_a_chain(spread, eager):
    skip_unless_possible(eager)
    layer, num_rows = Layer.random(REAL, "cuda"), 31
    columns, tree = layer.columns(num_rows, parts=7), random_tree(num_rows, spread)
    path, slots = path_to(num_rows - 1, tree), int32(0, device="cuda")
    bushy, chain = (layer.states(slots=1) for _ in range(2))
    start = bushy.memories[0, 0].clone(), bushy.tails[0, 0].clone()
    parents = int32(*tree, device="cuda")
    found = step(layer, columns, bushy.layer(0), [0, num_rows], [0], eager, parents)
    assert relative(found, layer.by_tree(columns, tree, *start)) < 5e-6
    own = pick_rows(columns, path)
    assert torch.equal(step(layer, own, chain.layer(0), [0, len(path)], [0], eager), found[path])
    counts = int32(len(path), device="cuda")
    delta_commit(bushy, slots, counts, paths=int32(*path, device="cuda")[None])
    delta_commit(chain, slots, counts)
    assert torch.equal(bushy.memories, chain.memories)
    assert torch.equal(bushy.tails, chain.tails)


def test_a_graph_reads_its_tables_anew():
    layer = Layer.random(REAL, "cuda")
    columns = layer.columns(8, parts=7)
    states = layer.states(slots=3)
    first_rows, slots, counts = (int32(*x, device="cuda") for x in ((0, 1, 8), (0, 1), (1, 0)))

    def call() -> torch.Tensor:
        out = delta_step(
            *columns, **layer.weights, states=states.layer(0), first_rows=first_rows, slots=slots,
            max_rows=8,
        )  # fmt: skip
        delta_commit(states, slots, counts)
        return out

    call()  # compiles
    before = copy_states(states)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    first_rows.copy_(int32(0, 5, 7))
    slots.copy_(int32(2, 0))
    counts.copy_(int32(3, 2))
    graph.replay()
    for slot, first, end, count in ((2, 0, 5, 3), (0, 5, 7, 2)):
        start = before.memories[0, slot], before.tails[0, slot]
        expected, _, _ = layer.by_rows(rows_of(columns, first, end), *start)
        _, memory, _ = layer.by_rows(rows_of(columns, first, first + count), *start)
        assert relative(out[first:end], expected) < 5e-6
        assert relative(states.memories[0, slot], memory) < 5e-6
    assert same(states.memories[0, 1], before.memories[0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sizes", "num_rows"), [(TOY, 130), (REAL, 1), (REAL, 65), (REAL, 2048)])
def test_many_rows_equal_the_equations(sizes, num_rows, dtype, monkeypatch):
    layer, guard = Layer.random(sizes, "cuda"), GuardedMemory()
    columns = layer.columns(num_rows, parts=1, dtype=dtype)
    states = guard_states(layer.states(slots=2), guard)
    before = copy_states(states)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        out = delta_prefill(
            *columns, **layer.weights, states=states.layer(0), slot=1, out_dtype=dtype
        )
    guard.check()
    expected, memory, tail = layer.by_rows(columns, before.memories[0, 1], before.tails[0, 1])
    assert relative(out, expected) < 6e-3
    assert relative(states.memories[0, 1], memory) < 1e-4
    assert relative(states.tails[0, 1], tail) < 1e-6
    assert same(states.memories[0, 0], before.memories[0, 0])


def test_repeated_keys_lose_nothing():
    layer = Layer.random(REAL, "cuda")
    columns = layer.columns(200, parts=1)
    product = columns[0].partials
    product[:, 1:] = product[:, :1].clone()
    product[:, :, columns[1].start : columns[2].start] = 6.0
    product[:, :, columns[2].start :] = -12.0
    states = layer.states(slots=1)
    before = copy_states(states)
    delta_prefill(*columns, **layer.weights, states=states.layer(0), slot=0)
    _, memory, _ = layer.by_rows(columns, before.memories[0, 0], before.tails[0, 0])
    assert relative(states.memories[0, 0], memory) < 1e-4
