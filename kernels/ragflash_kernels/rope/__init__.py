"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves paired."""

import torch

from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.rope.reference import rope_reference

__all__ = ["rope"]


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head by its row's angles.

    Dimension `j` of the first `2F` pairs with `j + F`; dimensions from `2F` on pass unchanged.
    The arithmetic is float32 whatever the dtypes are; the result is rounded once.

    Args:
        x: `[N, H, D]`.
        cos: Cosines of the angles, `[N, F]` with `2F <= D`.
        sin: Sines of the angles, as `cos`.

    Returns:
        A new tensor of the shape and dtype of `x`.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    if x.dim() != 3 or cos.dim() != 2 or cos.shape != sin.shape:
        raise KernelInputError(
            f"x {tuple(x.shape)}, cos {tuple(cos.shape)} and sin {tuple(sin.shape)} are not "
            "[N, H, D], [N, F] and [N, F]"
        )
    if cos.shape[0] != x.shape[0] or 2 * cos.shape[1] > x.shape[2]:
        raise KernelInputError(
            f"angles {tuple(cos.shape)} do not fit rows and head dimension of {tuple(x.shape)}"
        )
    return rope_reference(x, cos, sin)
