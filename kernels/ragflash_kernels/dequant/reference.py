"""Unpacking in plain torch, a few rows at a time, so that every pass but the last stays in cache.

The formats are defined by `ggml-common.h` and `ggml-quants.c` of the GGML library. Products and
sums are taken in their order there, each rounded to float32.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from ragflash_kernels.dequant import iq4, k_quants, legacy
from ragflash_kernels.dequant.fields import read_as
from ragflash_kernels.quant_layout import BLOCK_FORMATS

CHUNK_ELEMENTS = 2**18


def dequantize_reference(blocks: Tensor, block_format: str, out: Tensor) -> None:
    """Unpack uint8 `[R, row_bytes]` into `out`, `[R, C]` of any strides and float type."""
    sizes = BLOCK_FORMATS[block_format]
    unpack = _UNPACK[block_format]
    rows_per_chunk = max(1, CHUNK_ELEMENTS // max(1, out.shape[1]))
    for start in range(0, len(blocks), rows_per_chunk):
        rows = blocks[start : start + rows_per_chunk]
        target = out[start : start + rows_per_chunk]
        target.copy_(unpack(rows.reshape(-1, sizes.bytes_per_block)).view(target.shape))


_UNPACK: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F32": partial(read_as, dtype=torch.float32),
    "F16": partial(read_as, dtype=torch.float16),
    "BF16": partial(read_as, dtype=torch.bfloat16),
    "Q4_0": legacy.unpack_q4_0,
    "Q4_1": legacy.unpack_q4_1,
    "Q5_0": legacy.unpack_q5_0,
    "Q5_1": legacy.unpack_q5_1,
    "Q8_0": legacy.unpack_q8_0,
    "Q2_K": k_quants.unpack_q2_k,
    "Q3_K": k_quants.unpack_q3_k,
    "Q4_K": k_quants.unpack_q4_k,
    "Q5_K": k_quants.unpack_q5_k,
    "Q6_K": k_quants.unpack_q6_k,
    "IQ4_NL": iq4.unpack_iq4_nl,
    "IQ4_XS": iq4.unpack_iq4_xs,
}
