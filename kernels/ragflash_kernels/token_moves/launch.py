"""Grid and arguments of the kernel."""

import torch
import triton

from ragflash_kernels.token_moves.kernel import move_tokens_kernel

_BLOCK = 512  # values; those of a 27B hybrid's token are then of 64 programs


def move_tokens_triton(
    pages: torch.Tensor, starts: torch.Tensor, strides: torch.Tensor, moves: torch.Tensor
) -> None:
    """Launch it; arguments as in `move_tokens`."""
    num_values = len(starts)
    move_tokens_kernel[(triton.cdiv(num_values, _BLOCK),)](
        pages, starts, strides, moves.contiguous(), len(moves), pages.shape[1], num_values,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
