"""Plain torch, in float32."""

import torch


def rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs `(j, j + F)` of the last dimension."""
    half = cos.shape[1]
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)  # [N, 1, F]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
