"""What drafting adds to the steps of a large model behind a long document.

Its weights may be random. For lookups, what is proposed is what a plain run wrote, so that drafts
hold, and the lookup beside it follows a copy of the document as long as the output, so that it has
its work to do. Drafters that are models propose in every step what they make of it; what counts is
what that costs, not what holds. Steps are whole ones, choice, commit and emission included.
"""

import gc
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ragflash.bench.gpu_session import Figures, Session, Sizes, tokens_after_first
from ragflash.bench.record import Series
from ragflash.bench.stub_drafter import DrafterSlot, OwnSlot, StubDrafter, WatchedDrafter
from ragflash.engine.build import start_engine
from ragflash.engine.device import DeviceChoice
from ragflash.engine.request import DraftMode
from ragflash.engine.row_drafters import NO_FILE, DrafterOptions
from ragflash.errors import EngineError, InputError
from ragflash.gguf.reader import GGUFFile
from ragflash.kvcache.formats import KVFormatName
from ragflash.kvcache.planner import PREFILL_ROWS
from ragflash.speculative.drafter import Draft
from ragflash.speculative.lookup import LookupDrafter, SourceIndex

DEPTHS = (0, 32_768, 138_696)
ROWS = 16
VERIFIED = (2, 5, ROWS, 21)
"""Rows of the steps of a draft by multi-token prediction, of a block, and of a tree."""

OWN: dict[str, tuple[DraftMode, int | None]] = {
    "mtp1": (DraftMode.MTP, 1),
    "mtp4": (DraftMode.MTP, 4),
    "dflash": (DraftMode.DFLASH, None),
    "tree": (DraftMode.TREE, None),
}
"""Drafters that are models, and how many tokens they are asked for."""

_QUESTION_TOKENS = 64  # more than a draft, so that no draft is computed with the prompt

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        model: As `GGUFFile.open` takes it; a block of multi-token prediction in it is timed, too.
        drafter: A DFlash drafter's file, as `load_drafter` takes it.
        device: As `start_engine` takes it; so are the next two.
        vram_bytes: Of the card.
        kv_format: Of keys and values.
        depths: Tokens of documents.
        steps: Of a run.
        runs: Of each kind at each depth.
    """

    model: Path
    drafter: Path | None = None
    device: DeviceChoice = "auto"
    vram_bytes: int | None = None
    kv_format: KVFormatName | Literal["auto"] = "tq3_0"
    depths: Sequence[int] = DEPTHS
    steps: int = 16
    runs: int = 3

    @property
    def sizes(self) -> Sizes:
        """Sizes of a session that has room for all."""
        deepest, longest = max(self.depths), max(VERIFIED) * (self.steps + 2)
        return Sizes(prefill=longest, depth=deepest, whole=deepest, decode=1, steps=self.steps)

    @property
    def own(self) -> list[str]:
        """Names of those of `OWN` that there are."""
        with GGUFFile.open(self.model) as file:
            prefix = file.require("general.architecture", str)
            has_mtp = f"{prefix}.nextn_predict_layers" in file.metadata
        return [
            name
            for name, (mode, _) in OWN.items()
            if (has_mtp if mode is DraftMode.MTP else self.drafter is not None)
        ]


@dataclass(slots=True, kw_only=True)
class SeekingDrafter(StubDrafter):
    """Looks up a copy of the source that grows with the output, and proposes the known tokens.

    Attributes:
        lookup: Made with the source as its prompt.
        source: Tokens of the document.
        copied: The source, and behind it what is copied of it again.
        seek_us: What each lookup took.
    """

    lookup: LookupDrafter
    source: Sequence[int]
    copied: list[int]
    seek_us: list[float] = field(default_factory=list)

    def propose(self, history: Sequence[int], budget: int) -> Draft:
        """See `Drafter`."""
        num_written = len(history) - self.num_prompt
        num_copied = len(self.copied) - len(self.source)
        self.copied += self.source[num_copied:num_written]
        began_at = time.perf_counter()
        self.lookup.propose(self.copied, budget)
        self.seek_us.append(1e6 * (time.perf_counter() - began_at))
        # Called by name: a dataclass with slots is another class than the one `super()` knows.
        return StubDrafter.propose(self, history, budget)


def rows_missing(plan: Plan, series: Collection[str]) -> list[tuple[str, int]]:
    """Return which rows, kind and depth, have no figures yet; `lookup` comes first."""
    kinds = {"lookup": f"verify{ROWS}_with_draft_ms"}
    if plan.own:
        kinds["drafters"] = "told_plain_ms"
    return [
        (kind, depth)
        for kind, last in kinds.items()
        for depth in plan.depths
        if f"{last}_depth{depth}" not in series
    ]


def measure(
    plan: Plan,
    series: dict[str, Series],
    about: dict[str, Any],
    progress: Progress,
    *,
    begin: Callable[[], None] = lambda: None,
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Time the rows that have no figures yet.

    Args:
        plan: What and how.
        series: What there is; figures are added row by row.
        about: What is said of the model; is filled.
        progress: Called with what is done, how far it is, and out of how much.
        begin: Called when a model is loaded, and may refuse it.
        keep: Called after every row.

    Raises:
        EngineError: The context is too small, or the model ended too early.
    """
    missing = rows_missing(plan, series)

    def measure_kind(kind: str, depths: Sequence[int]) -> None:
        with _steps(plan, about, kind) as steps:
            begin()
            for depth in depths:
                at = missing.index((kind, depth))
                progress(f"steps with {kind} behind {depth} tokens", at, len(missing))
                timed = steps.lookups(depth) if kind == "lookup" else steps.drafters(depth, series)
                series.update(timed)
                keep()

    for kind in ("lookup", "drafters"):
        depths = [depth for of, depth in missing if of == kind]
        if depths:
            progress(f"loading {plan.model.name}", 0, 0)
            _free_memory()
            measure_kind(kind, depths)  # a call, so that nothing holds its engine afterwards
    progress("steps", len(missing), len(missing))


def _free_memory() -> None:
    """Give back what an engine that was closed held of the card."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _steps(plan: Plan, about: dict[str, Any], kind: str) -> Iterator["_Steps"]:
    """Start an engine; one with drafters that are models tells them of every row."""
    has_own = kind == "drafters"
    known, own = DrafterSlot(), OwnSlot()
    client = start_engine(
        plan.model,
        device=plan.device,
        vram_bytes=plan.vram_bytes,
        context_tokens=plan.sizes.context,
        kv_format=plan.kv_format,
        max_slots=1,
        prefill_chunk_tokens=PREFILL_ROWS,
        verify_rows=max(VERIFIED),
        drafts=has_own,
        row_drafters=DrafterOptions(file=plan.drafter) if has_own else NO_FILE,
        drafter_factory=own if has_own else known,
    )
    with closing(client):
        about |= asdict(client.info()) | {
            "vram_bytes": plan.vram_bytes,
            "steps": plan.steps,
            "runs": plan.runs,
            "drafter": plan.drafter and plan.drafter.name,
        }
        yield _Steps(plan, Session(client, known, plan.sizes), own, about)


@dataclass(slots=True)
class _Steps:
    """One engine while its steps are timed."""

    plan: Plan
    session: Session
    slot: OwnSlot
    about: dict[str, Any]

    def lookups(self, depth: int) -> dict[str, Series]:
        """Time plain steps, steps that verify known drafts, and 16 rows with lookups besides."""
        session, figures = self.session, Figures({})
        plain = session.plain(depth)
        tokens_after_first(plain, max(VERIFIED) * (self.plan.steps + 2))
        source = session.client.tokenize(session.document(depth)) or plain.token_ids
        index = SourceIndex.build(source)
        num_prompt = plain.usage.prompt_tokens
        known: dict[int, list[float]] = {rows: [] for rows in VERIFIED}
        sought: list[float] = []
        seek_us: list[float] = []
        for _ in range(self.plan.runs):
            for rows in VERIFIED:
                drafter = StubDrafter(plain.token_ids, num_prompt, rows - 1)
                session.behind(depth, "?", rows * (self.plan.steps + 2), drafter)
                known[rows] += drafter.step_times_ms()
            seeking = SeekingDrafter(
                plain.token_ids,
                num_prompt,
                ROWS - 1,
                lookup=LookupDrafter([index], source, written_from=len(source)),
                source=source,
                copied=[*source],
            )
            session.behind(depth, "?", ROWS * (self.plan.steps + 2), seeking)
            sought += seeking.step_times_ms()
            seek_us += seeking.seek_us[1:]  # behind the first, which reads the source
        if not sought or not all(known.values()):
            raise EngineError(f"no step behind {depth} tokens verified {max(VERIFIED)} rows")
        figures.add(f"plain_ms_depth{depth}", "ms", self._plain_ms(depth, "?"))
        for rows, times in known.items():
            figures.add(f"verify{rows}_ms_depth{depth}", "ms", times)
        figures.add(f"verify{ROWS}_with_draft_ms_depth{depth}", "ms", sought)
        extra = statistics.median(sought) - statistics.median(known[ROWS])
        figures.add(f"draft_extra_ms_depth{depth}", "ms", [extra])
        figures.add(f"seek_us_depth{depth}", "us", seek_us)
        return figures.series

    def drafters(self, depth: int, done: Mapping[str, Series]) -> dict[str, Series]:
        """Time steps with each drafter, of these what proposing takes, and plain steps besides.

        What a drafter adds is a step's time beyond that of as many rows in an engine without
        drafters, as `done` has it.
        """
        figures = Figures({})
        question = self.session.filler.text(_QUESTION_TOKENS, seed=1)
        for name in self.plan.own:
            mode, num_tokens = OWN[name]
            try:
                runs = [
                    self._watch(depth, question, mode, num_tokens) for _ in range(self.plan.runs)
                ]
            except InputError as error:  # a card may lack a drafter; the result says so
                self.about.setdefault("refused", {})[name] = error.detail
                continue
            rows = 1 + runs[0].num_drafted
            base = done.get(f"verify{rows}_ms_depth{depth}")
            times = [ms for run in runs for ms in run.step_times_ms()]
            if not times or base is None:
                raise EngineError(f"steps of {name} have {rows} rows, which were not timed plainly")
            figures.add(f"{name}_step_ms_depth{depth}", "ms", times)
            proposing = [ms for run in runs for ms in run.propose_times_ms()]
            figures.add(f"{name}_propose_ms_depth{depth}", "ms", proposing)
            added = statistics.median(times) - statistics.median(base.values)
            figures.add(f"{name}_adds_ms_depth{depth}", "ms", [added])
            figures.add(f"{name}_rows_depth{depth}", "rows", [rows])
        figures.add(f"told_plain_ms_depth{depth}", "ms", self._plain_ms(depth, question))
        return figures.series

    def _watch(
        self, depth: int, question: str, mode: DraftMode, num_tokens: int | None
    ) -> WatchedDrafter:
        max_tokens = self.plan.steps + (num_tokens or max(VERIFIED)) + 2
        self.session.behind(depth, question, max_tokens, draft=mode, draft_tokens=num_tokens)
        assert self.slot.watched is not None
        return self.slot.watched

    def _plain_ms(self, depth: int, question: str) -> list[float]:
        """Return the milliseconds of a plain step, of each run."""
        times = []
        for _ in range(self.plan.runs):
            finished, _ = self.session.behind(depth, question, self.plan.steps + 2)
            times.append(finished.timings.predicted_ms / tokens_after_first(finished, 2))
        return times
