"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import torch

from ragflash_kernels.backend import Backend, pick_backend
from ragflash_kernels.columns import Columns
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.qmatmul.activations import ActivationBuffers
from ragflash_kernels.rms_norm.reference import add_norm_reference, rms_norm_reference

__all__ = ["MAX_WIDTH", "add_norm", "rms_norm"]

MAX_WIDTH = 8192  # of a row that one program of `add_norm` keeps in registers


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


def add_norm(
    delta: Columns | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    quantized: bool,
    post_weight: torch.Tensor | None = None,
    delta_scale: float = 1.0,
    residual_scale: float = 1.0,
    out_dtype: torch.dtype = torch.bfloat16,
    eager: bool = False,
    backend: Backend | None = None,
) -> ActivationBuffers | torch.Tensor:
    """Add `delta` to the residual stream, in place, and normalise the sum.

    The residual becomes `(residual + delta · delta_scale) · residual_scale`; with `post_weight`
    delta is normalised first. The arithmetic is float32; the norm is rounded once.

    Args:
        delta: Of the shape of `residual`; None adds nothing and leaves the residual as it is.
        residual: float32 `[N, H]`, contiguous, H up to `MAX_WIDTH`.
        weight: float32 `[H]`, contiguous.
        eps: Added to the mean square, > 0.
        quantized: Return the norm on the int8 grid; `out_dtype` is without effect then.
        post_weight: As `weight`, of the norm of delta.
        delta_scale: Factor of what is added.
        residual_scale: Factor of the sum.
        out_dtype: A float type.
        eager: Programmatic dependent launch (sm_90).
        backend: None picks by the device. There is one kernel; Gluon takes it too.

    Returns:
        The norm `[N, H]`.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    _check(delta, residual, weight, post_weight, eps)
    scales = {"eps": eps, "delta_scale": delta_scale, "residual_scale": residual_scale}
    if (backend or pick_backend(residual.device)) is Backend.REFERENCE:
        norm = add_norm_reference(delta, residual, weight, post_weight=post_weight, **scales)
        return ActivationBuffers.from_rows(norm) if quantized else norm.to(out_dtype)
    from ragflash_kernels.rms_norm.launch import add_norm_triton  # noqa: PLC0415 - lazy

    out: ActivationBuffers | torch.Tensor
    if quantized:
        out = ActivationBuffers.allocate(len(residual), residual.shape[1], residual.device)
    else:
        out = torch.empty(residual.shape, dtype=out_dtype, device=residual.device)
    add_norm_triton(
        delta, residual, weight, post_weight=post_weight, out=out, eager=eager, **scales
    )
    return out


def _check(
    delta: Columns | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    post_weight: torch.Tensor | None,
    eps: float,
) -> None:
    if residual.dim() != 2 or not 1 <= residual.shape[1] <= MAX_WIDTH:
        raise KernelInputError(
            f"residual {tuple(residual.shape)} is not [N, H] with H up to {MAX_WIDTH}"
        )
    for name, tensor in {"weight": weight, "post_weight": post_weight}.items():
        if tensor is not None and (
            tensor.shape != residual.shape[1:] or tensor.dtype != torch.float32
        ):
            raise KernelInputError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not float32 [{residual.shape[1]}]"
            )
    for tensor in (residual, weight, post_weight):
        if tensor is not None and not tensor.is_contiguous():
            raise KernelInputError("residual and weights must be contiguous")
    if residual.dtype != torch.float32:
        raise KernelInputError(f"residual is {residual.dtype}, not float32")
    if delta is not None and (delta.partials.shape[1], delta.width) != tuple(residual.shape):
        raise KernelInputError(
            f"delta has {delta.partials.shape[1]} rows of {delta.width}, "
            f"residual {tuple(residual.shape)}"
        )
    if not eps > 0:
        raise KernelInputError(f"eps = {eps} is not positive")
