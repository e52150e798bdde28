"""What drafts are worth: decoding with them and without, by task, document length and source.

A model answers greedily about a document (`draft_tasks`, `draft_answers`). Every round takes one
answer of each kind, in another order, so that they see the same disturbances. The policy learns for
each task from nothing, its first round included. Besides, steps of a large model can be timed
(`draft_steps`), and llama.cpp's own lookups (`draft_peer`).

A result is kept after every row, and says which rows it lacks; a later run goes on with these.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from ragflash.bench import draft_peer, draft_steps, peer
from ragflash.bench.draft_answers import Answers, Row
from ragflash.bench.draft_projection import project
from ragflash.bench.draft_report import markdown
from ragflash.bench.draft_tasks import CONTEXTS, COPIED_SHARE, TASKS, Sizes
from ragflash.bench.record import LEAST_PAIRS, Measurement, Series, median_interval, read_series
from ragflash.engine.client import EngineClient
from ragflash.engine.request import DraftMode
from ragflash.errors import Conflict, SettingInvalid, StorageError

__all__ = ["ALL_ROWS", "QUICK", "Plan", "markdown", "measure", "plan_of", "read", "sum_up"]

ALL_ROWS = tuple((task, context) for context in CONTEXTS for task in TASKS)
"""What a whole result has, the most telling first."""

NO_TASK = "none"
_LARGE = "large_"
QUICK = (("copy", CONTEXTS[0]), ("free", CONTEXTS[0]))
_QUICK_COPY_TOKENS = 128

_RUN = ("command", "date", "hardware", "python", "torch", "load_1m", "load_1m_after")
_SAME = (
    *("device", "weights", "compute_dtype", "kv_format", "threads"),
    *("rounds", "answer_tokens", "question_tokens", "list_rows", "text_sha256"),
)
_SAME_OF_LARGE = ("model_hash", "device", "kv_format", "vram_bytes", "steps", "runs", "drafter")

Progress = Callable[[str, int, int], None]
Keep = Callable[[Measurement], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        prose: Of the documents, long enough for the longest context.
        rows: Task and context each, in the order in which they are measured.
        sizes: Of each.
        large: A large model's steps, too.
        peer: A model file that llama.cpp is timed with, too.
    """

    prose: str
    rows: Sequence[tuple[str, int]] = ALL_ROWS
    sizes: Sizes = field(default_factory=Sizes)
    large: draft_steps.Plan | None = None
    peer: Path | None = None


def plan_of(
    prose: str,
    *,
    quick: bool = False,
    tasks: Sequence[str] = (),
    contexts: Sequence[int] = (),
    output_tokens: int | None = None,
    rounds: int | None = None,
    large: draft_steps.Plan | None = None,
    peer_model: Path | None = None,
) -> Plan:
    """Return a plan of what a command line selects; see `Plan`.

    Args:
        prose: See `Plan`.
        quick: A copy and an answer of the model's own, behind the shortest document.
        tasks: Some of `TASKS`, or `none`; all if empty.
        contexts: Tokens; `CONTEXTS` if empty.
        output_tokens: Of every answer, instead of what fits its task.
        rounds: See `Sizes`.
        large: See `Plan`.
        peer_model: `peer` of the plan.

    Raises:
        SettingInvalid: A task is not known, or the sizes say nothing.
    """
    unknown = sorted({*tasks} - {*TASKS, NO_TASK})
    if unknown:
        raise SettingInvalid(f"task {', '.join(unknown)}: known are {', '.join(TASKS)}, {NO_TASK}")
    rows: Sequence[tuple[str, int]] = [
        (task, context)
        for context in contexts or CONTEXTS
        for task in TASKS
        if task in (tasks or TASKS)
    ]
    lengths = {name: output_tokens or task.output_tokens for name, task in TASKS.items()}
    if quick:
        rows = QUICK
        lengths["copy"] = output_tokens or _QUICK_COPY_TOKENS
    sizes = Sizes(output_tokens=lengths, rounds=LEAST_PAIRS if rounds is None else rounds)
    return Plan(prose=prose, rows=rows, sizes=sizes, large=large, peer=peer_model)


def measure(
    plan: Plan,
    start: Callable[[], EngineClient],
    progress: Progress,
    keep: Keep = lambda _: None,
    *,
    begun: Mapping[str, Any] | None = None,
    earlier: Mapping[str, Any] | None = None,
    beside: Mapping[str, Any] | None = None,
) -> Measurement:
    """Measure the rows of a plan that an earlier result does not have.

    Args:
        plan: What and how.
        start: Starts an engine that drafts, with one slot; it is closed again.
        progress: Called with what is done, how far it is, and out of how much.
        keep: Is given what there is after every row.
        begun: `provenance()` of this run.
        earlier: A result of this benchmark, to go on with.
        beside: A result of another device, to be kept in this one.

    Raises:
        Conflict: The earlier result was measured with other sizes, another model or another commit.
        EngineError: A document was not remembered, or is too short.
    """
    found = _Found(plan, beside=beside)
    if earlier is not None:
        found.take(earlier, begun or {})
    _measure_answers(found, plan, start, progress, keep)
    if plan.peer is not None:
        _measure_peer(found, plan, progress, keep)
    if plan.large is not None:
        draft_steps.measure(
            plan.large,
            found.series,
            found.large,
            progress,
            begin=found.check_large,
            keep=lambda: keep(found.measurement()),
        )
    return found.measurement()


def _measure_answers(
    found: "_Found", plan: Plan, start: Callable[[], EngineClient], progress: Progress, keep: Keep
) -> None:
    rows = [row for row in plan.rows if row not in found.rows]
    if not rows:
        return
    progress("loading the model", 0, 0)
    with closing(start()) as client:
        found.with_engine(client)
        answers = Answers(client, plan.prose, plan.sizes)
        last = ""
        for number, (task, context) in enumerate(rows):
            progress(f"{last}{task} behind {context} tokens", number, len(rows))
            began_at = time.perf_counter()
            row, series = answers.measure(task, context)
            found.series |= series
            found.rows[task, context] = row
            keep(found.measurement())
            last = f"{time.perf_counter() - began_at:.0f} s; now "
        progress(f"{last}done", len(rows), len(rows))


def _measure_peer(found: "_Found", plan: Plan, progress: Progress, keep: Keep) -> None:
    if not peer.is_installed():
        progress(f"{peer.PACKAGE} is not installed, so there is nothing beside", 0, 0)
        return
    assert plan.peer is not None
    rows = [
        (task, context)
        for task, context in plan.rows
        if task in draft_peer.TASKS and context == CONTEXTS[0]
    ]
    for number, (task, context) in enumerate(rows):
        if (task, context) in found.peer_rows:
            continue
        progress(f"llama.cpp's {task} behind {context} tokens", number, len(rows))
        row, series = draft_peer.measure_peer(
            plan.peer, plan.prose, plan.sizes, task, context, torch.get_num_threads()
        )
        found.series |= series
        found.peer_rows[task, context] = row
        keep(found.measurement())


@dataclass
class _Found:
    """What there is so far."""

    plan: Plan
    beside: Mapping[str, Any] | None
    series: dict[str, Series] = field(default_factory=dict)
    rows: dict[tuple[str, int], Row] = field(default_factory=dict)
    peer_rows: dict[tuple[str, int], Row] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)
    model: dict[str, str] | None = None
    large: dict[str, Any] = field(default_factory=dict)
    lacking: Sequence[str] = ()  # rows of a large model that an earlier result has not

    def take(self, earlier: Mapping[str, Any], begun: Mapping[str, Any]) -> None:
        """Go on with a result of the same commit.

        Raises:
            Conflict: It is of another one.
        """
        _require_same(earlier, begun, ["commit"])
        parameters = dict(earlier["parameters"])
        for name, kept in (("rows", self.rows), ("peer_rows", self.peer_rows)):
            for row in parameters.pop(name, ()):
                kept[row["task"], row["context_tokens"]] = row
        self.series |= read_series(earlier)
        self.beside = self.beside or parameters.pop("beside", None)
        run = {key: earlier[key] for key in _RUN if key in earlier}
        self.how = parameters | {"earlier_runs": [*parameters.get("earlier_runs", ()), run]}
        self.model = earlier["model"]
        self.lacking = [name for name in earlier.get("missing", ()) if name.startswith(_LARGE)]

    def with_engine(self, client: EngineClient) -> None:
        """Say of what the answers are.

        Raises:
            Conflict: Earlier ones are of something else.
        """
        info, sizes = client.info(), self.plan.sizes
        how = {
            "device": info.device,
            "weights": info.weights,
            "compute_dtype": info.compute_dtype,
            "kv_format": info.kv_format,
            "threads": torch.get_num_threads(),
            "rounds": sizes.rounds,
            "answer_tokens": dict(sizes.output_tokens),
            "question_tokens": sizes.question_tokens,
            "list_rows": sizes.list_rows,
            "text_sha256": sha256(self.plan.prose.encode()).hexdigest(),
        }
        model = {"file": info.model, "sha256": info.model_hash}
        if self.model is not None:
            _require_same(self.model, model, ["sha256"])
            _require_same(self.how, how, _SAME)
        self.how |= how
        self.model = model

    def check_large(self) -> None:
        """Require that earlier steps are of what these are of.

        Raises:
            Conflict: They are not.
        """
        if "large" in self.how:
            _require_same(self.how["large"], self.large, _SAME_OF_LARGE)

    def measurement(self) -> Measurement:
        """Return what there is, with the figures that follow from it."""
        rows = [self.rows[row] for row in sorted(self.rows, key=_place)]
        headlines = sum_up(self.series, rows, "cpu" if self.how.get("device") == "cpu" else "gpu")
        found = {
            "large": dict(self.large) or self.how.get("large"),
            "peer_rows": [*self.peer_rows.values()],
            "projected": project(self.series, rows),
        }
        parameters = self.how | {"rows": rows} | {name: one for name, one in found.items() if one}
        if self.beside is not None:
            parameters["beside"] = dict(self.beside)
            carried = (name for name in self.beside["samples"] if name.startswith("copy_speedup_"))
            headlines |= {
                name: Series(**self.beside["samples"][name])
                for name in carried
                if name not in headlines
            }
        missing = [f"{task}_{at}" for task, at in ALL_ROWS if (task, at) not in self.rows]
        if self.plan.large is None:
            missing += self.lacking
        else:
            lacking = draft_steps.rows_missing(self.plan.large, self.series)
            missing += [f"{_LARGE}{kind}_{depth}" for kind, depth in lacking]
        return Measurement(
            series=headlines | {n: s for n, s in self.series.items() if n not in headlines},
            threads=torch.get_num_threads(),
            parameters=parameters,
            model=self.model,
            is_flat=True,
            missing=missing,
        )


def _place(row: tuple[str, int]) -> tuple[int, int]:
    task, context = row
    return context, [*TASKS].index(task)


def read(path: Path) -> dict[str, Any]:
    """Read a result of this benchmark.

    Raises:
        StorageError: The file cannot be read.
        Conflict: It holds something else.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise Conflict(f"{path} is no result of a benchmark: {error}") from error
    if not isinstance(result, dict) or result.get("bench") != "drafting":
        raise Conflict(f"{path} is no result of bench drafting")
    return result


def _require_same(ours: Mapping[str, Any], new: Mapping[str, Any], keys: Sequence[str]) -> None:
    other = [key for key in keys if ours.get(key) != new.get(key)]
    if other:
        told = "; ".join(f"{key} {ours.get(key)!r} there, {new.get(key)!r} here" for key in other)
        raise Conflict(f"the result to go on with differs: {told}. Write to another file")


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
