"""Plain torch, in float32."""

import torch
from torch.nn import functional


def gated_reference(gate: torch.Tensor, up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    """Return `activation(gate) · up`."""
    activated = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
    return activated * up
