"""What a large model would write with drafts: nothing here is measured as a whole.

A step's time is measured on a file with random weights (`draft_steps`); how many tokens a step
gives is measured on a small model for lookups, and taken as published for drafters whose trained
weights could not be had. Tokens a step over the time of a step is the projection.
"""

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragflash.bench.draft_steps import VERIFIED
from ragflash.bench.record import Series
from ragflash.engine.request import DraftMode


@dataclass(frozen=True, slots=True)
class Published:
    """Tokens a step as others measured them.

    Attributes:
        steps: Of `draft_steps.OWN`, whose time is taken.
        tokens_per_step: By task, in the words of the source.
        where: Model, conditions and place.
    """

    steps: str
    tokens_per_step: Mapping[str, float]
    where: str


PUBLISHED = (
    Published(
        "mtp4",
        {
            **{"copy": 3.81, "list": 3.52, "rewrite": 3.79},
            **{"quote": 2.75, "summary": 2.68, "question": 2.34},
        },
        "Qwen3.8-27B behind 112,655 tokens: github.com/syv-ai/qwen38-27b-rtx3090, "
        "docs/long-context.md at 7ff5ff34",
    ),
    Published(
        "dflash",
        {"rag": 8.43, "summarization": 4.32, "writing": 4.41, "qa": 2.93},
        "Muse-Glimmer-30B, blocks of 16, greedy: github.com/ggml-org/llama.cpp/pull/27342, "
        "comment of 2026-08-21",
    ),
    Published(
        "tree",
        {"HumanEval": 8.31, "Math500": 7.04, "GSM8K": 6.14},
        "Qwen3.5-27B, DDTree of 22 tokens, short prompts, greedy: "
        "github.com/Luce-Org/lucebox-hub, dflash/RESULTS.md at c7257581",
    ),
)


def project(
    series: Mapping[str, Series], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return projected rows: source, task, depth, tokens a step, its time, and tokens a second.

    Lookups are projected from the row whose context is nearest to the depth, with the mean number
    of rows of a step there; the time of so many rows is interpolated between those measured.
    """
    medians = {name: statistics.median(one.values) for name, one in series.items()}
    projected = []
    for depth in depths_of(series):
        plain_ms = medians[f"plain_ms_depth{depth}"]
        for row in (*_lookups(medians, rows, depth), *_published(medians, depth)):
            tok_s = 1000 * row["tokens_per_step"] / row["step_ms"]
            row |= {"tok_s": round(tok_s, 1), "times_plain": round(tok_s * plain_ms / 1000, 2)}
            projected.append({"projected": True, "depth": depth} | row)
    return projected


def depths_of(names: Iterable[str]) -> list[int]:
    """Return the depths that a large model's steps were timed at, from the names of series."""
    starts = (name.partition("plain_ms_depth") for name in names)
    return sorted(int(depth) for before, found, depth in starts if found and not before)


def _lookups(
    medians: Mapping[str, float], rows: Sequence[Mapping[str, Any]], depth: int
) -> Iterator[dict[str, Any]]:
    measured: dict[str, list[int]] = {}
    for row in rows:
        if f"{row['task']}_{row['context_tokens']}_lookup_rows_per_step" in medians:
            measured.setdefault(row["task"], []).append(row["context_tokens"])
    for task, contexts in measured.items():
        context = min(contexts, key=lambda tokens: abs(tokens - depth))
        name = f"{task}_{context}_{DraftMode.LOOKUP}"
        num_rows = medians[f"{name}_rows_per_step"]
        step_ms = _interpolated(medians, num_rows, depth)
        # what looking up adds was measured on steps of 16 rows, and is never taken for a gain
        step_ms += max(0.0, medians[f"draft_extra_ms_depth{depth}"])
        yield {
            "source": str(DraftMode.LOOKUP),
            "task": task,
            "tokens_per_step": round(medians[f"{name}_tokens_per_step"], 3),
            "rows_per_step": round(num_rows, 2),
            "step_ms": round(step_ms, 3),
            "tokens_from": f"the small model's answers behind {context} tokens",
        }


def _published(medians: Mapping[str, float], depth: int) -> Iterator[dict[str, Any]]:
    for source in PUBLISHED:
        step_ms = medians.get(f"{source.steps}_step_ms_depth{depth}")
        if step_ms is None:
            continue
        for task, tokens in source.tokens_per_step.items():
            yield {
                "source": source.steps,
                "task": task,
                "tokens_per_step": tokens,
                "rows_per_step": medians[f"{source.steps}_rows_depth{depth}"],
                "step_ms": round(step_ms, 3),
                "tokens_from": source.where,
            }


def _interpolated(medians: Mapping[str, float], num_rows: float, depth: int) -> float:
    """Return the milliseconds of a step of so many rows, between those that were timed."""
    timed = [(1, medians[f"plain_ms_depth{depth}"])]
    timed += [(rows, medians[f"verify{rows}_ms_depth{depth}"]) for rows in VERIFIED]
    above = max(1, min(bisect_left([rows for rows, _ in timed], num_rows), len(timed) - 1))
    (low, low_ms), (high, high_ms) = timed[above - 1 : above + 1]
    return low_ms + (high_ms - low_ms) * (num_rows - low) / (high - low)
