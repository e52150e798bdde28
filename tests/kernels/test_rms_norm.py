"""RMSNorm against its definition in float64."""

import numpy as np
import pytest
import torch

from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.rms_norm import rms_norm

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 64), (17, 577)])
def test_equals_the_definition(shape, dtype):
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.standard_normal(shape) * 3).to(dtype)
    weight = torch.from_numpy(rng.uniform(0.5, 1.5, shape[-1])).float()
    exact = x.double().numpy()
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * weight.double().numpy()
    result = rms_norm(x, weight, eps=1e-5)
    assert result.dtype == dtype
    np.testing.assert_allclose(
        result.double().numpy(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def test_a_row_does_not_depend_on_others():
    x = torch.randn(9, 33, generator=torch.Generator().manual_seed(2))
    weight = torch.linspace(0.5, 2, 33)
    whole = rms_norm(x, weight, eps=1e-6)
    assert torch.equal(whole[4:5], rms_norm(x[4:5], weight, eps=1e-6))


def test_a_row_of_zeros_stays_zero():
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), eps=1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize(
    ("x", "weight", "eps"),
    [
        (torch.zeros(2, 8), torch.ones(7), 1e-6),
        (torch.zeros(2, 8), torch.ones(1, 8), 1e-6),
        (torch.zeros(2, 8), torch.ones(8), 0.0),
        (torch.zeros(()), torch.ones(1), 1e-6),
    ],
)
def test_refuses_what_does_not_fit(x, weight, eps):
    with pytest.raises(KernelInputError):
        rms_norm(x, weight, eps=eps)
