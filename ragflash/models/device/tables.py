"""What a captured step reads of its sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ragflash.kvcache.allocator import PAGE_TOKENS
from ragflash.models.contract import SequenceRows
from ragflash.models.device.staging import StagedTables
from ragflash_kernels.paged_attention.visibility import Visibility
from ragflash_kernels.parents import depths, words

MAX_ROWS = 32  # of a step; bits of a visibility word


class RowTables(Protocol):
    """Integers of rows."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a table on the card."""


class SequenceTables(RowTables, Protocol):
    """Integers of rows, and what these see of their sequences' pages."""

    def exact(self, window: int | None, num_rows: int) -> Visibility:
        """Return what rows see of the exact pages."""

    def packed(self, window: int | None, num_rows: int) -> Visibility:
        """Return what rows see of the packed pages."""


@dataclass(frozen=True, slots=True)
class TableSizes:
    """Most that a step can hold.

    Attributes:
        slots: Sequences.
        exact_pages: Of a sequence.
        packed_pages: Of a sequence; 0 when there is one form of pages only.
        windows: Distinct attention windows of the model's layers, `None` for all tokens.
    """

    slots: int
    exact_pages: int
    packed_pages: int
    windows: tuple[int | None, ...]

    def sections(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tables."""
        slots, windows = self.slots, len(self.windows)
        return {
            "token_ids": (MAX_ROWS,),
            "positions": (MAX_ROWS,),
            "row_pages": (MAX_ROWS,),
            "row_places": (MAX_ROWS,),
            "parents": (MAX_ROWS,),
            "words": (windows, MAX_ROWS),
            "first_rows": (slots + 1,),
            "slots": (slots,),
            "exact_ends": (slots,),
            "packed_ends": (slots,),
            "exact_starts": (windows, MAX_ROWS),
            "packed_starts": (windows, MAX_ROWS),
            "exact_pages": (slots, self.exact_pages),
            "packed_pages": (slots, max(1, self.packed_pages)),
        }


class StepTables(StagedTables):
    """Integers of one step, read by every kernel.

    Rows beyond those of the sequences are padding: they have page -1 and belong to nobody.
    """

    def __init__(self, sizes: TableSizes, device: torch.device | str) -> None:
        super().__init__(sizes.sections(), device)
        self.sizes = sizes

    def exact(self, window: int | None, num_rows: int) -> Visibility:
        """Return what rows see of the exact pages."""
        at = self.sizes.windows.index(window)
        seen = self["words"][at]
        return self._visibility("exact", seen, at, num_rows, self.sizes.exact_pages)

    def packed(self, window: int | None, num_rows: int) -> Visibility:
        """Return what rows see of the packed pages."""
        at = self.sizes.windows.index(window)
        pages = self.sizes.packed_pages
        return self._visibility("packed", None, at, num_rows, pages)

    def _visibility(
        self, form: str, words: torch.Tensor | None, window: int, num_rows: int, num_pages: int
    ) -> Visibility:
        return Visibility(
            page_table=self[f"{form}_pages"],
            first_rows=self["first_rows"],
            starts=self[f"{form}_starts"][window],
            ends=self[f"{form}_ends"],
            words=words,
            max_rows=num_rows,
            max_tokens=num_pages * PAGE_TOKENS,
        )

    def fill(self, token_ids: Sequence[int], sequences: Sequence[SequenceRows]) -> None:
        """Describe a step of at most 32 rows and send it."""
        host = self.begin()
        host["token_ids"][: len(token_ids)] = token_ids
        host["row_pages"][:] = -1
        host["first_rows"][:] = len(token_ids)
        row = 0
        for index, rows in enumerate(sequences):
            self._describe(host, index, row, rows)
            row += rows.num_rows
        self.send()

    def _describe(
        self, host: dict[str, np.ndarray], index: int, row: int, rows: SequenceRows
    ) -> None:
        num_packed = PAGE_TOKENS * len(rows.packed_pages)
        end = rows.committed - num_packed  # of the exact tokens before the first row
        at = slice(row, row + rows.num_rows)
        places = end + np.arange(rows.num_rows)
        positions = rows.committed + np.array(depths(rows.parents, rows.num_rows))
        host["positions"][at] = positions
        host["row_pages"][at] = np.asarray(rows.pages)[places // PAGE_TOKENS]
        host["row_places"][at] = places % PAGE_TOKENS
        host["parents"][at] = rows.parents or range(-1, rows.num_rows - 1)
        host["first_rows"][index] = row
        host["slots"][index] = rows.slot
        host["exact_ends"][index] = end
        host["packed_ends"][index] = num_packed
        host["exact_pages"][index, : len(rows.pages)] = rows.pages
        host["packed_pages"][index, : len(rows.packed_pages)] = rows.packed_pages
        for which, window in enumerate(self.sizes.windows):
            host["words"][which, at] = np.array(words(rows.parents, rows.num_rows, window))
            seen = positions + 1
            start = np.zeros_like(seen) if window is None else np.maximum(seen - window, 0)
            exact, packed = form_starts(start, num_packed)
            host["exact_starts"][which, at] = exact
            host["packed_starts"][which, at] = packed


class ChunkTables(StagedTables):
    """Integers of a chunk of one sequence's prompt.

    Rows beyond it are padding: they have page -1 and change nothing.
    """

    def __init__(
        self, max_rows: int, exact_pages: int, packed_pages: int, device: torch.device
    ) -> None:
        rows = ("token_ids", "positions", "row_pages", "row_places")
        sections = dict.fromkeys(rows, (max_rows,)) | {"counts": (4,)}
        pages = {"exact_pages": exact_pages, "packed_pages": packed_pages}
        # Whole multiples of 16 bytes: kernels are compiled for addresses that are.
        sections |= {name: (-(-count // 4) * 4,) for name, count in pages.items()}
        super().__init__(sections, device)

    def fill(self, token_ids: Sequence[int], rows: SequenceRows) -> None:
        """Describe a chunk and send it."""
        host, num_rows = self.begin(), rows.num_rows
        before = rows.committed - rows.num_packed  # exact tokens
        places = np.arange(before, before + num_rows)
        host["token_ids"][:num_rows] = token_ids
        host["positions"][:num_rows] = places + rows.num_packed
        host["row_pages"][:] = -1
        host["row_pages"][:num_rows] = np.asarray(rows.pages)[places // PAGE_TOKENS]
        host["row_places"][:num_rows] = places % PAGE_TOKENS
        host["counts"][:2] = before, num_rows
        host["exact_pages"][: len(rows.pages)] = rows.pages
        host["packed_pages"][: len(rows.packed_pages)] = rows.packed_pages
        self.send()


def step_groups(sequences: Sequence[SequenceRows]) -> list[list[SequenceRows]]:
    """Put neighbours together as long as their rows fit one step; many rows stay alone."""
    groups: list[list[SequenceRows]] = []
    room = 0
    for rows in sequences:
        if rows.num_rows > room:
            groups.append([])
            room = MAX_ROWS
        groups[-1].append(rows)
        room -= rows.num_rows
    return groups


def form_starts(start: np.ndarray, num_packed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where a window that begins at token `start` begins in the exact and packed lists.

    The exact list has the tokens of the first page, then those after the packed ones.
    """
    if not num_packed:
        return start, start * 0
    exact = np.where(start < PAGE_TOKENS, start, np.maximum(start - num_packed, PAGE_TOKENS))
    return exact, np.clip(start - PAGE_TOKENS, 0, num_packed)


class DraftTables(StagedTables):
    """Integers of tokens that one sequence drafts one after the other, each from the one before.

    Args:
        depth: Most tokens.
        exact_pages: Of the sequence.
        packed_pages: Of the sequence; 0 when there is one form of pages only.
        device: Where they are read.
    """

    def __init__(
        self, depth: int, exact_pages: int, packed_pages: int, device: torch.device
    ) -> None:
        # Whole multiples of 16 bytes: kernels are compiled for addresses that are.
        sections: dict[str, tuple[int, ...]] = {"token_ids": (4,), "packed_ends": (4,)}
        steps = ("positions", "row_pages", "row_places", "exact_ends")
        sections |= dict.fromkeys(steps, (depth, 4))
        self._max_pages = {"exact": exact_pages, "packed": packed_pages}
        pages = {"exact_pages": exact_pages, "packed_pages": max(1, packed_pages)}
        sections |= {name: (1, -(-count // 4) * 4) for name, count in pages.items()}
        super().__init__(sections, device)
        self._first_rows = torch.arange(2, dtype=torch.int32, device=device)
        self._starts = torch.zeros(1, dtype=torch.int32, device=device)
        self._words = torch.ones(1, dtype=torch.int32, device=device)

    def fill(self, token_id: int, rows: SequenceRows) -> None:
        """Describe drafting behind a token and send it; `rows` are of it and of what follows it."""
        host, num_rows = self.begin(), rows.num_rows
        places = np.arange(rows.committed, rows.committed + num_rows) - rows.num_packed
        host["token_ids"][0] = token_id
        host["packed_ends"][0] = rows.num_packed
        host["positions"][:num_rows, 0] = places + rows.num_packed
        host["row_pages"][:num_rows, 0] = np.asarray(rows.pages)[places // PAGE_TOKENS]
        host["row_places"][:num_rows, 0] = places % PAGE_TOKENS
        host["exact_ends"][:num_rows, 0] = places
        host["exact_pages"][0, : len(rows.pages)] = rows.pages
        host["packed_pages"][0, : len(rows.packed_pages)] = rows.packed_pages
        self.send()

    def sees(self, form: str, ends: torch.Tensor) -> Visibility:
        """Return what a row sees of a form's pages: all before an end, and itself behind that."""
        return Visibility(
            page_table=self[f"{form}_pages"],
            first_rows=self._first_rows,
            starts=self._starts,
            ends=ends,
            words=self._words if form == "exact" else None,
            max_rows=1,
            max_tokens=self._max_pages[form] * PAGE_TOKENS,
        )


@dataclass(frozen=True, slots=True)
class DraftRow:
    """The row of one drafted token; its layers see all tokens.

    Attributes:
        tables: Of all of them.
        depth: How many are drafted before it.
    """

    tables: DraftTables
    depth: int

    def __getitem__(self, name: str) -> torch.Tensor:
        """See `RowTables`."""
        return self.tables[name][self.depth, :1]

    def exact(self, window: int | None, num_rows: int) -> Visibility:
        """See `SequenceTables`."""
        assert window is None
        assert num_rows == 1
        return self.tables.sees("exact", self["exact_ends"])

    def packed(self, window: int | None, num_rows: int) -> Visibility:
        """See `SequenceTables`."""
        assert window is None
        assert num_rows == 1
        return self.tables.sees("packed", self.tables["packed_ends"][:1])
