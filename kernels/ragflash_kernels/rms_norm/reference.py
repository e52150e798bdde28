"""Plain torch, in float32."""

import torch
from torch.nn import functional


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / sqrt(mean(x²) + eps) · weight`."""
    normed = functional.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return normed.to(x.dtype)
