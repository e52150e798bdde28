"""Plain torch."""

import torch

from ragflash_kernels.dequant import dequantize


def gather_rows_reference(
    table: torch.Tensor, token_ids: torch.Tensor, block_format: str, scale: float
) -> torch.Tensor:
    """Return the rows of token ids, float32 `[N, H]`."""
    known = (token_ids >= 0) & (token_ids < len(table))
    blocks = table[torch.where(known, token_ids, 0)]
    values = dequantize(blocks, block_format=block_format, dtype=torch.float32) * scale
    return torch.where(known[:, None], values, 0)
