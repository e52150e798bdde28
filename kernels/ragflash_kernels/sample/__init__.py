"""Choosing tokens where the logits are."""

import torch

from ragflash_kernels.backend import Backend, pick_backend
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.sample.reference import largest_reference

__all__ = ["largest"]


def largest(
    logits: torch.Tensor,
    num_valid_columns: int,
    *,
    backend: Backend | None = None,
    eager: bool = False,
) -> torch.Tensor:
    """Return where the largest logit of each row is, the first of equals.

    NaN is smaller than everything, so the result is a valid column whatever the logits are.

    Args:
        logits: float32 `[N, V]`, the last dimension contiguous.
        num_valid_columns: Columns from this one on are ignored; at least 1.
        backend: None picks by the device. There is one kernel; Gluon takes it too.
        eager: Programmatic dependent launch (sm_90).

    Returns:
        int32 `[N]`.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise KernelInputError(
            f"logits are {logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}, not "
            "float32 [N, V], the last dimension contiguous"
        )
    if not 1 <= num_valid_columns <= logits.shape[1]:
        raise KernelInputError(f"{num_valid_columns} valid columns of {logits.shape[1]}")
    if (backend or pick_backend(logits.device)) is Backend.REFERENCE:
        return largest_reference(logits, num_valid_columns)
    from ragflash_kernels.sample.launch import largest_triton  # noqa: PLC0415 - lazy

    return largest_triton(logits, num_valid_columns, eager=eager)
