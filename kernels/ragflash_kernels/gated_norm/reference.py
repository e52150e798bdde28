"""Plain torch, in float32."""

import torch
from torch.nn import functional

from ragflash_kernels.columns import Columns
from ragflash_kernels.rms_norm import rms_norm


def gated_norm_reference(
    o: torch.Tensor, gate: Columns, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return float32 `[N, Hv · Dv]`; arguments as in `gated_norm`."""
    return rms_norm(o.float(), weight, eps=eps).flatten(1) * functional.silu(gate.sum())
