"""Plain torch, in float32: one product a kernel column."""

from collections.abc import Sequence

import torch
from torch.nn import functional


def causal_conv1d_reference(
    x: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor, parents: Sequence[int] | None
) -> torch.Tensor:
    """Convolve; arguments as in `causal_conv1d`."""
    width = weight.shape[1]
    rows = torch.cat((tail.float(), x.float()))
    columns = weight.float().unbind(1)
    if parents is None:
        taps = [rows[tap : tap + len(x)] for tap in range(width)]
    else:
        windows = torch.tensor(_windows(parents, width), device=x.device).view(-1, width)
        taps = [rows[windows[:, tap]] for tap in range(width)]
    total = taps[0] * columns[0]
    for tap, column in zip(taps[1:], columns[1:], strict=True):
        total.addcmul_(tap, column)
    return functional.silu(total).to(x.dtype)


def tail_after_reference(x: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """Return the last rows of both."""
    return torch.cat((tail, x.to(tail.dtype)))[len(x) :].clone()


def _windows(parents: Sequence[int], width: int) -> list[list[int]]:
    """For each row the rows that it sees, oldest first, numbered from the tail's first."""
    windows: list[list[int]] = []
    for row, parent in enumerate(parents):
        before = windows[parent][1:] if parent >= 0 else [*range(width - 1)]
        windows.append([*before, width - 1 + row])
    return windows
