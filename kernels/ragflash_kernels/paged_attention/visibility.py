"""What a step tells the kernels of attention, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragflash_kernels.errors import KernelInputError
from ragflash_kernels.parents import depths
from ragflash_kernels.parents import words as paths

if TYPE_CHECKING:
    from ragflash_kernels.paged_attention import QueryRows

MAX_ROWS = 32  # of a sequence: bits of a visibility word


@dataclass(frozen=True)
class Visibility:
    """Which tokens rows see: int32 tensors on the device, so that a graph can be replayed.

    Of its sequence a row sees the tokens before the end, and token `end + i` for each set bit i of
    its word, unless they are before its start: a chain of drafts has words 1, 3, 7 …, a tree any.
    What the tensors hold may change between replays; the two numbers are part of a graph.

    Attributes:
        page_table: `[S, pages]`: page numbers, of sequence s in row s; all are valid.
        first_rows: `[S + 1]`: the first query row of each sequence, then the number of rows.
            Rows from there on are padding, and what they get is undefined.
        starts: `[rows or more]`.
        ends: `[S]`.
        words: `[rows or more]`, or None: rows see nothing from the end on.
        max_rows: Rows of the largest sequence, or more.
        max_tokens: Tokens that a row may see, or more.
    """

    page_table: Tensor
    first_rows: Tensor
    starts: Tensor
    ends: Tensor
    words: Tensor | None
    max_rows: int
    max_tokens: int

    @classmethod
    def causal(
        cls, sequences: "Sequence[QueryRows]", device: torch.device, window: int | None = None
    ) -> "Visibility":
        """Return what rows see before them on their paths; of a window, the newest positions only.

        Raises:
            KernelInputError: A sequence has more than `MAX_ROWS` rows.
        """
        most = max(rows.num_rows for rows in sequences)
        if most > MAX_ROWS:
            raise KernelInputError(f"{most} rows of a sequence; {MAX_ROWS} at most")
        pages = max(len(rows.pages) for rows in sequences)
        table = [[*rows.pages, *[0] * (pages - len(rows.pages))] for rows in sequences]
        first_rows = [0]
        words: list[int] = []
        starts: list[int] = []
        for rows in sequences:
            first_rows.append(first_rows[-1] + rows.num_rows)
            words += paths(rows.parents, rows.num_rows, window)
            newest = [rows.committed + 1 + depth for depth in depths(rows.parents, rows.num_rows)]
            starts += [0 if window is None else max(0, seen - window) for seen in newest]
        signed = [word - (word >> 31 << 32) for word in words]

        def whole(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return cls(
            whole(table),
            whole(first_rows),
            whole(starts),
            whole([rows.committed for rows in sequences]),
            whole(signed),
            most,
            max(rows.committed + rows.num_rows for rows in sequences),
        )
