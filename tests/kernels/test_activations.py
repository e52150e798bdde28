"""The grid in the order that lanes read, in plain torch."""

import pytest
import torch

from ragflash_kernels.qmatmul.activations import ActivationBuffers, quantize_rows


@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (9, 320), (21, 576)])
def test_buffers_give_back_the_grid(rows, columns):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    q, scales = quantize_rows(x)
    grid = (q.float().unflatten(1, (-1, 32)) * scales[..., None]).flatten(1)
    assert torch.equal(ActivationBuffers.from_rows(x).to_rows(rows, columns), grid)


def test_buffers_are_as_large_as_those_that_kernels_fill():
    allocated = ActivationBuffers.allocate(9, 320, torch.device("cpu"))
    made = ActivationBuffers.from_rows(torch.randn(9, 320))
    for name in ("q", "scales", "sums"):
        assert getattr(made, name).shape == getattr(allocated, name).shape
        assert getattr(made, name).dtype == getattr(allocated, name).dtype
