"""Copies of tokens from place to place of pages, keys and values of all layers at once."""

import torch

from ragflash_kernels.backend import Backend, pick_backend
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.token_moves.reference import move_tokens_reference

__all__ = ["move_tokens"]


def move_tokens(
    pages: torch.Tensor,
    starts: torch.Tensor,
    strides: torch.Tensor,
    moves: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Copy tokens in order.

    Value v of the token at place p of a page is at `starts[v] + p · strides[v]` of it.

    Args:
        pages: `[P, values of a page]`, contiguous; written to.
        starts: int32 `[V]`, one entry a value of a token.
        strides: int32 `[V]`.
        moves: int64 `[M, 4]` on the device of `pages`: page and place of the source, page and place
            of the target. No target is the source of a later move.
        backend: None picks by the device. There is one kernel; Gluon takes it too.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    if pages.dim() != 2 or not pages.is_contiguous():
        raise KernelInputError(f"pages {tuple(pages.shape)} are not [P, values], contiguous")
    if starts.dim() != 1 or starts.shape != strides.shape:
        raise KernelInputError(f"{tuple(starts.shape)} starts, {tuple(strides.shape)} strides")
    if not starts.dtype == strides.dtype == torch.int32:
        raise KernelInputError("starts and strides must be int32")
    if moves.dtype != torch.int64 or moves.dim() != 2 or moves.shape[1] != 4:
        raise KernelInputError(f"moves {moves.dtype} {tuple(moves.shape)} are not int64 [M, 4]")
    if not len(moves) or not len(starts):
        return
    if (backend or pick_backend(pages.device)) is Backend.REFERENCE:
        move_tokens_reference(pages, starts, strides, moves)
        return
    from ragflash_kernels.token_moves.launch import move_tokens_triton  # noqa: PLC0415 - lazy

    move_tokens_triton(pages, starts, strides, moves)
