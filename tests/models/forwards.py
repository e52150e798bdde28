"""Runs forwards of a model as the engine does, over pages with NaN where nothing was written."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.pages import KVPages, PagePool
from ragflash.models.contract import ForwardBatch, Model, SequenceRows
from ragflash.models.registry import load_model
from ragflash_kernels.parents import depths

PAGES = (3, 0, 2, 1)


def load(path: Path) -> Model:
    with GGUFFile.open(path) as file:
        return load_model(file, dtype="float32")


def poisoned_pages(model: Model, num_pages: int = len(PAGES)) -> KVPages:
    pool = PagePool(model.kv_layout, num_pages)
    for page in range(num_pages):
        pool.page(page).fill_(float("nan"))
    return KVPages(pool)


def batch_of(
    token_ids: Sequence[int],
    committed: int,
    *,
    slot: int = 0,
    num_draft: int = 0,
    parents: tuple[int, ...] | None = None,
) -> ForwardBatch:
    """One sequence's rows, the logits of all of them wanted."""
    num_rows = len(token_ids)
    rows = SequenceRows(
        slot, num_rows, committed, PAGES, tuple(range(num_rows)), num_draft, parents=parents
    )
    positions = committed + torch.tensor(depths(parents, num_rows))
    return ForwardBatch(torch.tensor(token_ids), positions, (rows,))


@dataclass(frozen=True)
class Tree:
    """Rows of drafts behind some that are none, of random tokens and parents."""

    token_ids: list[int]
    parents: tuple[int, ...]
    num_certain: int

    @classmethod
    def random(cls, seed: int, vocab_size: int, *, num_certain: int, num_draft: int) -> "Tree":
        rng = random.Random(seed)
        num_rows = num_certain + num_draft
        spread = (2, 3, num_rows)[seed % 3]
        drafted = [
            rng.randint(max(num_certain - 1, row - spread), row - 1)
            for row in range(num_certain, num_rows)
        ]
        tokens = rng.choices(range(vocab_size), k=num_rows)
        return cls(tokens, (*range(-1, num_certain - 1), *drafted), num_certain)

    @property
    def num_draft(self) -> int:
        return len(self.token_ids) - self.num_certain

    def path(self, row: int) -> list[int]:
        before = self.path(self.parents[row]) if row >= 0 else []
        return [*before, row] if row >= 0 else []

    def leaves(self) -> list[int]:
        return [row for row in range(len(self.parents)) if row not in self.parents]

    def text(self, path: Sequence[int]) -> list[int]:
        return [self.token_ids[row] for row in path]


def keep_path(model: Model, pages: KVPages, committed: int, path: Sequence[int], slot: int) -> None:
    """Commit a path of the last forward, as the engine does."""
    model.commit(slot, path)
    moves = [(committed + row, committed + at) for at, row in enumerate(path) if row != at]
    pages.exact.move(PAGES, moves)


def run(model: Model, token_ids: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """Compute a text in parts of the given sizes, the rest at once; return all logits `[T, V]`."""
    pages, logits, start = poisoned_pages(model), [], 0
    model.reset(0)
    for size in [*chunks, len(token_ids)]:
        part = token_ids[start : start + size]
        if part:
            logits.append(model.forward(batch_of(part, start), pages))
            model.commit(0, range(len(part)))
            start += len(part)
    return torch.cat(logits)
