"""Plain torch, in float32: few passes, since a row of decoding is bound by their number."""

from functools import lru_cache

import torch

from ragflash_kernels.columns import Columns


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / sqrt(mean(x²) + eps) · weight`."""
    values = x.float()
    norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    floor = _constant(eps, x.device)
    factor = torch.addcmul(floor, norm, norm, value=1 / weight.shape[0]).rsqrt_()
    return (values * factor).mul_(weight).to(x.dtype)


def add_norm_reference(
    delta: Columns | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    post_weight: torch.Tensor | None,
    delta_scale: float,
    residual_scale: float,
) -> torch.Tensor:
    """Change `residual`, return its norm, float32; arguments as in `add_norm`."""
    if delta is not None:
        added = delta.sum()
        if post_weight is not None:
            added = rms_norm_reference(added, post_weight, eps)
        residual.add_(added, alpha=delta_scale).mul_(residual_scale)
    return rms_norm_reference(residual, weight, eps)


@lru_cache(maxsize=16)
def _constant(value: float, device: torch.device) -> torch.Tensor:
    """Return a float32 scalar; wrapping a Python number anew costs as much as a pass."""
    return torch.tensor(value, dtype=torch.float32, device=device)
