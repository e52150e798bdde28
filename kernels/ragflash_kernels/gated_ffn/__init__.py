"""The gate between the matrices of a feed-forward part (Shazeer 2020, arXiv:2002.05202)."""

from enum import StrEnum

import torch

from ragflash_kernels.backend import Backend, pick_backend
from ragflash_kernels.columns import Columns
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.gated_ffn.reference import gated_reference
from ragflash_kernels.qmatmul.activations import ActivationBuffers

__all__ = ["Activation", "gated"]


class Activation(StrEnum):
    """The functions that a gate may have."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"  # the tanh form of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415)


def gated(
    gate: Columns,
    up: Columns,
    activation: Activation | str,
    *,
    quantized: bool,
    out_dtype: torch.dtype = torch.bfloat16,
    eager: bool = False,
    backend: Backend | None = None,
) -> ActivationBuffers | torch.Tensor:
    """Return `activation(gate) · up`, in float32 and rounded once.

    Args:
        gate: N rows of F columns.
        up: Likewise.
        activation: Of the gate.
        quantized: Return int8 values of the grid; `out_dtype` is without effect then.
        out_dtype: A float type.
        eager: Programmatic dependent launch (sm_90).
        backend: None picks by the device. There is one kernel; Gluon takes it too.

    Returns:
        `[N, F]`.

    Raises:
        KernelInputError: The two differ in shape, or the activation is not known.
    """
    rows, width = gate.partials.shape[1], gate.width
    if (up.partials.shape[1], up.width) != (rows, width):
        raise KernelInputError(
            f"gate has {rows} rows of {width}, up {up.partials.shape[1]} of {up.width}"
        )
    if activation not in tuple(Activation):
        raise KernelInputError(f"activation {activation!r} is not one of {', '.join(Activation)}")
    gelu = activation == Activation.GELU_TANH
    device = gate.partials.device
    if (backend or pick_backend(device)) is Backend.REFERENCE:
        values = gated_reference(gate.sum(), up.sum(), gelu=gelu)
        return ActivationBuffers.from_rows(values) if quantized else values.to(out_dtype)
    from ragflash_kernels.gated_ffn.launch import gated_triton  # noqa: PLC0415 - lazy

    out: ActivationBuffers | torch.Tensor
    if quantized:
        out = ActivationBuffers.allocate(rows, width, device)
    else:
        out = torch.empty((rows, width), dtype=out_dtype, device=device)
    gated_triton(gate, up, gelu=gelu, out=out, eager=eager)
    return out
