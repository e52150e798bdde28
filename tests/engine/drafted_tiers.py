"""Questions with drafts of each source to an engine over files, in this process or in a new one.

Called with a folder of sessions and what `Setting.spelled` says, it restarts: it asks all cases and
prints one line of JSON an answer.
"""

import asyncio
import json
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ragflash.engine.client import EngineClient
from ragflash.engine.constraint import Free, Literal, QuoteFrom
from ragflash.engine.request import (
    ChatMessage,
    DraftMode,
    GenerateRequest,
    SamplingParams,
    SegmentKind,
    Span,
    TextSegment,
)
from ragflash.engine.row_drafters import DrafterOptions
from ragflash.sessions import FolderArchive
from ragflash.speculative.drafter import Draft, Drafter
from tests.engine.restarted import engine_on

MANUAL = (
    "Seals must be replaced every year by a trained person. The warranty of the Mk II pump lasts "
    "36 months from the day of delivery, if it is used as described here. "
)
WORDS = ("seals ", "are ", "replaced ", "every ", "year; ", "sealed ", "by ", "16 bar. ")
KINDS: Mapping[str, Mapping[str, Any]] = {
    "free": {},
    "quote": {"constraint": QuoteFrom(("manual",))},
    "sampled": {"sampling": SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.1)},
    "short": {"max_tokens": 4},
    "copy": {"constraint": (Literal("The warranty of the Mk II pump"), Free()), "max_tokens": 16},
}


@dataclass(frozen=True)
class Case:
    """A question; nothing is shared between cases.

    Attributes:
        kind: One of `KINDS`.
        length: Characters of the document.
        has_turns: Whether turns of a conversation stand before the question.
    """

    mode: str
    kind: str
    length: int
    has_turns: bool

    @property
    def text(self) -> str:
        """Words in any order; a copy and a short answer find their beginning in it."""
        if self.kind == "copy":
            return MANUAL
        if self.kind == "short":
            return "assistant\n".ljust(self.length, "a")
        return "".join(random.Random(self.length).choices(WORDS, k=self.length))[: self.length]

    def request(self, mode: str | None = None, **options: Any) -> GenerateRequest:
        """Ask it, or the same with drafts of another mode."""
        text = self.text
        document = TextSegment(SegmentKind.DOCUMENT, text, (Span("manual", 0, 0, len(text)),))
        opening = (document,)
        turns: tuple[ChatMessage, ...] = ()
        question = TextSegment(SegmentKind.QUESTION, "How often are seals replaced?")
        if self.has_turns:
            hello = TextSegment(SegmentKind.CONVERSATION, "Hello. " * 9)
            turns = (
                ChatMessage("user", (document, hello)),
                ChatMessage("assistant", (TextSegment(SegmentKind.CONVERSATION, "Ask away."),)),
            )
            opening = ()
        rules = TextSegment(SegmentKind.RULES, "Answer from it alone.")
        return GenerateRequest(
            "r",
            (ChatMessage("system", (rules,)), *turns, ChatMessage("user", (*opening, question))),
            namespace=f"{self}",
            draft=DraftMode(mode or self.mode),
            **{"max_tokens": 12, **KINDS[self.kind], **options},
        )


@dataclass(frozen=True)
class Setting:
    """An engine, and what it is asked.

    Attributes:
        drafter: Of DFlash; `None` starts the engine without.
        kv_format: Of pages; `auto` keeps all exact.
    """

    model: str
    drafter: str | None
    kv_format: str
    cases: tuple[Case, ...]

    @property
    def spelled(self) -> str:
        """As an argument of the program."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, spelled: str) -> Self:
        """Read what `spelled` gave."""
        found = json.loads(spelled)
        return cls(**found | {"cases": tuple(Case(**case) for case in found["cases"])})


@dataclass(frozen=True)
class Told:
    """An answer, and how it came about.

    Attributes:
        proposals: Of each step: tokens of the history, then source, tokens and parents.
        drafts: By source: tokens that were drafted, and accepted.
        idle: Steps without a draft, by reason.
    """

    tokens: list[int]
    tier: str
    proposals: list[list[Any]]
    drafts: list[list[Any]]
    idle: list[list[Any]]

    @property
    def drafting(self) -> tuple[Any, ...]:
        """What a restore must not change, beside the tokens."""
        return self.proposals, self.drafts, self.idle


class _Noting:
    """Notes what a drafter proposes."""

    def __init__(self, drafter: Drafter, proposals: list[list[Any]]) -> None:
        self._drafter = drafter
        self._proposals = proposals
        self.observe = drafter.observe

    def propose(self, history: list[int], budget: int) -> Draft:
        draft = self._drafter.propose(history, budget)
        parents = [*draft.parents] if draft.parents is not None else None
        said = [len(history), draft.source, [*draft.token_ids], parents]
        self._proposals.append(json.loads(json.dumps(said)))
        return draft


class Asker:
    """Asks an engine, and notes what its drafters propose."""

    def __init__(self, engine: EngineClient, archive: FolderArchive | None) -> None:
        self.engine = engine
        self._archive = archive
        self._core = engine._worker._core
        self._proposals: list[list[Any]] = []
        if make := self._core._drafter_factory:
            self._core._drafter_factory = lambda sequence: self._noted(make(sequence))

    def _noted(self, drafter: Drafter | None) -> _Noting | None:
        return _Noting(drafter, self._proposals) if drafter is not None else None

    def ask(self, case: Case, mode: str | None = None, **options: Any) -> Told:
        """Ask, and wait until what is stored is in its file."""
        self._proposals.clear()
        found = asyncio.run(self.engine.complete(case.request(mode, **options)))
        if self._archive is not None:
            self._archive.flush()
        return Told(
            tokens=[*found.token_ids],
            tier=str(found.tier),
            proposals=[*self._proposals],
            drafts=[[one.source, one.drafted, one.accepted] for one in found.timings.drafts],
            idle=[[*one] for one in found.timings.idle_steps],
        )

    def evict(self) -> None:
        """Have memory forget everything; the engine has nothing to do."""
        self._core._store.drop_all()


@contextmanager
def asking(setting: Setting, sessions: Path | None, *, drafts: bool = True) -> Iterator[Asker]:
    """Start an engine."""
    options: dict[str, Any] = {"kv_format": setting.kv_format, "drafts": drafts}
    options["kv_bytes"] = 64 << 20
    if drafts and setting.drafter is not None:
        options["row_drafters"] = DrafterOptions(file=Path(setting.drafter))
    with engine_on(Path(setting.model), sessions, **options) as (engine, archive):
        yield Asker(engine, archive)


def main() -> None:
    sessions, spelled = sys.argv[1:]
    setting = Setting.of(spelled)
    with asking(setting, Path(sessions)) as asker:
        for case in setting.cases:
            print(json.dumps(asdict(asker.ask(case))), flush=True)


if __name__ == "__main__":
    main()
