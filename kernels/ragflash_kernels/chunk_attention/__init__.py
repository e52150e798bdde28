"""Attention of a chunk's rows over pages as they are, by launches that lengths do not change."""

import torch
from torch import Tensor

from ragflash_kernels.backend import Backend, pick_backend
from ragflash_kernels.chunk_attention.reference import chunk_attention_reference
from ragflash_kernels.errors import KernelInputError

__all__ = ["chunk_attention"]


def chunk_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    counts: Tensor,
    *,
    scale: float,
    window: int | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: Backend | None = None,
) -> Tensor:
    """Attend, head by head; `Hq / Hkv` consecutive query heads share a key head.

    Row r sees the first `before + r + 1` tokens; places that no row sees may hold anything.

    Args:
        q: float16 `[N, Hq, D]`, contiguous.
        keys: float16 `[P, Hkv, T, D]`, the rows' own keys included; a page is contiguous, pages may
            lie apart.
        values: As `keys`, with the same strides.
        pages: int32 `[n]`: pages of the tokens in order; those that no row sees may be any number.
        counts: int32 `[2]`: tokens `before` the first row, and rows. Rows beyond these give 0.
        scale: Of the scores before the softmax, usually `D ** -0.5`.
        window: Newest tokens that a row sees, its own included; `None` for all.
        out_dtype: A float type.
        backend: None picks by the device. There is one kernel; Gluon takes it too.

    Returns:
        `[N, Hq, D]`, contiguous.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    _check(q, keys, values, window)
    for name, table in (("pages", pages), ("counts", counts)):
        if table.dim() != 1 or table.dtype != torch.int32:
            raise KernelInputError(f"{name} is {table.dtype} {tuple(table.shape)}")
    if len(counts) != 2:
        raise KernelInputError(f"{len(counts)} counts")
    if (backend or pick_backend(q.device)) is Backend.REFERENCE:
        return chunk_attention_reference(q, keys, values, pages, counts, scale, window, out_dtype)
    from ragflash_kernels.chunk_attention.launch import chunk_attention_triton  # noqa: PLC0415

    return chunk_attention_triton(q, keys, values, pages, counts, scale, window, out_dtype)


def _check(q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> None:
    if q.dim() != 3 or q.dtype != torch.float16 or not q.is_contiguous():
        raise KernelInputError(f"q is {q.dtype} {tuple(q.shape)}, not float16 [N, Hq, D]")
    _, num_heads, head_dim = q.shape
    if keys.dim() != 4 or keys.dtype != torch.float16 or not keys[0].is_contiguous():
        raise KernelInputError(
            f"keys are {keys.dtype} {tuple(keys.shape)}, not float16 [P, Hkv, T, D], whose pages "
            "are contiguous"
        )
    if keys.shape != values.shape or keys.stride() != values.stride():
        raise KernelInputError("keys and values are laid out differently")
    if keys.shape[3] != head_dim or num_heads % keys.shape[1]:
        raise KernelInputError(
            f"{num_heads} query heads of {head_dim} do not fit {keys.shape[1]} of {keys.shape[3]}"
        )
    if window is not None and window < 1:
        raise KernelInputError(f"a window of {window} tokens")
