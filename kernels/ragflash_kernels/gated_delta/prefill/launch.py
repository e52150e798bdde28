"""Grids and arguments of the kernels for many rows."""

from dataclasses import dataclass

import torch
import triton

from ragflash_kernels.columns import Columns
from ragflash_kernels.conv1d import tail_after
from ragflash_kernels.gated_delta.launch import first_column, size_constants
from ragflash_kernels.gated_delta.prefill.kernel import (
    CHUNK,
    chain_chunks_kernel,
    prepare_chunks_kernel,
    solve_chunks_kernel,
)
from ragflash_kernels.gated_delta.states import DeltaSizes, DeltaStates

ROWS = 16  # of a program of the convolution


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """How the chain of chunks is launched.

    Blocks of fewer than 64 columns gave wrong memories on an H200 (Triton 3.6) with 4 warps, and
    with 8 read where nothing is: 2 warps do not use Hopper's own matrix instructions.

    Attributes:
        value_block: Columns of a memory that a program keeps.
        warps: Of a program.
        stages: Chunks that are loaded at a time.
        solve_warps: Of a program that solves a chunk.
    """

    value_block: int = 64
    warps: int = 8
    stages: int = 1
    solve_warps: int = 4


def pick_chain(value_dim: int, *, hopper: bool) -> ChainOptions:
    """Return what is best on an H200, or what spills no registers on other cards."""
    if not hopper:
        return ChainOptions(value_block=min(32, value_dim))
    return ChainOptions() if value_dim >= 64 else ChainOptions(value_block=value_dim, warps=2)


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What the kernels hand on; T rows, in whole chunks."""

    queries: torch.Tensor  # [T, Hk, D]
    keys: torch.Tensor  # [T, Hk, 2, D]
    values: torch.Tensor  # [T, Hv, Dv]
    decay: torch.Tensor  # [Hv, T]
    steps: torch.Tensor  # [Hv, T]
    inverses: torch.Tensor  # [Hv, chunks, 2, 64, 64]
    mixing: torch.Tensor  # [Hv, chunks, 64, 64]

    @classmethod
    def allocate(cls, sizes: DeltaSizes, chunks: int, device: torch.device) -> "_Scratch":
        """Return scratch for so many chunks."""
        rows, heads = chunks * CHUNK, sizes.value_heads
        # The interpreter, whose tensors are on a CPU, does not know bfloat16.
        half = torch.float16 if device.type == "cpu" else torch.bfloat16

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            empty(rows, sizes.key_heads, sizes.key_dim, dtype=half),
            empty(rows, sizes.key_heads, 2, sizes.key_dim, dtype=half),
            empty(rows, heads, sizes.value_dim),
            empty(heads, rows),
            empty(heads, rows),
            empty(heads, chunks, 2, CHUNK, CHUNK, dtype=half),
            empty(heads, chunks, CHUNK, CHUNK, dtype=half),
        )


def delta_prefill_triton(
    qkv: Columns,
    beta: Columns,
    alpha: Columns,
    *,
    conv: torch.Tensor,
    decay_rate: torch.Tensor,
    decay_bias: torch.Tensor,
    states: DeltaStates,
    slot: int,
    keep: bool,
    out_dtype: torch.dtype,
    options: ChainOptions | None = None,
) -> torch.Tensor:
    """Return the heads of every row, and change the slot's state; see `delta_prefill`."""
    sizes, device = states.sizes, conv.device
    options = options or pick_chain(sizes.value_dim, hopper=_is_hopper(device))
    rows = qkv.partials.shape[1]
    chunks = triton.cdiv(rows, CHUNK)
    constants = size_constants(sizes)
    scratch = _Scratch.allocate(sizes, chunks, device)
    out = torch.empty((rows, sizes.value_heads, sizes.value_dim), dtype=out_dtype, device=device)
    tail = states.tails[slot]
    prepare_chunks_kernel[chunks * CHUNK // ROWS, 2 * sizes.key_heads + sizes.value_heads](
        first_column(qkv), conv, tail, scratch.queries, scratch.keys, scratch.values,
        *qkv.partials.stride()[:2], rows, PARTS=len(qkv.partials), WIDTH=sizes.conv_width,
        BLOCK=ROWS, num_warps=4, **constants,
    )  # fmt: skip
    solve_chunks_kernel[chunks, sizes.value_heads](
        scratch.queries, scratch.keys, first_column(beta), first_column(alpha), decay_rate,
        decay_bias, scratch.decay, scratch.steps, scratch.inverses, scratch.mixing,
        *beta.partials.stride()[:2], *alpha.partials.stride()[:2], rows, chunks,
        BETA_PARTS=len(beta.partials), ALPHA_PARTS=len(alpha.partials),
        num_warps=options.solve_warps, **constants,
    )  # fmt: skip
    block = options.value_block
    chain_chunks_kernel[sizes.value_heads, sizes.value_dim // block](
        scratch.queries, scratch.keys, scratch.values, scratch.decay, scratch.steps,
        scratch.inverses, scratch.mixing, states.memories[slot], out, rows, chunks, BLOCK=block,
        KEEP=keep, num_warps=options.warps, num_stages=options.stages, **constants,
    )  # fmt: skip
    if keep:
        last = qkv.partials[:, -len(tail) :]
        tail.copy_(tail_after(Columns(last, qkv.start, qkv.width).sum(), tail))
    return out
