"""Grid and arguments of the kernel."""

import torch
import triton

from ragflash_kernels.columns import Columns
from ragflash_kernels.gated_ffn.kernel import gated_kernel
from ragflash_kernels.qmatmul.activations import ActivationBuffers

_STEPS_OF_A_BLOCK = 8
_STEPS_OF_MANY_ROWS = 64


def gated_triton(
    gate: Columns, up: Columns, *, gelu: bool, out: ActivationBuffers | torch.Tensor, eager: bool
) -> None:
    """Write `activation(gate) · up` into `out`."""
    if isinstance(out, ActivationBuffers):
        outs = (out.q.view(torch.int8), out.scales, out.sums)
        tiles, steps = out.q.shape[1], _STEPS_OF_A_BLOCK
    else:
        outs, tiles, steps = (out, out, out), 0, _STEPS_OF_MANY_ROWS
    gated_kernel[gate.partials.shape[1], triton.cdiv(gate.width, 32 * steps)](
        gate.partials[:, :, gate.start :], up.partials[:, :, up.start :], *outs,
        gate.partials.stride(0), gate.partials.stride(1), up.partials.stride(0),
        up.partials.stride(1), gate.width, tiles, GATE_PARTS=gate.partials.shape[0],
        UP_PARTS=up.partials.shape[0], GELU=gelu, QUANTIZED=isinstance(out, ActivationBuffers),
        STEPS=steps, EAGER=eager, num_warps=steps // 8, launch_pdl=eager,
        enable_fp_fusion=False,  # the grid is that of the values as float32
    )  # fmt: skip
