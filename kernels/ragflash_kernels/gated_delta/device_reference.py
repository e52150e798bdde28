"""`delta_step`, `delta_commit` and `delta_prefill` in plain torch, of the forms in `reference`."""

import torch
from torch.nn import functional

from ragflash_kernels.columns import Columns
from ragflash_kernels.conv1d import causal_conv1d, tail_after
from ragflash_kernels.gated_delta.reference import DeltaRows, chunked_reference, tree_reference
from ragflash_kernels.gated_delta.states import DeltaStates


def delta_step_reference(
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
) -> torch.Tensor:
    """Return the heads of every row, and write the tape; arguments as in `delta_step`."""
    inputs = qkv.sum()
    steps = beta.sum().sigmoid()
    log_decay = decay_rate * functional.softplus(alpha.sum() + decay_bias)
    sizes = states.sizes
    out = inputs.new_zeros(len(inputs), sizes.value_heads, sizes.value_dim)
    edges = first_rows.tolist()
    for slot, first, end in zip(slots.tolist(), edges[:-1], edges[1:], strict=True):
        if first == end:
            continue
        at, tape_rows = slice(first, end), slice(0, end - first)
        tree = None if parents is None else parents[at].tolist()
        mixed = causal_conv1d(inputs[at], states.tails[slot], conv, parents=tree)
        rows = _rows(mixed, log_decay[at], steps[at], states)
        out[at], tape = tree_reference(rows, states.memories[slot], tree)
        states.inputs[slot, tape_rows] = inputs[at]
        states.keys[slot, tape_rows] = tape.keys[: sizes.key_heads].transpose(0, 1)
        states.corrections[slot, tape_rows] = tape.corrections.transpose(0, 1)
        states.decay[slot, tape_rows] = log_decay[at].exp()
    return out


def delta_commit_reference(
    states: DeltaStates, slots: torch.Tensor, counts: torch.Tensor, paths: torch.Tensor | None
) -> None:
    """Apply rows of each tape; arguments as in `delta_commit`."""
    sizes = states.sizes
    repeats = sizes.value_heads // sizes.key_heads
    for index, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
        path = [*range(count)] if paths is None else paths[index, :count].tolist()
        memory, tail = states.memories[:, slot], states.tails[:, slot]
        for row in path:
            key = states.keys[:, slot, row].repeat(1, repeats, 1)[..., None]
            correction = states.corrections[:, slot, row, :, None, :]
            memory.mul_(states.decay[:, slot, row, :, None, None]).addcmul_(key, correction)
        inputs = states.inputs[:, slot, path]
        tail.copy_(torch.cat((tail, inputs), 1)[:, count:])


def delta_prefill_reference(
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
) -> torch.Tensor:
    """Return the heads of every row, float32; arguments as in `delta_prefill`."""
    inputs = qkv.sum()
    steps = beta.sum().sigmoid()
    log_decay = decay_rate * functional.softplus(alpha.sum() + decay_bias)
    tail = states.tails[slot]
    rows = _rows(causal_conv1d(inputs, tail, conv), log_decay, steps, states)
    out, memory = chunked_reference(rows, states.memories[slot])
    if keep:
        states.memories[slot] = memory
        tail.copy_(tail_after(inputs, tail))
    return out.contiguous()


def _rows(
    mixed: torch.Tensor,
    log_decay: torch.Tensor,
    steps: torch.Tensor,
    states: DeltaStates,
) -> DeltaRows:
    sizes = states.sizes
    keys = sizes.key_heads * sizes.key_dim
    q, k, v = mixed.split_with_sizes((keys, keys, sizes.value_heads * sizes.value_dim), dim=1)
    q, k = (x.view(len(mixed), sizes.key_heads, sizes.key_dim) for x in (q, k))
    v = v.view(len(mixed), sizes.value_heads, sizes.value_dim)
    return DeltaRows(q, k, v, log_decay, steps)
