"""Rows of one sequence on several paths: each has a parent, a row before it, or -1 for none.

Without parents (`None`) rows are a chain.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from ragflash_kernels.errors import KernelInputError


def check_parents(parents: Sequence[int] | None, num_rows: int) -> None:
    """Raise `KernelInputError` unless every row's parent is before it."""
    if parents is None:
        return
    if len(parents) != num_rows:
        raise KernelInputError(f"{len(parents)} parents for {num_rows} rows")
    if not all(-1 <= parent < row for row, parent in enumerate(parents)):
        raise KernelInputError(f"a parent of {tuple(parents)} does not come before its row")


@lru_cache(maxsize=64)  # all layers of a step ask the same
def depths(parents: tuple[int, ...] | None, num_rows: int) -> tuple[int, ...]:
    """Return how many rows come before each on its path."""
    if parents is None:
        return tuple(range(num_rows))
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return tuple(found)


@lru_cache(maxsize=64)
def words(
    parents: tuple[int, ...] | None, num_rows: int, window: int | None = None
) -> tuple[int, ...]:
    """Return for each row a word whose bit j says that row j is it or before it on its path.

    Of a window, rows that lie so many or more before it on the path are left out.
    """
    depth = depths(parents, num_rows)
    found: list[int] = []
    for row in range(num_rows):
        parent = row - 1 if parents is None else parents[row]
        found.append(1 << row | (0 if parent < 0 else found[parent]))
    if window is None:
        return tuple(found)
    near = [
        sum(1 << other for other in range(row + 1) if depth[other] > depth[row] - window)
        for row in range(num_rows)
    ]
    return tuple(word & seen for word, seen in zip(found, near, strict=True))


@lru_cache(maxsize=64)
def ancestors(parents: tuple[int, ...]) -> torch.Tensor:
    """Return `[T, T]`, whether row j is i or before it on its path; not to be written to."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] |= seen[parent]
    return seen
