"""Runs forwards of a model as the engine does, over pages with NaN where nothing was written."""

from collections.abc import Sequence
from pathlib import Path

import torch

from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.pages import KVPages, PagePool
from ragflash.models.contract import ForwardBatch, Model, SequenceRows
from ragflash.models.registry import load_model

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
    token_ids: Sequence[int], committed: int, *, slot: int = 0, num_draft: int = 0
) -> ForwardBatch:
    """One sequence's rows, the logits of all of them wanted."""
    num_rows = len(token_ids)
    rows = SequenceRows(slot, num_rows, committed, PAGES, tuple(range(num_rows)), num_draft)
    positions = torch.arange(committed, committed + num_rows)
    return ForwardBatch(torch.tensor(token_ids), positions, (rows,))


def run(model: Model, token_ids: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """Compute a text in parts of the given sizes, the rest at once; return all logits `[T, V]`."""
    pages, logits, start = poisoned_pages(model), [], 0
    model.reset(0)
    for size in [*chunks, len(token_ids)]:
        part = token_ids[start : start + size]
        if part:
            logits.append(model.forward(batch_of(part, start), pages))
            model.commit(0, len(part))
            start += len(part)
    return torch.cat(logits)
