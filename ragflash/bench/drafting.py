"""What drafts are worth: decoding with them and without, by task, document length and source.

A model answers greedily about a document of prose with a list of made-up parts in its middle. Every
round takes one answer of each kind, in another order, so that they see the same disturbances. A
document is read once. The policy learns for each task from nothing, its first round included.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ragflash.bench.record import LEAST_PAIRS, Measurement, Series, median_interval
from ragflash.engine.client import EngineClient
from ragflash.engine.request import (
    MAX_DRAFT,
    ChatMessage,
    DraftMode,
    Finished,
    GenerateRequest,
    SegmentKind,
    Span,
    TextSegment,
)
from ragflash.errors import EngineError, InputError

TASKS: Mapping[str, str] = {
    "copy": "Copy the list of parts in stock from the document above, line by line. Parts in "
    "stock, copied from the document above, line by line:",
    "quote": "Quote the sentence of the document above that matters most to somebody who wants "
    "to pass the work on, and then explain in your own words what it means.",
    "list": "List the most important things that the document above says, one a line, each of "
    "them in a few words, and begin each line with its number.",
    "rewrite": "Rewrite the first paragraph of the document above in simpler words, so that a "
    "child can follow it, and keep all that it says in the order in which it is said.",
    "summary": "Summarise the document above in five or six sentences, so that somebody who has "
    "not read it knows what it is about and what follows from it.",
    "free": "Do not use the document above. Tell a story about a fisherman, his daughter and a "
    "storm at sea, in which everybody comes home in the end.",
}
SOURCES = (DraftMode.LOOKUP, DraftMode.TREE, DraftMode.AUTO)
COPIED_SHARE = 0.9
"""Of an answer's tokens, what must stand in the document to call it a copy."""

_RUN_TOKENS = 4  # as many in a row are found in the document or are not copied
_PARTS = ("seal ring", "hex bolt", "spring", "bearing", "gasket", "valve stem", "filter", "fuse")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        contexts: Tokens of documents and questions together.
        output_tokens: Most of an answer.
        rounds: Answers of each kind, 7 or more.
        tasks: Some of `TASKS`.
        question_tokens: Of a context, what is left for the question and the template.
        list_rows: Parts in the document.
    """

    contexts: Sequence[int] = (1024, 4096, 7500)
    output_tokens: int = 64
    rounds: int = LEAST_PAIRS
    tasks: Sequence[str] = (*TASKS,)
    question_tokens: int = 160
    list_rows: int = 14


FULL = Sizes()
ON_CPU = Sizes(contexts=(1024, 4096), output_tokens=48)
QUICK = Sizes(contexts=(1024,), output_tokens=48, tasks=("copy", "free"))


def sizes_for(client: EngineClient, *, quick: bool) -> Sizes:
    """Return what a few minutes are enough for."""
    if quick:
        return QUICK
    return ON_CPU if client.info().device == "cpu" else FULL


def measure(
    client: EngineClient,
    prose: str,
    sizes: Sizes,
    progress: Progress,
    *,
    beside: Mapping[str, Any] | None = None,
    more: Mapping[str, Series] | None = None,
) -> Measurement:
    """Answer every task at every length with each source that the engine has, and without.

    Args:
        client: Of an engine that drafts, with one slot.
        prose: Long enough for the longest context.
        sizes: How much.
        progress: Called with what is done, how far it is, and out of how much.
        beside: A result of this benchmark from another device, to be kept in this one.
        more: Figures of a larger model.

    Raises:
        EngineError: A document was not remembered, or is too short.
    """
    bench = _Bench(client, prose, sizes, progress)
    bench.run()
    info, series = client.info(), bench.series
    device = "cpu" if info.device == "cpu" else "gpu"
    parameters: dict[str, Any] = {
        "device": info.device,
        "weights": info.weights,
        "compute_dtype": info.compute_dtype,
        "kv_format": info.kv_format,
        "output_tokens": sizes.output_tokens,
        "rows": bench.rows,
    }
    headlines = sum_up(series, bench.rows, device)
    if beside is not None:
        parameters["beside"] = dict(beside)
        carried = (name for name in beside["samples"] if name.startswith("copy_speedup_"))
        headlines |= {
            name: Series(**beside["samples"][name]) for name in carried if name not in headlines
        }
    return Measurement(
        series={**headlines, **(more or {}), **series},
        threads=torch.get_num_threads(),
        parameters=parameters,
        model={"file": info.model, "sha256": info.model_hash},
        is_flat=True,
    )


def sum_up(
    series: Mapping[str, Series], rows: Sequence[Mapping[str, Any]], device: str
) -> dict[str, Series]:
    """Pool the ratios of copies with `auto`, and find the row with the lowest upper end."""
    ratios = {}
    for row in rows:
        name = f"{row['task']}_{row['context_tokens']}_{DraftMode.AUTO}_tok_s"
        if name in series:
            plain = series[series[name].against or ""].values
            ratios[name] = [a / b for a, b in zip(series[name].values, plain, strict=True)]
    copies = [
        f"{row['task']}_{row['context_tokens']}_{DraftMode.AUTO}_tok_s"
        for row in rows
        if row["task"] == "copy" and row["copied_share"] >= COPIED_SHARE
    ]
    pooled = [ratio for name in copies for ratio in ratios.get(name, ())]
    found = {f"copy_speedup_{device}": Series("times", pooled)} if pooled else {}
    if ratios:
        lowest = min(median_interval(values)[1] for values in ratios.values())
        found["worst_row_ratio"] = Series("times", [lowest])
    return found


def markdown(result: Mapping[str, Any]) -> str:
    """Return the table of a result's rows, with those of another device that it keeps."""
    lines = [
        "| device | task | context | copied | drafts | a step | without | tok/s | times |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in (result, result["parameters"].get("beside")):
        for row in one["parameters"]["rows"] if one else ():
            lines += _table_rows(one, row)
    return "\n".join(lines)


def _table_rows(result: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    lines, summary = [], result["summary"]
    for mode in SOURCES:
        of_source = f"{row['task']}_{row['context_tokens']}_{mode}"
        if f"{of_source}_tok_s" not in summary:
            continue
        speed = summary[f"{of_source}_tok_s"]
        ratio, steps = speed["ratio"], summary[f"{of_source}_tokens_per_step"]
        plain = summary[ratio["to"]]["median"]
        lines.append(
            f"| {result['parameters']['device']} | {row['task']} | {row['context_tokens']:,} "
            f"| {row['copied_share']:.0%} | `{mode}` | {steps['median']:.2f} | {plain:.1f} "
            f"| {speed['median']:.1f} "
            f"| {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) |"
        )
    return lines


@dataclass
class _Bench:
    """One engine while answers are timed on it."""

    client: EngineClient
    prose: str
    sizes: Sizes
    progress: Progress
    series: dict[str, Series] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    asked: int = 0

    def run(self) -> None:
        """Measure all rows; those of one document one after the other."""
        sources = self._sources()
        total = len(self.sizes.contexts) * len(self.sizes.tasks)
        for context in self.sizes.contexts:
            document = self._document(context - self.sizes.question_tokens)
            for task in self.sizes.tasks:
                self.progress(f"{task} at {context} tokens", len(self.rows), total)
                self._row(task, context, document, sources)
        self.progress("done", total, total)

    def _row(self, task: str, context: int, document: str, sources: Sequence[DraftMode]) -> None:
        plain = self._answer(task, context, document, DraftMode.OFF, is_first=True)
        row: dict[str, Any] = {
            "task": task,
            "context_tokens": context,
            "prompt_tokens": plain.usage.prompt_tokens,
            "output_tokens": len(plain.token_ids),
            "copied_share": round(copied_share(plain.token_ids, self.client.tokenize(document)), 4),
            "text": plain.text,
        }
        self.rows.append(row)
        if len(plain.token_ids) < 2:
            row["left_out"] = "the model ended at once"
            return
        modes = (DraftMode.OFF, *sources)
        taken: dict[DraftMode, list[Finished]] = {mode: [] for mode in modes}
        for turn in range(self.sizes.rounds):
            first = turn % len(modes)
            for mode in (*modes[first:], *modes[:first]):
                taken[mode].append(self._answer(task, context, document, mode))
        row["same_output"] = {
            mode: all(each.token_ids == plain.token_ids for each in answers)
            for mode, answers in taken.items()
        }
        self._keep(f"{task}_{context}", taken)

    def _keep(self, row: str, taken: Mapping[DraftMode, Sequence[Finished]]) -> None:
        for mode, answers in taken.items():
            name = f"{row}_{mode}_tok_s"
            against = None if mode is DraftMode.OFF else f"{row}_{DraftMode.OFF}_tok_s"
            self.series[name] = Series("tokens/s", [*map(_tok_s, answers)], against=against)
            if mode is not DraftMode.OFF:
                per_step = [*map(_tokens_per_step, answers)]
                self.series[f"{row}_{mode}_tokens_per_step"] = Series("tokens", per_step)

    def _answer(
        self,
        task: str,
        context: int,
        document: str,
        mode: DraftMode,
        *,
        is_first: bool = False,
    ) -> Finished:
        self.asked += 1
        # What is learned belongs to a document's id, what is remembered to its tokens.
        source = Span(f"{task}-{context}", 0, 0, len(document))
        segments = (
            TextSegment(SegmentKind.DOCUMENT, document, (source,)),
            TextSegment(SegmentKind.QUESTION, f"\n\n{TASKS[task]}"),
        )
        request = GenerateRequest(
            f"bench-{self.asked}",
            (ChatMessage("user", segments),),
            max_tokens=self.sizes.output_tokens,
            draft=mode,
        )
        finished = asyncio.run(self.client.complete(request))
        computed = finished.timings.prompt_n
        if computed <= MAX_DRAFT or (not is_first and computed > self.sizes.question_tokens):
            raise EngineError(
                f"{computed} tokens of a prompt of {finished.usage.prompt_tokens} were computed: "
                "the question alone should have been, and be no part of a step with drafts"
            )
        return finished

    def _document(self, num_tokens: int) -> str:
        """Return prose of about that many tokens, with the list between two paragraphs."""
        parts = f"\n\nParts in stock:\n{_part_list(self.sizes.list_rows)}"
        left = num_tokens - len(self.client.tokenize(parts))
        share = left / len(self.client.tokenize(self.prose))
        if share > 1:
            raise EngineError(f"a text of more than {left} tokens is needed")
        taken = self.prose[: int(share * len(self.prose))]
        middle = max(0, taken.rfind("\n\n", 0, len(taken) // 2))
        return taken[:middle] + parts + taken[middle:]

    def _sources(self) -> Sequence[DraftMode]:
        """Return the sources that this engine has, trying each."""
        message = ChatMessage("user", (TextSegment(SegmentKind.QUESTION, "Hello"),))
        found = []
        for mode in SOURCES:
            request = GenerateRequest(f"try-{mode}", (message,), max_tokens=1, draft=mode)
            try:
                asyncio.run(self.client.complete(request))
            except InputError:
                continue
            found.append(mode)
        return found


def copied_share(token_ids: Sequence[int], source: Sequence[int]) -> float:
    """Return the share of tokens that stand in a run of the source's, of four or more."""
    starts = range(len(source) - _RUN_TOKENS + 1)
    known = {tuple(source[start : start + _RUN_TOKENS]) for start in starts}
    copied: set[int] = set()
    for start in range(len(token_ids) - _RUN_TOKENS + 1):
        if tuple(token_ids[start : start + _RUN_TOKENS]) in known:
            copied.update(range(start, start + _RUN_TOKENS))
    return len(copied) / len(token_ids) if token_ids else 0.0


def _part_list(num_rows: int) -> str:
    draw = random.Random(5)
    return "\n".join(
        f"{row}. {draw.choice(_PARTS)}, part {draw.randint(1000, 9999)}-{draw.choice('ABCDEFG')}, "
        f"{draw.randint(2, 48)} pieces, shelf {draw.randint(1, 90)}"
        for row in range(1, num_rows + 1)
    )


def _tok_s(finished: Finished) -> float:
    """Return tokens a second behind the first, which comes with the prompt."""
    return 1000 * (finished.timings.predicted_n - 1) / finished.timings.predicted_ms


def _tokens_per_step(finished: Finished) -> float:
    """Return those of the steps behind the prompt, each of which has one row besides its draft."""
    timings = finished.timings
    steps = timings.forward_rows - timings.prompt_n - timings.draft_n
    return (timings.predicted_n - 1) / steps
