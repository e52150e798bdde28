"""Grid and arguments of the kernel."""

import torch
import triton

from ragflash_kernels.columns import Columns
from ragflash_kernels.gated_norm.kernel import gated_norm_kernel
from ragflash_kernels.qmatmul.activations import ActivationBuffers
from ragflash_kernels.qmatmul.formats import BLOCK_COLUMNS


def gated_norm_triton(
    o: torch.Tensor,
    gate: Columns,
    weight: torch.Tensor,
    *,
    eps: float,
    out: ActivationBuffers | torch.Tensor,
    eager: bool,
) -> None:
    """Write norm and gate into `out`; the other arguments are those of `gated_norm`."""
    quantized = isinstance(out, ActivationBuffers)
    if isinstance(out, ActivationBuffers):
        outs, tiles = (out.q.view(torch.int8), out.scales, out.sums), out.q.shape[1]
    else:
        outs, tiles = (out, out, out), 0
    gated_norm_kernel[len(o), triton.cdiv(gate.width, BLOCK_COLUMNS)](
        o, gate.partials[:, :, gate.start :], weight, *outs, *gate.partials.stride()[:2],
        gate.width, tiles, eps, PARTS=len(gate.partials), DIM=o.shape[2], QUANTIZED=quantized,
        EAGER=eager, num_warps=1, launch_pdl=eager,
        enable_fp_fusion=False,  # the grid is that of the result as float32
    )  # fmt: skip
