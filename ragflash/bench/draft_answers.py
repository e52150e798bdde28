"""Answers of one engine with drafts of each source and without, in turn."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragflash.bench.draft_tasks import Sizes, copied_share, make_document, messages_of
from ragflash.bench.record import Series
from ragflash.engine.client import EngineClient
from ragflash.engine.request import (
    MAX_DRAFT,
    ChatMessage,
    DraftMode,
    Finished,
    GenerateRequest,
    SegmentKind,
    TextSegment,
)
from ragflash.errors import EngineError, InputError

SOURCES = (DraftMode.LOOKUP, DraftMode.TREE, DraftMode.AUTO)

Row = dict[str, Any]


@dataclass
class Answers:
    """One engine while answers are timed on it.

    Attributes:
        client: Of an engine that drafts, with one slot.
        prose: Long enough for the longest context.
        sizes: How much is measured.
    """

    client: EngineClient
    prose: str
    sizes: Sizes
    _documents: dict[int, str] = field(default_factory=dict)
    _modes: tuple[DraftMode, ...] = ()
    _num_asked: int = 0

    def measure(self, task: str, context: int) -> tuple[Row, dict[str, Series]]:
        """Answer a task with each source that the engine has, and without, in changing order.

        Raises:
            EngineError: The document was not remembered, or is too short.
        """
        began_at = time.perf_counter()
        plain = self._answer(task, context, DraftMode.OFF, is_first=True)
        row: Row = {
            "task": task,
            "context_tokens": context,
            "prompt_tokens": plain.usage.prompt_tokens,
            "output_tokens": len(plain.token_ids),
            "copied_share": self._copied_share(plain, context),
            "text": plain.text,
        }
        if len(plain.token_ids) < 2:
            return row | {"left_out": "the model ended at once"}, {}
        self._modes = self._modes or (DraftMode.OFF, *self._sources())
        taken: dict[DraftMode, list[Finished]] = {mode: [] for mode in self._modes}
        for turn in range(self.sizes.rounds):
            first = turn % len(self._modes)
            for mode in (*self._modes[first:], *self._modes[:first]):
                taken[mode].append(self._answer(task, context, mode))
        row["same_output"] = {
            mode: all(each.token_ids == plain.token_ids for each in answers)
            for mode, answers in taken.items()
        }
        row["drafts"] = {
            mode: _drafts_of(taken[mode][-1]) for mode in taken if mode is not DraftMode.OFF
        }
        row["took_s"] = round(time.perf_counter() - began_at, 1)
        return row, _series_of(f"{task}_{context}", taken)

    def _answer(
        self, task: str, context: int, mode: DraftMode, *, is_first: bool = False
    ) -> Finished:
        self._num_asked += 1
        request = GenerateRequest(
            f"bench-{self._num_asked}",
            messages_of(task, context, self._document(context)),
            max_tokens=self.sizes.output_tokens[task],
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

    def _document(self, context: int) -> str:
        if context not in self._documents:
            num_tokens = context - self.sizes.question_tokens
            self._documents[context] = make_document(
                self.prose, num_tokens, self.sizes.list_rows, self.client.tokenize
            )
        return self._documents[context]

    def _copied_share(self, answer: Finished, context: int) -> float:
        source = self.client.tokenize(self._document(context))
        return round(copied_share(answer.token_ids, source), 4)

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


def num_steps(finished: Finished) -> int:
    """Return the steps behind the prompt, each of which has one row besides its draft."""
    timings = finished.timings
    return timings.forward_rows - timings.prompt_n - timings.draft_n


def _series_of(row: str, taken: Mapping[DraftMode, Sequence[Finished]]) -> dict[str, Series]:
    series = {}
    for mode, answers in taken.items():
        against = None if mode is DraftMode.OFF else f"{row}_{DraftMode.OFF}_tok_s"
        series[f"{row}_{mode}_tok_s"] = Series("tokens/s", [*map(_tok_s, answers)], against)
        if mode is not DraftMode.OFF:
            tokens = [(each.timings.predicted_n - 1) / num_steps(each) for each in answers]
            rows = [1 + each.timings.draft_n / num_steps(each) for each in answers]
            series[f"{row}_{mode}_tokens_per_step"] = Series("tokens", tokens)
            series[f"{row}_{mode}_rows_per_step"] = Series("rows", rows)
    return series


def _tok_s(finished: Finished) -> float:
    """Return tokens a second behind the first, which comes with the prompt."""
    return 1000 * (finished.timings.predicted_n - 1) / finished.timings.predicted_ms


def _drafts_of(finished: Finished) -> dict[str, Any]:
    """Say how many tokens were drafted and held, and why nothing was drafted in other steps."""
    timings = finished.timings
    return {
        "steps": num_steps(finished),
        "drafted": timings.draft_n,
        "accepted": timings.draft_n_accepted,
        "idle": dict(timings.idle_steps),
    }
