"""Rotary positions against complex multiplication."""

import numpy as np
import pytest
import torch

from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.rope import rope

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def angles(num_rows, half, seed=0):
    values = np.random.default_rng(seed).uniform(-20, 20, (num_rows, half))
    return torch.from_numpy(values)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "dim", "half"), [(1, 2, 1), (3, 64, 32), (5, 20, 4), (2, 7, 3)])
def test_equals_complex_multiplication(heads, dim, half, dtype):
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((4, heads, dim))).to(dtype)
    theta = angles(4, half)
    result = rope(x, theta.cos().float(), theta.sin().float())
    exact = x.double().numpy().copy()
    turned = exact[..., :half] + 1j * exact[..., half : 2 * half]
    turned = turned * np.exp(1j * theta.numpy())[:, None]
    exact[..., :half], exact[..., half : 2 * half] = turned.real, turned.imag
    assert result.dtype == dtype
    np.testing.assert_allclose(result.double().numpy(), exact, rtol=0, atol=4 * TOLERANCE[dtype])
    assert torch.equal(result[..., 2 * half :], x[..., 2 * half :])


def test_scores_depend_on_the_distance_alone():
    generator = torch.Generator().manual_seed(4)
    q, k = torch.randn(2, 1, 1, 32, generator=generator, dtype=torch.float64).float()
    frequencies = 10_000.0 ** -(torch.arange(16) / 16)

    def score(query_position, key_position):
        at_query = torch.tensor([[query_position]]) * frequencies
        at_key = torch.tensor([[key_position]]) * frequencies
        turned = rope(q, at_query.cos(), at_query.sin()) * rope(k, at_key.cos(), at_key.sin())
        return turned.sum().item()

    assert score(107, 100) == pytest.approx(score(7, 0), abs=1e-4)
    assert score(107, 100) != pytest.approx(score(8, 0), abs=1e-2)


@pytest.mark.parametrize(
    ("x", "cos", "sin"),
    [
        (torch.zeros(2, 8), torch.zeros(2, 4), torch.zeros(2, 4)),
        (torch.zeros(2, 1, 8), torch.zeros(3, 4), torch.zeros(3, 4)),
        (torch.zeros(2, 1, 8), torch.zeros(2, 5), torch.zeros(2, 5)),
        (torch.zeros(2, 1, 8), torch.zeros(2, 4), torch.zeros(2, 3)),
    ],
)
def test_refuses_what_does_not_fit(x, cos, sin):
    with pytest.raises(KernelInputError):
        rope(x, cos, sin)
