"""Unpack rows of GGML blocks into floating point."""

import torch

from ragflash_kernels.dequant.reference import dequantize_reference
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.quant_layout import BLOCK_FORMATS

__all__ = ["dequantize"]

_OUTPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def dequantize(
    blocks: torch.Tensor,
    *,
    block_format: str,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Unpack `blocks` into a matrix.

    The arithmetic is float32 whatever `dtype` is; each value is rounded once, at the end.

    Args:
        blocks: uint8 `[R, row_bytes]`; the last dimension is contiguous.
        block_format: A key of `BLOCK_FORMATS`.
        dtype: float32, float16 or bfloat16.
        out: Written and returned when given: `[R, C]` of `dtype` and any strides, on the device of
            `blocks`.

    Returns:
        `[R, C]`, C being the number of values in a row.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    columns = _checked_columns(blocks, block_format, dtype)
    expected = (blocks.shape[0], columns)
    if out is None:
        out = torch.empty(expected, dtype=dtype, device=blocks.device)
    elif tuple(out.shape) != expected or out.dtype != dtype or out.device != blocks.device:
        raise KernelInputError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, "
            f"not {expected} {dtype} on {blocks.device}"
        )
    dequantize_reference(blocks, block_format, out)
    return out


def _checked_columns(blocks: torch.Tensor, block_format: str, dtype: torch.dtype) -> int:
    known = BLOCK_FORMATS.get(block_format)
    if known is None:
        raise KernelInputError(
            f"block format {block_format!r} is not one of {', '.join(BLOCK_FORMATS)}"
        )
    if dtype not in _OUTPUT_DTYPES:
        raise KernelInputError(f"cannot unpack into {dtype}; use float32, float16 or bfloat16")
    if blocks.dtype != torch.uint8 or blocks.dim() != 2:
        raise KernelInputError(
            f"blocks must be uint8 [R, row_bytes], not {blocks.dtype} {tuple(blocks.shape)}"
        )
    if blocks.shape[1] > 1 and blocks.stride(1) != 1:
        raise KernelInputError("the bytes of a row must be contiguous")
    num_blocks, rest = divmod(blocks.shape[1], known.bytes_per_block)
    if rest:
        raise KernelInputError(
            f"a row of {blocks.shape[1]} bytes is not a whole number of {block_format} blocks "
            f"of {known.bytes_per_block} bytes"
        )
    return num_blocks * known.elements_per_block
