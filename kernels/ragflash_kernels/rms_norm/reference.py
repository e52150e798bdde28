"""Plain torch, in float32."""

import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / sqrt(mean(x²) + eps) · weight`."""
    values = x.float()
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (values * scale * weight.float()).to(x.dtype)
