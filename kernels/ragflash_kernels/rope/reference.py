"""Plain torch, in float32: few passes, since a row of decoding is bound by their number."""

import torch


def rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs `(j, j + F)` of the last dimension."""
    half = cos.shape[1]
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)  # [N, 1, F]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    parts = [
        torch.mul(first, cos).addcmul_(second, sin, value=-1),
        torch.mul(second, cos).addcmul_(first, sin),
    ]
    if 2 * half < x.shape[2]:
        parts.append(x[..., 2 * half :].float())
    return torch.cat(parts, dim=-1).to(x.dtype)
