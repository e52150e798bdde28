"""Token vectors, from a table that stays as the file stores it."""

import torch

from ragflash_kernels.backend import Backend, pick_backend
from ragflash_kernels.embedding.reference import gather_rows_reference
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.quant_layout import BLOCK_FORMATS

__all__ = ["gather_rows"]


def gather_rows(
    table: torch.Tensor,
    token_ids: torch.Tensor,
    block_format: str,
    *,
    scale: float = 1.0,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Unpack the rows of some tokens and multiply them by `scale`.

    Args:
        table: uint8 `[V, row_bytes]`, contiguous, on the device of `token_ids` or for a card in
            pinned memory of the host, which the card then reads over its bus.
        token_ids: int32 or int64 `[N]`, contiguous; an id outside of the table, as of padding,
            gives zeros.
        block_format: A key of `BLOCK_FORMATS`.
        scale: Factor of the values.
        backend: None picks by the device of `token_ids`. There is one kernel; Gluon takes it too.

    Returns:
        float32 `[N, H]`.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    _check(table, token_ids, block_format)
    if (backend or pick_backend(token_ids.device)) is Backend.REFERENCE:
        return gather_rows_reference(table, token_ids, block_format, scale)
    from ragflash_kernels.embedding.launch import gather_rows_triton  # noqa: PLC0415 - lazy

    return gather_rows_triton(table, token_ids, BLOCK_FORMATS[block_format], scale)


def _check(table: torch.Tensor, token_ids: torch.Tensor, block_format: str) -> None:
    known = BLOCK_FORMATS.get(block_format)
    if known is None:
        raise KernelInputError(
            f"block format {block_format!r} is not one of {', '.join(BLOCK_FORMATS)}"
        )
    if table.dtype != torch.uint8 or table.dim() != 2 or 0 in table.shape:
        raise KernelInputError(
            f"table is {table.dtype} {tuple(table.shape)}, not uint8 [V, row_bytes]"
        )
    if not table.is_contiguous() or table.shape[1] % known.bytes_per_block:
        raise KernelInputError(
            f"rows of {table.shape[1]} bytes with strides {table.stride()} are not contiguous "
            f"whole {block_format} blocks of {known.bytes_per_block} bytes"
        )
    if table.data_ptr() % 4:
        raise KernelInputError("the table does not begin at a multiple of 4 bytes")
    if token_ids.dtype not in (torch.int32, torch.int64) or token_ids.dim() != 1:
        raise KernelInputError(f"token ids are {token_ids.dtype} {tuple(token_ids.shape)}")
    if not token_ids.is_contiguous():
        raise KernelInputError("token ids must be contiguous")
    if table.device != token_ids.device and not table.is_pinned():
        raise KernelInputError(
            f"the table is on {table.device} and not pinned, token ids are on {token_ids.device}"
        )
