"""Products of every number of rows, each computed its own way."""

import pytest
import torch

from ragflash.models.linear import DenseLinear

IN = 40


@pytest.mark.parametrize("num_out", [40, 80, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 9, 64])
def test_any_number_of_rows(num_out, num_rows, with_bias, dtype):
    generator = torch.Generator().manual_seed(num_rows)
    weight, x = (torch.randn(n, IN, generator=generator).to(dtype) for n in (num_out, num_rows))
    bias = torch.randn(num_out, generator=generator).to(dtype) if with_bias else None
    found = DenseLinear(weight, bias)(x)
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert found.dtype == dtype
    assert found.is_contiguous()
    tolerance = 3e-5 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=tolerance)
