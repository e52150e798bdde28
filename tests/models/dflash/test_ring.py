"""A ring holds the newest tokens of every layer in order, whatever was appended and forgotten."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragflash.models.dflash.ring import RING_TOKENS, KVRing

LAYERS, HEADS, DIM, SIZE = 2, 1, 2, 7
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 2 * SIZE)),
        st.tuples(st.just("truncate"), st.floats(0, 1)),
        st.tuples(st.just("restart"), st.integers(0, 30)),
        st.tuples(st.just("reload"), st.just(0)),
    ),
    max_size=12,
)


def ring(size: int = SIZE, dtype: torch.dtype = torch.float32) -> KVRing:
    return KVRing(LAYERS, HEADS, DIM, dtype=dtype, num_tokens=size)


def stamped(stamps: list[float]) -> torch.Tensor:
    """Keys and values that tell tokens, layers, and keys from values apart."""
    kv = torch.empty(2, LAYERS, len(stamps), HEADS, DIM)
    for side in range(2):
        for layer in range(LAYERS):
            kv[side, layer] = torch.tensor(stamps).view(-1, 1, 1) + side * 0.5 + layer * 0.25
    return kv


def held(found: KVRing, layer: int = 0, count: int | None = None) -> list[float]:
    """Stamps of a layer, after a check that keys belong to their values."""
    keys, values = found.newest(layer, count)
    torch.testing.assert_close(keys + 0.5, values, rtol=0, atol=0)
    return (keys[:, 0, 0] - layer * 0.25).tolist()


@given(STEPS)
def test_equals_a_list_of_the_newest_tokens(steps):
    found, expected, start, stamp = ring(), [], 0, 0.0
    for kind, amount in steps:
        if kind == "append":
            stamps = [stamp + i for i in range(amount)]
            stamp += amount
            found.append(stamped(stamps))
            expected += stamps
            dropped = max(0, len(expected) - SIZE)
            expected, start = expected[dropped:], start + dropped
        elif kind == "truncate":
            position = int(amount * found.end)
            found.truncate(position)
            expected = expected[: max(0, position - start)]
            start = min(start, position)
        elif kind == "restart":
            found.restart(amount)
            expected, start = [], amount
        else:
            state = found.export()
            found = ring()
            found.load(state)
        assert (found.start, found.end) == (start, start + len(expected))
        for layer in range(LAYERS):
            assert held(found, layer) == expected
            assert held(found, layer, 3) == expected[-3:]


def test_what_was_overwritten_does_not_come_back():
    found = ring()
    found.append(stamped([float(i) for i in range(10)]))
    found.truncate(5)
    assert held(found) == [3.0, 4.0]
    found.append(stamped([50.0]))
    assert held(found) == [3.0, 4.0, 50.0]
    found.truncate(2)
    assert (found.start, found.end, held(found)) == (2, 2, [])


def test_positions_ahead_cannot_be_forgotten():
    found = ring()
    found.append(stamped([1.0]))
    with pytest.raises(ValueError, match="not within 0…1"):
        found.truncate(2)


def test_a_smaller_ring_takes_the_newest_part():
    found = ring()
    found.append(stamped([float(i) for i in range(10)]))
    smaller = ring(4)
    smaller.load(found.export())
    assert (smaller.start, smaller.end) == (6, 10)
    assert held(smaller) == [6.0, 7.0, 8.0, 9.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_are_exact_in_every_dtype(dtype):
    found, again = ring(dtype=dtype), ring(dtype=dtype)
    found.append(torch.randn(2, LAYERS, 9, HEADS, DIM).to(dtype))
    again.load(found.export())
    for layer in range(LAYERS):
        for mine, other in zip(found.newest(layer), again.newest(layer), strict=True):
            assert torch.equal(mine, other)


def test_refuses_bytes_of_another_drafter_and_damaged_ones():
    found = ring()
    found.append(stamped([1.0, 2.0]))
    state = found.export()
    others = KVRing(LAYERS + 1, HEADS, DIM, dtype=torch.float32, num_tokens=SIZE)
    for taker in (others, ring(dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="another drafter's"):
            taker.load(state)
    for damaged in (state[:-1], state + b"\0"):
        with pytest.raises(ValueError, match="damaged"):
            ring().load(damaged)
    for damaged in (b"", b"x" * len(state)):
        with pytest.raises(ValueError, match="another drafter's"):
            ring().load(damaged)


def test_a_drafter_keeps_4096_tokens():
    assert RING_TOKENS == 4096
    found = KVRing(1, 1, 1, dtype=torch.float32)
    found.append(torch.arange(5000.0).expand(2, 1, 5000)[..., None, None])
    assert found.newest(0)[0].flatten().tolist() == list(range(5000 - 4096, 5000))
