"""Plain torch, in float32.

With `G` the sum of log-decays from the state to a row and `a(i, j)` whether row `j` is `i` or an
ancestor of it, the corrections `d` of all rows solve one triangular system,

    d_i = β_i (v_i − exp(G_i) Sᵀk_i − Σ_{j≠i} a(i, j) exp(G_i − G_j) (k_i·k_j) d_j),
    o_i = exp(G_i) Sᵀq_i + Σ_j a(i, j) exp(G_i − G_j) (q_i·k_j) d_j.

Differences of sums are masked before they are raised: towards an ancestor they are never positive.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ragflash_kernels.parents import ancestors as ancestors_of

_CHUNK = 64
_EPS = 1e-6  # of the squared length of queries and keys


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """Rows of one sequence.

    Attributes:
        q: `[T, Hk, D]`.
        k: As `q`.
        v: `[T, Hv, Dv]`.
        log_decay: `[T, Hv]` float32, ≤ 0.
        beta: `[T, Hv]` float32, in 0…1.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor

    def __getitem__(self, at: slice | Sequence[int]) -> "DeltaRows":
        """Return some of the rows."""
        return DeltaRows(self.q[at], self.k[at], self.v[at], self.log_decay[at], self.beta[at])

    def heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return Q, K and V `[Hv, T, …]` float32, Q and K of length 1, queries scaled too."""
        repeats = self.v.shape[1] // self.q.shape[1]
        q, k = _of_length_1(self.q) * self.q.shape[2] ** -0.5, _of_length_1(self.k)
        q, k = (x.repeat(1, repeats, 1).transpose(0, 1) for x in (q, k))
        return q, k, self.v.float().transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Tape:
    """What rows would do to the state.

    Attributes:
        keys: Of length 1, `[Hv, T, D]`.
        corrections: The `d` of each row, `[Hv, T, Dv]`.
        decay: Sums of log-decays from the state to each row, `[Hv, T]`.
    """

    keys: torch.Tensor
    corrections: torch.Tensor
    decay: torch.Tensor


def recurrent_reference(rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Take rows one after the other; see `gated_delta_recurrent`."""
    q, k, v = rows.heads()
    outputs = []
    for t, beta in enumerate(rows.beta):
        state = state * rows.log_decay[t].exp()[:, None, None]
        read = torch.einsum("hkv,hk->hv", state, k[:, t])
        correction = (v[:, t] - read) * beta[:, None]
        state = state + k[:, t, :, None] * correction[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[:, t]))
    return torch.stack(outputs), state


def chunked_reference(rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Take rows a chunk at a time; see `gated_delta_chunked`."""
    num_rows = len(rows.q)
    padding = -num_rows % _CHUNK
    q, k, values, log_decay, beta = (
        _in_chunks(x, padding) for x in (*rows.heads(), rows.log_decay.t(), rows.beta.t())
    )
    chain = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = log_decay.cumsum(-1)  # [Hv, chunks, C]
    solved = _solve(k, torch.cat((values, k * decay.exp()[..., None]), dim=-1), decay, beta, chain)
    corrections, reads = solved.split_with_sizes((values.shape[-1], k.shape[-1]), dim=-1)
    mixing = (q @ k.mT) * _decay_between(decay, chain)
    q_decayed = q * decay.exp()[..., None]
    k_decayed = k * (decay[..., -1:] - decay).exp()[..., None]
    outputs = []
    for chunk in range(q.shape[1]):
        d = corrections[:, chunk] - reads[:, chunk] @ state
        outputs.append(q_decayed[:, chunk] @ state + mixing[:, chunk] @ d)
        state = state * decay[:, chunk, -1, None, None].exp() + k_decayed[:, chunk].mT @ d
    return torch.cat(outputs, dim=1)[:, :num_rows].transpose(0, 1), state


def tree_reference(
    rows: DeltaRows, state: torch.Tensor, parents: Sequence[int] | None
) -> tuple[torch.Tensor, Tape]:
    """Take rows of a tree; see `gated_delta_tree`."""
    num_rows = len(rows.q)
    line = tuple(range(-1, num_rows - 1) if parents is None else parents)
    ancestors = ancestors_of(line).to(state.device)
    q, k, values = rows.heads()
    decay = rows.log_decay.t() @ ancestors.t().float()  # [Hv, T]
    targets = values - decay.exp()[..., None] * (k @ state)
    corrections = _solve(k, targets, decay, rows.beta.t(), ancestors)
    mixed = ((q @ k.mT) * _decay_between(decay, ancestors)) @ corrections
    out = decay.exp()[..., None] * (q @ state) + mixed
    return out.transpose(0, 1), Tape(k, corrections, decay)


def advance_reference(state: torch.Tensor, tape: Tape, path: Sequence[int]) -> torch.Tensor:
    """Apply the rows of a path; see `gated_delta_advance`."""
    if not path:
        return state
    rows = torch.tensor(path, device=state.device)
    decay = tape.decay[:, rows]
    keys = tape.keys[:, rows] * (decay[:, -1:] - decay).exp()[..., None]
    return state * decay[:, -1, None, None].exp() + keys.mT @ tape.corrections[:, rows]


def _of_length_1(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt()


def _in_chunks(x: torch.Tensor, padding: int) -> torch.Tensor:
    """Turn `[Hv, T, …]` into `[Hv, chunks, C, …]`; rows of zeros change nothing."""
    padded = functional.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
    return padded.view(len(x), -1, _CHUNK, *x.shape[2:])


def _solve(
    k: torch.Tensor,
    targets: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    ancestors: torch.Tensor,
) -> torch.Tensor:
    """Solve for what each row adds, `[..., T, X]`, given what it aims at without the others."""
    coupling = (k @ k.mT) * _decay_between(decay, ancestors) * beta[..., None]
    # Its diagonal is not read: the solver takes it to be 1.
    solved: torch.Tensor = torch.linalg.solve_triangular(
        coupling, targets * beta[..., None], upper=False, unitriangular=True
    )
    return solved


def _decay_between(decay: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
    """Return what is left at row i of what row j added, `[..., T, T]`; 0 if j is no ancestor."""
    difference = decay[..., :, None] - decay[..., None, :]
    return difference.masked_fill(~ancestors, float("-inf")).exp()
