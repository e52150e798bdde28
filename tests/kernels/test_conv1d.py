"""The causal convolution equals torch's own, along chains and along paths of trees."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from ragflash_kernels.conv1d import causal_conv1d, tail_after
from ragflash_kernels.errors import KernelInputError

CHANNELS, WIDTH = 5, 4


def random_inputs(num_rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(num_rows, CHANNELS), (WIDTH - 1, CHANNELS), (CHANNELS, WIDTH)]
    x, tail, weight = (torch.randn(*size, generator=generator) for size in sizes)
    return x, tail, weight


def by_torch(x: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = torch.cat((tail, x)).t()[None]
    return functional.silu(functional.conv1d(rows, weight[:, None], groups=CHANNELS))[0].t()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 70])
def test_equals_torch(num_rows):
    x, tail, weight = random_inputs(num_rows)
    torch.testing.assert_close(causal_conv1d(x, tail, weight), by_torch(x, tail, weight))


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 9])
def test_goes_on_where_it_stopped(cut):
    x, tail, weight = random_inputs(10)
    later = tail_after(x[:cut], tail)
    assert torch.equal(later, torch.cat((tail, x[:cut]))[-3:])
    parts = [causal_conv1d(x[cut:], later, weight)]
    if cut:
        parts.insert(0, causal_conv1d(x[:cut], tail, weight))
    torch.testing.assert_close(torch.cat(parts), causal_conv1d(x, tail, weight))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_path_of_a_tree_equals_its_rows_in_sequence(data):
    num_rows = data.draw(st.integers(1, 20))
    parents = [data.draw(st.integers(-1, row - 1)) for row in range(num_rows)]
    x, tail, weight = random_inputs(num_rows)
    out = causal_conv1d(x, tail, weight, parents=parents)
    for row in range(num_rows):
        path = [row]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        torch.testing.assert_close(out[row], by_torch(x[path], tail, weight)[-1])


def test_refuses_what_does_not_fit():
    x, tail, weight = random_inputs(3)
    for arguments in ((x[0], tail, weight), (x, tail[:2], weight), (x, tail, weight[:4])):
        with pytest.raises(KernelInputError):
            causal_conv1d(*arguments)
    with pytest.raises(KernelInputError, match="before its row"):
        causal_conv1d(x, tail, weight, parents=[0, 0, 1])
