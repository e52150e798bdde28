"""Grids and arguments of the kernels."""

import torch
import triton

from ragflash_kernels.columns import Columns
from ragflash_kernels.qmatmul.activations import ActivationBuffers
from ragflash_kernels.qmatmul.formats import BLOCK_COLUMNS
from ragflash_kernels.rms_norm.kernel import (
    add_norm_kernel,
    add_parts_kernel,
    norm_parts_kernel,
)

_NARROW = 1024  # columns; of wider rows the parts take longer to read than a launch takes


def add_norm_triton(
    delta: Columns | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    post_weight: torch.Tensor | None,
    delta_scale: float,
    residual_scale: float,
    out: ActivationBuffers | torch.Tensor,
    eager: bool,
) -> None:
    """Write the norm of the sum into `out`; the other arguments are those of `add_norm`."""
    rows, width = residual.shape
    parts, part_stride, row_stride = residual, 0, 0
    if delta is not None:
        parts = delta.partials[:, :, delta.start :]
        part_stride, row_stride = delta.partials.stride(0), delta.partials.stride(1)
    if isinstance(out, ActivationBuffers) and post_weight is None and width > _NARROW:
        blocks, tiles = out.q.shape[:2]
        squares = torch.empty((rows, blocks), device=residual.device)
        add_parts_kernel[(rows, blocks)](
            parts, residual, squares, part_stride, row_stride, width, blocks, delta_scale,
            residual_scale, PARTS=0 if delta is None else delta.partials.shape[0],
            BLOCK=BLOCK_COLUMNS, EAGER=eager, num_warps=2, launch_pdl=eager,
            enable_fp_fusion=False,
        )  # fmt: skip
        norm_parts_kernel[(rows, blocks)](
            residual, squares, weight, out.q.view(torch.int8), out.scales, out.sums, width, blocks,
            tiles, eps, BLOCKS=triton.next_power_of_2(blocks), EAGER=eager, num_warps=1,
            launch_pdl=eager, enable_fp_fusion=False,
        )  # fmt: skip
        return
    if isinstance(out, ActivationBuffers):
        outs = (out.q.view(torch.int8), out.scales, out.sums)
        blocks, tiles = out.q.shape[:2]
    else:
        outs, blocks, tiles = (out, out, out), 0, 0
    steps = max(8, triton.next_power_of_2(width) // 32)
    add_norm_kernel[(rows,)](
        parts, residual, weight, weight if post_weight is None else post_weight, *outs,
        part_stride, row_stride, width, blocks, tiles, eps, delta_scale, residual_scale,
        PARTS=0 if delta is None else delta.partials.shape[0], POST=post_weight is not None,
        QUANTIZED=isinstance(out, ActivationBuffers), STEPS=steps, EAGER=eager,
        num_warps=min(16, steps // 8), launch_pdl=eager,
        enable_fp_fusion=False,  # the grid is that of the norm as float32
    )  # fmt: skip
