"""The forms of the gated delta rule agree with each other and with the equations."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.gated_delta import (
    DeltaRows,
    gated_delta_advance,
    gated_delta_chunked,
    gated_delta_recurrent,
    gated_delta_tree,
)

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 16, 12


def random_rows(num_rows: int, seed: int = 0) -> tuple[DeltaRows, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows = DeltaRows(
        normal(num_rows, KEY_HEADS, KEY_DIM),
        normal(num_rows, KEY_HEADS, KEY_DIM),
        normal(num_rows, VALUE_HEADS, VALUE_DIM),
        -normal(num_rows, VALUE_HEADS).exp() * 0.3,
        normal(num_rows, VALUE_HEADS).sigmoid(),
    )
    return rows, normal(VALUE_HEADS, KEY_DIM, VALUE_DIM)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 65, 150, 257])
def test_chunks_equal_rows_one_by_one(num_rows):
    rows, state = random_rows(num_rows, seed=num_rows)
    before = state.clone()
    out, after = gated_delta_chunked(rows, state)
    expected, expected_after = gated_delta_recurrent(rows, state)
    assert_close(out, expected)
    assert_close(after, expected_after)
    assert torch.equal(state, before)


def test_rows_one_by_one_equal_the_equations():
    """Written out for each head in float64, so that no code is shared."""
    rows, state = random_rows(9)
    expected = torch.empty(9, VALUE_HEADS, VALUE_DIM, dtype=torch.float64)
    for head in range(VALUE_HEADS):
        s, key_head = state[head].double(), head % KEY_HEADS
        for t in range(9):
            q, k = rows.q[t, key_head].double(), rows.k[t, key_head].double()
            q, k = q / q.norm() / KEY_DIM**0.5, k / k.norm()
            s = s * rows.log_decay[t, head].double().exp()
            s = s + torch.outer(k, rows.beta[t, head].double() * (rows.v[t, head] - k @ s))
            expected[t, head] = q @ s
    out, _ = gated_delta_recurrent(rows, state)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_strong_decay_stays_finite():
    rows, state = random_rows(130)
    rows = DeltaRows(rows.q, rows.k, rows.v, rows.log_decay * 400, rows.beta)
    out, after = gated_delta_chunked(rows, state)
    expected, expected_after = gated_delta_recurrent(rows, state)
    assert_close(out, expected)
    assert_close(after, expected_after)


@st.composite
def trees(draw) -> list[int]:
    num_rows = draw(st.integers(1, 32))
    return [draw(st.integers(-1, row - 1)) for row in range(num_rows)]


def path_to(row: int, parents: list[int]) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


@settings(max_examples=30, deadline=None)
@given(parents=trees(), seed=st.integers(0, 99))
def test_every_path_of_a_tree_equals_its_rows_in_sequence(parents, seed):
    rows, state = random_rows(len(parents), seed)
    out, tape = gated_delta_tree(rows, state, parents=parents)
    for row in range(len(parents)):
        path = path_to(row, parents)
        expected, after = gated_delta_recurrent(rows[path], state)
        assert_close(out[row], expected[-1])
        assert_close(gated_delta_advance(state, tape, path), after)


def test_a_chain_is_the_tree_of_one_path():
    rows, state = random_rows(20)
    out, tape = gated_delta_tree(rows, state)
    expected, _ = gated_delta_recurrent(rows, state)
    assert_close(out, expected)
    for length in range(1, 21):
        _, after = gated_delta_recurrent(rows[:length], state)
        assert_close(gated_delta_advance(state, tape, range(length)), after)
    assert torch.equal(gated_delta_advance(state, tape, ()), state)


def test_refuses_what_does_not_fit():
    rows, state = random_rows(4)
    for changed, before in (
        (replace(rows, q=rows.q[:3]), state),
        (replace(rows, v=rows.v[:, :5]), state),
        (replace(rows, beta=rows.beta[:, :5]), state),
        (replace(rows, log_decay=rows.log_decay.half()), state),
        (rows, state[..., :3]),
        (rows[:0], state),
    ):
        with pytest.raises(KernelInputError):
            gated_delta_recurrent(changed, before)
    with pytest.raises(KernelInputError, match="does not come before"):
        gated_delta_tree(rows, state, parents=[-1, 1, 0, 0])
    with pytest.raises(KernelInputError, match="3 parents for 4"):
        gated_delta_tree(rows, state, parents=[-1, 0, 0])
