"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import torch

from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.rms_norm.reference import rms_norm_reference

__all__ = ["rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Scale the last dimension to a root mean square of 1, then by `weight`.

    The arithmetic is float32 whatever the dtypes are; the result is rounded once.

    Args:
        x: `[..., H]`.
        weight: `[H]`.
        eps: Added to the mean square, > 0.

    Returns:
        Of the shape and dtype of `x`.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    if weight.dim() != 1 or x.dim() < 1 or x.shape[-1] != weight.shape[0]:
        raise KernelInputError(
            f"weight {tuple(weight.shape)} does not fit the last dimension of {tuple(x.shape)}"
        )
    if not eps > 0:
        raise KernelInputError(f"eps = {eps} is not positive")
    return rms_norm_reference(x, weight, eps)
