"""Grid and arguments of the kernel."""

from functools import cache

import torch
import triton

from ragflash_kernels.dequant.iq4 import LEVELS
from ragflash_kernels.embedding.kernel import gather_rows_kernel
from ragflash_kernels.quant_layout import BlockFormat

_COLUMNS = 256


def gather_rows_triton(
    table: torch.Tensor, token_ids: torch.Tensor, block_format: BlockFormat, scale: float
) -> torch.Tensor:
    """Return float32 `[N, H]`; a table in pinned memory is read where it is."""
    table_rows, row_bytes = table.shape
    width = row_bytes // block_format.bytes_per_block * block_format.elements_per_block
    rows = token_ids.shape[0]
    out = torch.empty((rows, width), dtype=torch.float32, device=token_ids.device)
    gather_rows_kernel[rows, triton.cdiv(width, _COLUMNS)](
        table, token_ids, _levels(token_ids.device), out, row_bytes, table_rows, width, scale,
        FORMAT=block_format.name, ELEMENTS=block_format.elements_per_block,
        BLOCK_BYTES=block_format.bytes_per_block, COLUMNS=_COLUMNS, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


@cache
def _levels(device: torch.device) -> torch.Tensor:
    return torch.tensor(LEVELS, dtype=torch.int8, device=device)
