"""Plain torch, in float32: few passes, since a row of decoding is bound by their number."""

from functools import lru_cache

import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / sqrt(mean(x²) + eps) · weight`."""
    values = x.float()
    norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    floor = _constant(eps, x.device)
    factor = torch.addcmul(floor, norm, norm, value=1 / weight.shape[0]).rsqrt_()
    return (values * factor).mul_(weight).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `x` to `residual`, in place; return the norm of the sum in the dtype of `x`."""
    residual.copy_(residual.float() + x.float())
    return rms_norm_reference(residual.float(), weight, eps).to(x.dtype)


@lru_cache(maxsize=16)
def _constant(value: float, device: torch.device) -> torch.Tensor:
    """Return a float32 scalar; wrapping a Python number anew costs as much as a pass."""
    return torch.tensor(value, dtype=torch.float32, device=device)
