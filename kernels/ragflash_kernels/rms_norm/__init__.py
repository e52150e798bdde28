"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import torch

from ragflash_kernels.backend import Backend, pick_backend
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference

__all__ = ["add_rms_norm", "rms_norm"]


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


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Add `x` to the residual stream, in place, and normalise the sum.

    The arithmetic is float32; the sum is rounded to the type of `residual` first, then the result
    once to that of `x`.

    Args:
        x: `[M, H]`, contiguous.
        residual: `[M, H]`, contiguous; `x` is added to it.
        weight: `[H]`.
        eps: Added to the mean square, > 0.
        backend: None picks by the device of `x`. There is one kernel; Gluon takes it too.

    Returns:
        Of the shape and dtype of `x`.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    if x.dim() != 2 or x.shape != residual.shape or weight.shape != x.shape[1:]:
        raise KernelInputError(
            f"x {tuple(x.shape)}, residual {tuple(residual.shape)} and weight "
            f"{tuple(weight.shape)} are not twice [M, H] and [H]"
        )
    if not (x.is_contiguous() and residual.is_contiguous() and weight.is_contiguous()):
        raise KernelInputError("x, residual and weight must be contiguous")
    if not eps > 0:
        raise KernelInputError(f"eps = {eps} is not positive")
    if (backend or pick_backend(x.device)) is Backend.REFERENCE:
        return add_rms_norm_reference(x, residual, weight, eps)
    from ragflash_kernels.rms_norm.launch import add_rms_norm_triton  # noqa: PLC0415 - lazy

    return add_rms_norm_triton(x, residual, weight, eps)
