"""Grids and arguments of the kernels for a few rows."""

import torch
import triton

from ragflash_kernels.columns import Columns
from ragflash_kernels.gated_delta.kernel import (
    advance_rows_kernel,
    commit_kernel,
    prepare_rows_kernel,
)
from ragflash_kernels.gated_delta.states import DeltaSizes, DeltaStates

VALUE_BLOCK = 8  # columns of a memory that a warp takes rows past, without waiting for others
COMMIT_BLOCK = 32  # columns of a memory
TAIL_BLOCK = 1024  # channels


def size_constants(sizes: DeltaSizes) -> dict[str, int]:
    """Return the constants that all kernels are compiled for."""
    return {
        "KEY_HEADS": sizes.key_heads,
        "VALUE_HEADS": sizes.value_heads,
        "DIM": sizes.key_dim,
        "VALUE_DIM": sizes.value_dim,
    }


def first_column(columns: Columns) -> torch.Tensor:
    """Return the parts from the first of the columns on."""
    return columns.partials[:, :, columns.start :]


def delta_step_triton(
    qkv: Columns,
    beta: Columns,
    alpha: Columns,
    *,
    conv: torch.Tensor,
    decay_rate: torch.Tensor,
    decay_bias: torch.Tensor,
    states: DeltaStates,
    first_rows: torch.Tensor,
    slots: torch.Tensor,
    parents: torch.Tensor | None,
    eager: bool,
    value_block: int = VALUE_BLOCK,
    warps: int = 1,
) -> torch.Tensor:
    """Return the heads of every row, and write the tape; arguments as in `delta_step`.

    `value_block` and `warps` are those of a program that goes past a memory.
    """
    sizes, num_sequences = states.sizes, len(slots)
    num_rows, device = qkv.partials.shape[1], conv.device
    constants = size_constants(sizes) | {"ROWS": states.rows, "EAGER": eager}
    queries = torch.empty((num_rows, sizes.key_heads, sizes.key_dim), device=device)
    values = torch.empty((num_rows, sizes.value_heads, sizes.value_dim), device=device)
    steps = torch.empty((num_rows, sizes.value_heads), device=device)
    out = torch.empty_like(values)
    strides = [s for columns in (qkv, beta, alpha) for s in columns.partials.stride()[:2]]
    prepare_rows_kernel[num_rows, 2 * sizes.key_heads + sizes.value_heads + 1](
        first_column(qkv), first_column(beta), first_column(alpha), conv, decay_rate, decay_bias,
        states.tails, states.inputs, states.keys, states.decay, first_rows, slots, parents, queries,
        values, steps, out, *strides, num_sequences, QKV_PARTS=len(qkv.partials),
        BETA_PARTS=len(beta.partials), ALPHA_PARTS=len(alpha.partials), WIDTH=sizes.conv_width,
        SEQUENCES=triton.next_power_of_2(num_sequences),
        HEADS=triton.next_power_of_2(sizes.value_heads), num_warps=1, launch_pdl=eager, **constants,
    )  # fmt: skip
    block = min(value_block, sizes.value_dim)
    advance_rows_kernel[num_sequences, sizes.value_heads, sizes.value_dim // block](
        queries, values, steps, states.keys, states.corrections, states.decay, states.memories,
        first_rows, slots, parents, out, BLOCK=block, num_warps=warps, launch_pdl=eager,
        **constants,
    )  # fmt: skip
    return out


def delta_commit_triton(
    states: DeltaStates, slots: torch.Tensor, counts: torch.Tensor, paths: torch.Tensor | None
) -> None:
    """Apply rows of each tape; arguments as in `delta_commit`."""
    sizes = states.sizes
    layers, num_slots = states.memories.shape[:2]
    block = min(COMMIT_BLOCK, sizes.value_dim)
    parts = sizes.value_heads * (sizes.value_dim // block)
    parts += triton.cdiv(sizes.channels, TAIL_BLOCK)
    commit_kernel[len(slots), layers, parts](
        states.memories, states.tails, states.inputs, states.keys, states.corrections,
        states.decay, slots, counts, paths, 0 if paths is None else paths.stride(0), num_slots,
        WIDTH=sizes.conv_width, ROWS=states.rows,
        BLOCK=block, TAIL_BLOCK=TAIL_BLOCK, num_warps=4, **size_constants(sizes),
    )  # fmt: skip
