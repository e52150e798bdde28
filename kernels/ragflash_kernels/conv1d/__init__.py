"""Causal depthwise convolution over the tokens of one sequence, then SiLU.

The short convolution before linear attention (Yang et al. 2024, arXiv:2412.06464, section 3.4).
"""

from collections.abc import Sequence

import torch

from ragflash_kernels.conv1d.reference import causal_conv1d_reference, tail_after_reference
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.parents import check_parents

__all__ = ["causal_conv1d", "tail_after"]


def causal_conv1d(
    x: torch.Tensor,
    tail: torch.Tensor,
    weight: torch.Tensor,
    *,
    parents: Sequence[int] | None = None,
) -> torch.Tensor:
    """Weigh each row and the `K - 1` rows before it, channel by channel.

    Args:
        x: `[T, C]`, the new rows.
        tail: `[K - 1, C]`, the inputs before the first row; zeros where there are none.
        weight: `[C, K]`; the last column belongs to the row itself.
        parents: For each row the row before it, a smaller number, -1 for the tail; `None` is a
            chain.

    Returns:
        `[T, C]` of the dtype of `x`; the arithmetic is float32.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1]:
        raise KernelInputError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} are not [T, C] and [C, K]"
        )
    if tail.shape != (weight.shape[1] - 1, x.shape[1]):
        raise KernelInputError(f"tail {tuple(tail.shape)} does not fit a kernel of {weight.shape}")
    check_parents(parents, len(x))
    return causal_conv1d_reference(x, tail, weight, parents)


def tail_after(x: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """Return the tail `[K - 1, C]` that follows `tail` when rows `x` `[T, C]` have been taken."""
    return tail_after_reference(x, tail)
