"""A few rows and their commit: plain torch and interpreted kernels against the equations."""

import pytest
import torch

from ragflash_kernels.backend import Backend
from ragflash_kernels.columns import Columns
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.gated_delta import DeltaStates, delta_commit, delta_step
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
from tests.slow import slow

BACKENDS = [Backend.REFERENCE, Backend.TRITON]


@pytest.fixture(params=BACKENDS)
def backend(request) -> Backend:
    if request.param is Backend.TRITON:
        pytest.importorskip("triton")
    return request.param


def test_rows_equal_the_equations_and_commit_makes_them_the_state(backend, monkeypatch):
    layer, guard = Layer.random(TOY), GuardedMemory()
    columns = layer.columns(7)
    states = guard_states(layer.states(layers=2), guard)
    before = copy_states(states)
    first_rows, slots = int32(0, 1, 1, 6), int32(2, 0, 1)  # one row, none, five, and a row of none
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        out = delta_step(
            *columns, **layer.weights, states=states.layer(1), first_rows=first_rows, slots=slots,
            max_rows=5, backend=backend,
        )  # fmt: skip
    assert not out[6].any()
    for name in ("memories", "tails"):
        assert same(getattr(states, name), getattr(before, name))
    assert same(states.inputs[1, 0], before.inputs[1, 0])
    delta_commit(states, slots, int32(1, 0, 3), backend=backend)
    guard.check()
    for slot, first, end, count in ((2, 0, 1, 1), (1, 1, 6, 3)):
        start = before.memories[1, slot], before.tails[1, slot]
        expected, _, _ = layer.by_rows(rows_of(columns, first, end), *start)
        _, memory, tail = layer.by_rows(rows_of(columns, first, first + count), *start)
        assert relative(out[first:end], expected) < 1e-6
        assert relative(states.memories[1, slot], memory) < 1e-6
        assert relative(states.tails[1, slot], tail) < 1e-6
    for name in ("memories", "tails"):
        assert same(getattr(states, name)[:, 0], getattr(before, name)[:, 0])


def test_a_row_depends_by_no_bit_on_what_follows_or_on_what_is_committed():
    pytest.importorskip("triton")
    layer = Layer.random(TOY, seed=1)
    columns = layer.columns(5)
    together, apart = (layer.states(slots=1) for _ in range(2))
    slots = int32(0)

    def step(states: DeltaStates, first: int, end: int) -> torch.Tensor:
        return delta_step(
            *rows_of(columns, first, end), **layer.weights, states=states.layer(0),
            first_rows=int32(0, end - first), slots=slots, max_rows=5, backend=Backend.TRITON,
        )  # fmt: skip

    expected = step(together, 0, 5)
    delta_commit(together, slots, int32(5), backend=Backend.TRITON)
    assert torch.equal(step(apart, 0, 3), expected[:3])
    for first, end in ((0, 2), (2, 3), (3, 5)):
        assert torch.equal(step(apart, first, end), expected[first:end])
        delta_commit(apart, slots, int32(end - first), backend=Backend.TRITON)
    assert torch.equal(apart.memories, together.memories)
    assert torch.equal(apart.tails, together.tails)


@pytest.mark.parametrize("spread", [2, *slow(1, 4, 9)])
def test_rows_of_trees_equal_the_equations_of_their_paths(backend, spread, monkeypatch):
    layer, guard = Layer.random(TOY), GuardedMemory()
    columns = layer.columns(13)
    states = guard_states(layer.states(layers=2), guard)
    before = copy_states(states)
    trees = {2: random_tree(9, spread, seed=1), 1: random_tree(3, spread, seed=2)}
    parents = int32(*trees[2], *trees[1], 7)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        out = delta_step(
            *columns, **layer.weights, states=states.layer(1), first_rows=int32(0, 9, 12),
            slots=int32(2, 1), max_rows=9, parents=parents, backend=backend,
        )  # fmt: skip
    assert not out[12].any()
    path, short = path_to(8, trees[2]), path_to(1, trees[1])
    most = max(map(len, (path, short)))
    paths = torch.tensor([(p + [0] * most)[:most] for p in (path, short)], dtype=torch.int32)
    delta_commit(states, int32(2, 1), int32(len(path), len(short)), paths=paths, backend=backend)
    guard.check()
    for slot, first, kept in ((2, 0, path), (1, 9, short)):
        start = before.memories[1, slot], before.tails[1, slot]
        own = rows_of(columns, first, first + len(trees[slot]))
        expected = layer.by_tree(own, trees[slot], *start)
        _, memory, tail = layer.by_rows(pick_rows(own, kept), *start)
        assert relative(out[first : first + len(expected)], expected) < 1e-6
        assert relative(states.memories[1, slot], memory) < 1e-6
        assert relative(states.tails[1, slot], tail) < 1e-6


@pytest.mark.parametrize("seed", [1, *slow(0, 2, 3)])
def test_a_path_of_a_tree_is_by_every_bit_a_chain(seed):
    """So whether rows were drafted in a tree, in a chain or not at all cannot be told."""
    pytest.importorskip("triton")
    layer = Layer.random(TOY, seed=seed)
    columns, tree = layer.columns(9), random_tree(9, 2 + seed, seed)
    path, slots = path_to(8, tree), int32(0)

    def step(states: DeltaStates, rows: list[int], parents: torch.Tensor | None) -> torch.Tensor:
        return delta_step(
            *pick_rows(columns, rows), **layer.weights, states=states.layer(0),
            first_rows=int32(0, len(rows)), slots=slots, max_rows=9, parents=parents,
            backend=Backend.TRITON,
        )  # fmt: skip

    bushy, chain, named = (layer.states(slots=1) for _ in range(3))
    found = step(bushy, [*range(9)], int32(*tree))
    expected = step(chain, path, None)
    assert torch.equal(found[path], expected)
    assert torch.equal(step(named, path, int32(*range(-1, len(path) - 1))), expected)
    count = int32(len(path))
    delta_commit(bushy, slots, count, paths=int32(*path)[None], backend=Backend.TRITON)
    delta_commit(chain, slots, count, backend=Backend.TRITON)
    for name in ("memories", "tails"):
        assert torch.equal(getattr(bushy, name), getattr(chain, name))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5])
def test_a_tail_holds_the_last_inputs(backend, count):
    layer = Layer.random(TOY)
    states = layer.states(slots=1)
    states.inputs.copy_(torch.randn(states.inputs.shape))
    expected = torch.cat((states.tails, states.inputs[:, :, :count]), 2)[:, :, -3:]
    delta_commit(states, int32(0), int32(count), backend=backend)
    assert torch.equal(states.tails, expected)


def test_strong_and_weak_decay_keep_their_digits(backend):
    layer = Layer.random(TOY)
    columns = layer.columns(3, parts=1)
    alpha = columns[2]
    for value in (-30.0, -16.0, 40.0):
        alpha.partials[:, :, alpha.start :] = value
        states = layer.states(slots=1)
        start = states.memories[0, 0], states.tails[0, 0]
        layer_weights = layer.weights | {"decay_bias": torch.zeros(TOY.value_heads)}
        delta_step(
            *columns, **layer_weights, states=states.layer(0), first_rows=int32(0, 3),
            slots=int32(0), max_rows=3, backend=backend,
        )  # fmt: skip
        rate = layer.decay_rate.double() * torch.tensor(value).double().exp().log1p()
        assert relative(states.decay[0, 0, :3], rate.exp().expand(3, -1)) < 1e-6
        assert torch.equal(states.memories[0, 0], start[0])


def test_sizes_follow_from_the_tensors():
    states = DeltaStates.allocate(TOY, layers=2, slots=3, device="cpu", rows=8)
    assert states.sizes == states.layer(1).sizes == TOY
    assert states.rows == states.layer(0).rows == 8
    real = DeltaStates.allocate(REAL, layers=48, slots=2, device="meta")
    per_slot = 48 * 4 * (48 * 128 * 128 + 3 * 10240 + 32 * (10240 + 2048 + 6144 + 48))
    assert real.nbytes == 2 * per_slot
    states.layer(1).memories[2] = 1.0
    assert states.memories[1, 2].all()
    assert not states.memories[0].any()


def test_refuses_what_does_not_fit():
    layer = Layer.random(TOY)
    states = layer.states()
    qkv, beta, alpha = layer.columns(3)
    tables = {"first_rows": int32(0, 3), "slots": int32(0), "max_rows": 3}
    short = Columns(beta.partials[:, :2], beta.start, beta.width)
    for arguments, changed, message in (
        ((qkv, beta, qkv), {}, "columns of"),
        ((qkv, short, alpha), {}, "differ in their rows"),
        ((qkv, beta, alpha), {"conv": layer.conv.double()}, "conv is torch.float64"),
        ((qkv, beta, alpha), {"decay_bias": layer.decay_bias[:1]}, "decay_bias"),
        ((qkv, beta, alpha), {"states": states}, "of all layers, not of one"),
        ((qkv, beta, alpha), {"slots": int32(0, 1)}, "2 first rows for 2"),
        ((qkv, beta, alpha), {"slots": torch.zeros(1)}, "no list of int32"),
        ((qkv, beta, alpha), {"max_rows": 33}, "33 rows for a tape of 32"),
        ((qkv, beta, alpha), {"parents": int32(-1, 0)}, "2 parents for 3 rows"),
        ((qkv, beta, alpha), {"parents": torch.zeros(3)}, "no list of int32"),
    ):
        options = layer.weights | {"states": states.layer(0)} | tables | changed
        with pytest.raises(KernelInputError, match=message):
            delta_step(*arguments, **options)
    with pytest.raises(KernelInputError, match="of one layer, not of all"):
        delta_commit(states.layer(0), int32(0), int32(1))
    with pytest.raises(KernelInputError, match="2 counts for 1"):
        delta_commit(states, int32(0), int32(1, 1))
    with pytest.raises(KernelInputError, match="no paths of int32"):
        delta_commit(states, int32(0), int32(1), paths=int32(0))
