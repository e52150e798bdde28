"""Root-mean-square norm of each head, then a gate: what linear attention does to its output.

As in Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464, section 3.4).
"""

import torch

from ragflash_kernels.backend import Backend, pick_backend
from ragflash_kernels.columns import Columns
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.gated_norm.reference import gated_norm_reference
from ragflash_kernels.qmatmul.activations import ActivationBuffers
from ragflash_kernels.qmatmul.formats import BLOCK_COLUMNS

__all__ = ["gated_norm"]


def gated_norm(
    o: torch.Tensor,
    gate: Columns,
    weight: torch.Tensor,
    *,
    eps: float,
    quantized: bool,
    out_dtype: torch.dtype = torch.bfloat16,
    eager: bool = False,
    backend: Backend | None = None,
) -> ActivationBuffers | torch.Tensor:
    """Return `rms_norm(o) · silu(gate)`, the heads side by side.

    The arithmetic is float32; the result is rounded once.

    Args:
        o: Floats `[N, Hv, Dv]`, contiguous, Dv a power of two from 16 to 256.
        gate: `[N, Hv · Dv]`.
        weight: float32 `[Dv]`, contiguous.
        eps: Added to a head's mean square, > 0.
        quantized: Return the result on the int8 grid; `out_dtype` is without effect then.
        out_dtype: A float type.
        eager: Programmatic dependent launch (sm_90).
        backend: None picks by the device. There is one kernel; Gluon takes it too.

    Returns:
        `[N, Hv · Dv]`.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    _check(o, gate, weight, eps)
    if (backend or pick_backend(o.device)) is Backend.REFERENCE:
        result = gated_norm_reference(o, gate, weight, eps)
        return ActivationBuffers.from_rows(result) if quantized else result.to(out_dtype)
    from ragflash_kernels.gated_norm.launch import gated_norm_triton  # noqa: PLC0415 - lazy

    rows, columns = len(o), gate.width
    out: ActivationBuffers | torch.Tensor
    if quantized:
        out = ActivationBuffers.allocate(rows, columns, o.device)
    else:
        out = torch.empty((rows, columns), dtype=out_dtype, device=o.device)
    gated_norm_triton(o, gate, weight, eps=eps, out=out, eager=eager)
    return out


def _check(o: torch.Tensor, gate: Columns, weight: torch.Tensor, eps: float) -> None:
    if o.dim() != 3 or not o.is_contiguous():
        raise KernelInputError(f"o {tuple(o.shape)} is not [N, Hv, Dv], contiguous")
    rows, heads, dim = o.shape
    if dim not in (16, 32, 64, 128, BLOCK_COLUMNS):
        raise KernelInputError(f"heads of {dim} values; powers of two from 16 to 256 are taken")
    if (gate.partials.shape[1], gate.width) != (rows, heads * dim):
        raise KernelInputError(
            f"the gate has {gate.partials.shape[1]} rows of {gate.width}, o {tuple(o.shape)}"
        )
    if weight.shape != (dim,) or weight.dtype != torch.float32 or not weight.is_contiguous():
        raise KernelInputError(
            f"weight is {weight.dtype} {tuple(weight.shape)}, not float32 [{dim}], contiguous"
        )
    if not eps > 0:
        raise KernelInputError(f"eps = {eps} is not positive")
