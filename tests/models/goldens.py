"""Real models against what transformers and llama.cpp computed of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.pages import KVPages, PagePool
from ragflash.models.contract import ForwardBatch, Model, SequenceRows
from ragflash.models.registry import ComputeDtype, WeightForm, load_model

PAGES = (2, 0, 1)


def load_golden(name: str) -> dict[str, Any]:
    path = Path(__file__).parents[1] / "golden" / name
    return json.loads(path.read_text(encoding="utf-8"))


def load_real(
    path: Path, *, dtype: ComputeDtype = "float32", weights: WeightForm = "dense"
) -> Model:
    with GGUFFile.open(path) as file:
        return load_model(file, dtype=dtype, weights=weights)


def forward(
    model: Model, pages: KVPages, tokens: list[int], committed: int, logit_rows: tuple[int, ...]
) -> torch.Tensor:
    rows = SequenceRows(0, len(tokens), committed, PAGES, logit_rows)
    positions = torch.arange(committed, committed + len(tokens))
    return model.forward(ForwardBatch(torch.tensor(tokens), positions, (rows,)), pages)


def all_logits(model: Model, ids: list[int]) -> torch.Tensor:
    return forward(
        model, KVPages(PagePool(model.kv_layout, len(PAGES))), ids, 0, tuple(range(len(ids)))
    )


def assert_golden_logits(model: Model, golden: dict[str, Any]) -> None:
    """The 20 largest logits of every position, and the sum over all, within 0.002."""
    logits = all_logits(model, golden["ids"])
    top_ids = torch.tensor(golden["top_ids"])
    assert torch.equal(logits.argmax(-1), top_ids[:, 0])
    found = torch.cat([logits.gather(1, top_ids), logits.logsumexp(-1, keepdim=True)], dim=1)
    sums = torch.tensor(golden["logsumexp"])[:, None]
    expected = torch.cat([torch.tensor(golden["top_logits"]), sums], dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


def greedy_together(model: Model, golden: dict[str, Any]) -> list[list[int]]:
    """Go on from both golden prompts, in one batch."""
    cases = golden["greedy"]
    pages = KVPages(PagePool(model.kv_layout, 2))
    new: list[list[int]] = [case["prompt"] for case in cases]
    committed, found = [0, 0], [[], []]
    for _ in cases[0]["tokens"]:
        ends = [committed[i] + len(new[i]) for i in (0, 1)]
        batch = ForwardBatch(
            torch.tensor([*new[0], *new[1]]),
            torch.cat([torch.arange(c, e) for c, e in zip(committed, ends, strict=True)]),
            tuple(
                SequenceRows(i, len(new[i]), committed[i], (i,), (len(new[i]) - 1,)) for i in (0, 1)
            ),
        )
        best = model.forward(batch, pages).argmax(-1).tolist()
        committed, new = ends, [[best[0]], [best[1]]]
        for i in (0, 1):
            found[i].append(best[i])
    return found


def perplexity(model: Model, ids: Sequence[int]) -> float:
    """Of every token but the first, given those before it."""
    logits = all_logits(model, [*ids])[:-1].double()
    return functional.cross_entropy(logits, torch.tensor(ids[1:])).exp().item()
