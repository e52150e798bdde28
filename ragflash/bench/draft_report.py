"""Tables of a result of `bench drafting`, as the documents show them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ragflash.bench.draft_answers import SOURCES
from ragflash.bench.draft_peer import MODES as PEER_MODES
from ragflash.bench.draft_projection import depths_of
from ragflash.bench.draft_steps import OWN, VERIFIED

Result = Mapping[str, Any]

_SMALL = ("device", "task", "context", "copied", "drafts", "a step", "without", "tok/s", "times")
_STEPS = ("step", "tokens before it", "rows", "ms", "added by drafting", "of that proposing")
_PROJECTED = ("drafts", "task", "tokens before it", "a step", "step, ms", "tok/s", "times")


def markdown(result: Result) -> str:
    """Return a result's tables, with those of another device that it keeps: all its rows.

    Answers are as they were measured, steps of a large model too; what is projected says so, and
    what was not measured is named.
    """
    both = [result, *filter(None, [result["parameters"].get("beside")])]
    tables = [_table(_SMALL, [row for one in both for row in _answers(one)])]
    for one in both:
        if depths := depths_of(one["summary"]):
            tables.append(_table(_STEPS, [row for depth in depths for row in _steps(one, depth)]))
        if projected := one["parameters"].get("projected"):
            tables.append(
                "Projected, not measured:\n\n" + _table(_PROJECTED, _projected(projected))
            )
            sources = dict.fromkeys((row["source"], row["tokens_from"]) for row in projected)
            tables.append("\n".join(f"- `{name}`: {where}." for name, where in sources))
        if missing := one.get("missing"):
            device = one["parameters"].get("device") or one["parameters"]["large"]["device"]
            tables.append(f"Not measured ({device}): {', '.join(missing)}.")
    return "\n\n".join(tables)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


def _answers(result: Result) -> Iterator[list[str]]:
    """Tell of our answers, each followed by llama.cpp's to the same prompt."""
    parameters = result["parameters"]
    peers = {(row["task"], row["context_tokens"]): row for row in parameters.get("peer_rows", ())}
    for row in parameters["rows"]:
        name = f"{row['task']}_{row['context_tokens']}"
        for mode in SOURCES:
            if f"{name}_{mode}_tok_s" in result["summary"]:
                yield _answer(result, row, f"{name}_{mode}", f"`{mode}`")
        if (row["task"], row["context_tokens"]) in peers:
            peer = peers[row["task"], row["context_tokens"]]
            for name_of in PEER_MODES:
                yield _answer(result, peer, f"peer_{name}_{name_of}", f"llama.cpp's {name_of}")


def _answer(result: Result, row: Result, name: str, drafts: str) -> list[str]:
    summary = result["summary"]
    speed = summary[f"{name}_tok_s"]
    ratio = speed["ratio"]
    return [
        result["parameters"]["device"],
        row["task"],
        f"{row['context_tokens']:,}",
        f"{row['copied_share']:.0%}",
        drafts,
        f"{summary[f'{name}_tokens_per_step']['median']:.2f}",
        f"{summary[ratio['to']]['median']:.1f}",
        f"{speed['median']:.1f}",
        f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
    ]


def _steps(result: Result, depth: int) -> Iterator[list[str]]:
    medians = {name: one["median"] for name, one in result["summary"].items()}

    def line(step: str, rows: int, ms: str, added: str = "", proposing: str = "") -> list[str]:
        found = (medians.get(f"{name}_depth{depth}") for name in (ms, added, proposing))
        shown = ["" if value is None else f"{value:.2f}" for value in found]
        return [step, f"{depth:,}", str(rows), *shown]

    yield line("plain", 1, "plain_ms")
    for rows in VERIFIED:
        yield line("known drafts", rows, f"verify{rows}_ms")
    yield line("lookups besides", 16, "verify16_with_draft_ms", "draft_extra_ms")
    if f"told_plain_ms_depth{depth}" in medians:
        yield line("plain, drafters told", 1, "told_plain_ms")
    for name in OWN:
        if f"{name}_step_ms_depth{depth}" in medians:
            rows = int(medians[f"{name}_rows_depth{depth}"])
            parts = (f"{name}_step_ms", f"{name}_adds_ms", f"{name}_propose_ms")
            yield line(f"`{name}`", rows, *parts)


def _projected(rows: Sequence[Result]) -> list[list[str]]:
    return [
        [
            f"`{row['source']}`",
            row["task"],
            f"{row['depth']:,}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['step_ms']:.1f}",
            f"{row['tok_s']:.0f}",
            f"{row['times_plain']:.2f}",
        ]
        for row in rows
    ]
