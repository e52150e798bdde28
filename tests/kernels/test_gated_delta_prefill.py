"""Many rows of one sequence: plain torch and interpreted kernels against the equations."""

from dataclasses import replace

import pytest
import torch

from ragflash_kernels.backend import Backend
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.gated_delta import DeltaStates, delta_prefill
from tests.kernels.delta_cases import TOY, Layer, copy_states, guard_states, relative, same
from tests.kernels.guarded import GuardedMemory


@pytest.fixture(params=[Backend.REFERENCE, Backend.TRITON])
def backend(request) -> Backend:
    if request.param is Backend.TRITON:
        pytest.importorskip("triton")
    return request.param


def run(layer: Layer, columns: tuple, states: DeltaStates, backend: Backend, **options):
    return delta_prefill(
        *columns, **layer.weights, states=states.layer(0), slot=1, out_dtype=torch.float32,
        backend=backend, **options,
    )  # fmt: skip


def check(layer: Layer, columns: tuple, backend: Backend, monkeypatch) -> None:
    guard = GuardedMemory()
    states = guard_states(layer.states(slots=2), guard)
    before = copy_states(states)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guard.empty)
        out = run(layer, columns, states, backend)
    guard.check()
    expected, memory, tail = layer.by_rows(columns, before.memories[0, 1], before.tails[0, 1])
    # The kernel computes the output from float16, the memory from two halves of it.
    assert relative(out, expected) < (1e-3 if backend is Backend.TRITON else 2e-6)
    assert relative(states.memories[0, 1], memory) < 2e-6
    assert relative(states.tails[0, 1], tail) < 1e-6
    for name in DeltaStates.__slots__:
        assert same(getattr(states, name)[:, 0], getattr(before, name)[:, 0])


@pytest.mark.parametrize("num_rows", [1, 2, 64, 130])
def test_rows_equal_the_equations(num_rows, backend, monkeypatch):
    layer = Layer.random(TOY)
    check(layer, layer.columns(num_rows, parts=1 + num_rows % 2), backend, monkeypatch)


def test_repeated_keys_lose_nothing(backend, monkeypatch):
    """Powers of the matrix between rows would have entries of 10¹⁸ here."""
    layer = Layer.random(TOY)
    qkv, beta, alpha = layer.columns(70, parts=1)
    product = qkv.partials
    product[:, 1:] = product[:, :1]
    product[:, :, beta.start : alpha.start] = 6.0
    product[:, :, alpha.start :] = -12.0
    check(replace(layer, decay_bias=layer.decay_bias * 0), (qkv, beta, alpha), backend, monkeypatch)


def test_a_state_is_kept_only_if_wanted(backend):
    layer = Layer.random(TOY)
    states = layer.states(slots=2)
    before = copy_states(states)
    out = run(layer, layer.columns(5), states, backend, keep=False)
    assert torch.equal(out, run(layer, layer.columns(5), copy_states(before), backend))
    for name in DeltaStates.__slots__:
        assert same(getattr(states, name), getattr(before, name))


def test_refuses_what_does_not_fit():
    layer = Layer.random(TOY)
    states = layer.states()
    for columns, options, message in (
        (layer.columns(2), {"slot": 3}, "slot 3 of 3"),
        (layer.columns(0), {"slot": 0}, "no rows"),
        (layer.columns(2)[::-1], {"slot": 0}, "columns of"),
    ):
        with pytest.raises(KernelInputError, match=message):
            delta_prefill(*columns, **layer.weights, states=states.layer(0), **options)
