"""The recurrent half of a layer as a card runs it: convolution, gates, delta rule and its state.

Few rows of several sequences, chains or trees, leave a tape (`delta_step`), of which any path can
be made part of the state (`delta_commit`); many rows of one sequence change the state
(`delta_prefill`).
"""

import torch

from ragflash_kernels.backend import Backend, pick_backend
from ragflash_kernels.columns import Columns
from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.gated_delta.device_reference import (
    delta_commit_reference,
    delta_prefill_reference,
    delta_step_reference,
)
from ragflash_kernels.gated_delta.states import DeltaStates


def delta_step(
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
    max_rows: int,
    parents: torch.Tensor | None = None,
    eager: bool = False,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Take a few rows of several sequences, and write what they would do to the tape.

    A row's result depends on the rows before it on its path only, and, on a card, by no bit on
    whether these are committed.

    Args:
        qkv: Inputs of the convolution, Q, K and V side by side, N rows.
        beta: `[N, Hv]`; its sigmoid is the step.
        alpha: `[N, Hv]`; the log-decay is `decay_rate · softplus(alpha + decay_bias)`.
        conv: float32 `[C, K]`; the last column belongs to the row itself.
        decay_rate: float32 `[Hv]`, ≤ 0.
        decay_bias: float32 `[Hv]`.
        states: Of one layer.
        first_rows: int32 `[S + 1]`: rows `first_rows[s]` … `first_rows[s + 1] - 1` are those of
            sequence s; the result of rows beyond the last is 0.
        slots: int32 `[S]`, different for sequences that have rows.
        max_rows: Rows of a sequence at most, not more than a tape has room for.
        parents: int32, N or more: for each row the row before it, a smaller number, counted within
            its sequence, -1 for the state; None for chains. A row whose parent is not the row
            before it costs as much again for each row before it on its path.
        eager: Programmatic dependent launch (sm_90).
        backend: None picks by the device. There is one kernel; Gluon takes it too.

    Returns:
        Heads of the output, float32 `[N, Hv, Dv]`.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    _check(qkv, beta, alpha, conv, decay_rate, decay_bias, states)
    if not 1 <= max_rows <= states.rows:
        raise KernelInputError(f"{max_rows} rows for a tape of {states.rows}")
    _check_tables(first_rows, slots, parents, qkv.partials.shape[1])
    if (backend or pick_backend(conv.device)) is Backend.REFERENCE:
        return delta_step_reference(
            qkv, beta, alpha, conv=conv, decay_rate=decay_rate, decay_bias=decay_bias,
            states=states, first_rows=first_rows, slots=slots, parents=parents,
        )  # fmt: skip
    from ragflash_kernels.gated_delta.launch import delta_step_triton  # noqa: PLC0415 - lazy

    return delta_step_triton(
        qkv, beta, alpha, conv=conv, decay_rate=decay_rate, decay_bias=decay_bias, states=states,
        first_rows=first_rows, slots=slots, parents=parents, eager=eager,
    )  # fmt: skip


def delta_commit(
    states: DeltaStates,
    slots: torch.Tensor,
    counts: torch.Tensor,
    *,
    paths: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """Make rows of tapes part of the states of all layers.

    Args:
        states: Of all layers.
        slots: int32 `[S]`, different where the count is not 0.
        counts: int32 `[S]`, at most the rows of the last step; 0 changes nothing.
        paths: int32 `[S, counts or more]`: the rows, each the parent of the next; None for the
            first rows.
        backend: None picks by the device. There is one kernel; Gluon takes it too.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    if states.memories.dim() != 5:
        raise KernelInputError("the states are those of one layer, not of all")
    _check_int32(slots, counts)
    if slots.shape != counts.shape:
        raise KernelInputError(f"{len(counts)} counts for {len(slots)} slots")
    if paths is not None and (
        paths.dim() != 2 or paths.dtype != torch.int32 or len(paths) != len(slots)
    ):
        raise KernelInputError(f"{paths.dtype} {tuple(paths.shape)} are no paths of int32")
    if (backend or pick_backend(slots.device)) is Backend.REFERENCE:
        delta_commit_reference(states, slots, counts, paths)
    else:
        from ragflash_kernels.gated_delta.launch import delta_commit_triton  # noqa: PLC0415

        delta_commit_triton(states, slots, counts, paths)


def delta_prefill(
    qkv: Columns,
    beta: Columns,
    alpha: Columns,
    *,
    conv: torch.Tensor,
    decay_rate: torch.Tensor,
    decay_bias: torch.Tensor,
    states: DeltaStates,
    slot: int,
    keep: bool = True,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Take many rows of one sequence; arguments as in `delta_step`, but for those below.

    The state is as exact as 16 bits of a value's mantissa; the output is computed from bfloat16.

    Args:
        qkv: Of any number of rows.
        beta: Likewise.
        alpha: Likewise.
        conv: As there.
        decay_rate: As there.
        decay_bias: As there.
        states: Of one layer.
        slot: Of the sequence.
        keep: Whether the slot's state becomes that after the rows; otherwise it is left alone.
        out_dtype: A float type.
        backend: None picks by the device. There is one kernel; Gluon takes it too.

    Returns:
        Heads of the output, `[N, Hv, Dv]`.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    _check(qkv, beta, alpha, conv, decay_rate, decay_bias, states)
    if qkv.partials.shape[1] < 1:
        raise KernelInputError("there are no rows")
    if not 0 <= slot < len(states.memories):
        raise KernelInputError(f"slot {slot} of {len(states.memories)}")
    if (backend or pick_backend(conv.device)) is Backend.REFERENCE:
        return delta_prefill_reference(
            qkv, beta, alpha, conv=conv, decay_rate=decay_rate, decay_bias=decay_bias,
            states=states, slot=slot, keep=keep,
        ).to(out_dtype)  # fmt: skip
    from ragflash_kernels.gated_delta.prefill.launch import (  # noqa: PLC0415 - lazy
        delta_prefill_triton,
    )

    return delta_prefill_triton(
        qkv, beta, alpha, conv=conv, decay_rate=decay_rate, decay_bias=decay_bias,
        states=states, slot=slot, keep=keep, out_dtype=out_dtype,
    )  # fmt: skip


def _check(
    qkv: Columns,
    beta: Columns,
    alpha: Columns,
    conv: torch.Tensor,
    decay_rate: torch.Tensor,
    decay_bias: torch.Tensor,
    states: DeltaStates,
) -> None:
    if states.memories.dim() != 4:
        raise KernelInputError("the states are those of all layers, not of one")
    sizes = states.sizes
    heads, num_rows = sizes.value_heads, qkv.partials.shape[1]
    widths = (qkv.width, beta.width, alpha.width)
    if widths != (sizes.channels, heads, heads):
        raise KernelInputError(f"columns of {widths}, not {(sizes.channels, heads, heads)}")
    if {x.partials.shape[1] for x in (beta, alpha)} != {num_rows}:
        raise KernelInputError("qkv, beta and alpha differ in their rows")
    for name, tensor, shape in (
        ("conv", conv, (sizes.channels, sizes.conv_width)),
        ("decay_rate", decay_rate, (heads,)),
        ("decay_bias", decay_bias, (heads,)),
    ):
        if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise KernelInputError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not float32 {shape}, contiguous"
            )


def _check_tables(
    first_rows: torch.Tensor, slots: torch.Tensor, parents: torch.Tensor | None, num_rows: int
) -> None:
    _check_int32(first_rows, slots)
    if len(first_rows) != len(slots) + 1:
        raise KernelInputError(f"{len(first_rows)} first rows for {len(slots)} sequences")
    if parents is None:
        return
    _check_int32(parents)
    if len(parents) < num_rows:
        raise KernelInputError(f"{len(parents)} parents for {num_rows} rows")


def _check_int32(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.dim() != 1 or tensor.dtype != torch.int32 or not len(tensor):
            raise KernelInputError(f"{tensor.dtype} {tuple(tensor.shape)} is no list of int32")
