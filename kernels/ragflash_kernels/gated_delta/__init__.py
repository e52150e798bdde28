"""Gated delta rule: linear attention whose state forgets and corrects itself.

For every value head, with state `S` `[D, Dv]`, key `k`, value `v`, log-decay `g` and step `β`
(Yang et al. 2024, arXiv:2412.06464, equation 10):

    S ← exp(g) S;  d = β (v − Sᵀk);  S ← S + k dᵀ;  o = Sᵀq

Three forms of the same: row by row (`recurrent`), in chunks (`chunked`), and over a tree of rows
whose state is not advanced but can be, along one path, afterwards (`tree` and `advance`).
Queries and keys are scaled to length 1 here, queries also by `D ** -0.5`. Value head `i` reads key
head `i mod Hk`, the order in which GGUF files keep them.

`layer.py` has all that is recurrent in a layer as a card runs it, with the states of all sequences.
"""

from collections.abc import Sequence

import torch

from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.gated_delta.layer import delta_commit, delta_prefill, delta_step
from ragflash_kernels.gated_delta.reference import (
    DeltaRows,
    Tape,
    advance_reference,
    chunked_reference,
    recurrent_reference,
    tree_reference,
)
from ragflash_kernels.gated_delta.states import DeltaSizes, DeltaStates
from ragflash_kernels.gated_norm import gated_norm
from ragflash_kernels.parents import check_parents

__all__ = [
    "DeltaRows",
    "DeltaSizes",
    "DeltaStates",
    "Tape",
    "delta_commit",
    "delta_prefill",
    "delta_step",
    "gated_delta_advance",
    "gated_delta_chunked",
    "gated_delta_recurrent",
    "gated_delta_tree",
    "gated_norm",
]


def gated_delta_recurrent(
    rows: DeltaRows, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take rows one after the other.

    Args:
        rows: At least one; `Hk` divides `Hv`.
        state: `[Hv, D, Dv]` float32 before the first row; not changed.

    Returns:
        `o` `[T, Hv, Dv]` float32 and the state after the last row.

    Raises:
        KernelInputError: An argument does not fit the description above.
    """
    _check(rows, state)
    return recurrent_reference(rows, state)


def gated_delta_chunked(rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Take rows 64 at a time, as products of matrices; otherwise as `gated_delta_recurrent`.

    The WY form of a product of Householder-like matrices (arXiv:2412.06464, section 3.3); equal to
    the recurrent form but for the order of sums.
    """
    _check(rows, state)
    return chunked_reference(rows, state)


def gated_delta_tree(
    rows: DeltaRows, state: torch.Tensor, *, parents: Sequence[int] | None = None
) -> tuple[torch.Tensor, Tape]:
    """Take rows that may be rejected; otherwise as `gated_delta_recurrent`.

    `parents` has for each row the row before it, a smaller number, -1 for the state; `None` is a
    chain.

    Returns:
        `o` `[T, Hv, Dv]` float32, and what `gated_delta_advance` needs.
    """
    _check(rows, state)
    check_parents(parents, len(rows.q))
    return tree_reference(rows, state, parents)


def gated_delta_advance(state: torch.Tensor, tape: Tape, path: Sequence[int]) -> torch.Tensor:
    """Return the state after the rows of a path: the first follows `state`, each its parent."""
    return advance_reference(state, tape, path)


def _check(rows: DeltaRows, state: torch.Tensor) -> None:
    q, k, v = rows.q, rows.k, rows.v
    if q.dim() != 3 or v.dim() != 3 or q.shape != k.shape or len(q) != len(v) or not len(q):
        raise KernelInputError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} are not twice "
            "[T, Hk, D] and [T, Hv, Dv]"
        )
    num_rows, num_value_heads, value_dim = v.shape
    if num_value_heads % q.shape[1]:
        raise KernelInputError(f"{q.shape[1]} key heads do not divide {num_value_heads}")
    if not rows.log_decay.shape == rows.beta.shape == (num_rows, num_value_heads):
        raise KernelInputError(
            f"decay {tuple(rows.log_decay.shape)} and beta {tuple(rows.beta.shape)} are not [T, Hv]"
        )
    if state.shape != (num_value_heads, q.shape[2], value_dim):
        raise KernelInputError(f"state {tuple(state.shape)} is not [Hv, D, Dv]")
    if not rows.log_decay.dtype == rows.beta.dtype == state.dtype == torch.float32:
        raise KernelInputError("decay, beta and state must be float32")
