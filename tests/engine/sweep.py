"""One prompt at many lengths, asked of an engine in this process or in a new one.

Called with a folder of sessions, the model file and what `Sweep.spelled` says, it restarts: prints
one line of JSON an answer, each length twice from its file and once from memory.
"""

import asyncio
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from ragflash.engine.client import EngineClient
from ragflash.engine.prompt import CompiledPrompt
from ragflash.engine.request import (
    ChatMessage,
    DraftMode,
    GenerateRequest,
    SegmentKind,
    Span,
    TextSegment,
)
from ragflash.sessions import FolderArchive
from tests.engine.harness import Propose
from tests.engine.restarted import engine_on
from tests.engine.toys import StubDrafter
from tests.engine.trees import answer_of, wild_tree
from tests.models.toy_files import TOKENS

PLAIN = "plain"
SHAPES = ("chain", "tree")
MOST_TOKENS = 4


@dataclass(frozen=True)
class Sweep:
    """Documents that end at certain tokens of a prompt, and how the engine keeps them.

    Attributes:
        kv_format: Of pages; `auto` keeps all exact.
        ends: Tokens of the prompt up to the end of the document.
        answers: By end, what was computed without reuse; drafts come from it.
    """

    kv_format: str
    ends: tuple[int, ...]
    answers: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @property
    def spelled(self) -> str:
        """As an argument of the program."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, spelled: str) -> Self:
        """Read what `spelled` gave."""
        found = json.loads(spelled)
        answers = {int(end): tuple(answer) for end, answer in found["answers"].items()}
        return cls(found["kv_format"], tuple(found["ends"]), answers)

    def shape(self, end: int) -> str:
        """How drafts for a length look: both shapes come at every second one."""
        return SHAPES[end % 2]


@dataclass(frozen=True)
class Told:
    """An answer, bit by bit, and what the model computed for it.

    Attributes:
        rows: That the runner counted.
        bits: Log-probabilities, spelled so that no bit is lost.
        before: Tokens of the prompt before the question.
    """

    tokens: tuple[int, ...]
    bits: tuple[str, ...]
    tier: str
    miss_reason: str | None
    prompt: int
    before: int
    cached: int
    rows: int
    drafted: int
    accepted: int

    @property
    def answer(self) -> tuple[object, ...]:
        """What reuse must not change."""
        return self.tokens, self.bits

    def assert_computed(self) -> None:
        """Nothing was reused."""
        assert (self.tier, self.cached) == ("none", 0)
        assert self.rows == self.prompt + len(self.tokens) - 1

    def assert_reused(self, tier: str) -> None:
        """All before the question was, from there; rows were computed for nothing else."""
        assert (self.tier, self.miss_reason, self.cached) == (tier, None, self.before)
        others = self.rows - (self.prompt - self.cached) - self.drafted
        if self.drafted == 0:
            assert others == len(self.tokens) - 1
        else:
            assert 0 <= others < len(self.tokens)
            assert self.rows < self.before


class Asker:
    """Asks an engine about documents of given ends; each is in a namespace of its own."""

    def __init__(
        self,
        engine: EngineClient,
        sweep: Sweep,
        drafts: "_Drafts",
        archive: FolderArchive | None = None,
    ) -> None:
        self.engine = engine
        self._sweep = sweep
        self._drafts = drafts
        self._archive = archive
        self._head = self._compiled(_request(0, 1, PLAIN)).ends[1] - 1

    def ask(self, end: int, shape: str = PLAIN, *, cache: bool = True) -> Told:
        """Ask about the document that ends there, with drafts of a shape."""
        request = _request(end, end - self._head, shape, cache=cache)
        prompt = self._compiled(request)
        assert prompt.ends[1] == end
        self._drafts.prepare(end, shape, len(prompt.token_ids))
        rows = self.engine.stats().forward_rows
        found = asyncio.run(self.engine.complete(request))
        if self._archive is not None:
            self._archive.flush()
        return Told(
            tokens=found.token_ids,
            bits=tuple(map(repr, found.logprobs)),
            tier=str(found.tier),
            miss_reason=found.miss_reason and str(found.miss_reason),
            prompt=found.usage.prompt_tokens,
            before=end,
            cached=found.usage.cached_tokens,
            rows=self.engine.stats().forward_rows - rows,
            drafted=found.timings.draft_n,
            accepted=found.timings.draft_n_accepted,
        )

    def replay(self) -> Iterator[Told]:
        """Ask for each length from its file and from memory, and later, when it was evicted, again.

        In this order a length: from the file, from memory with drafts, from the file with drafts.
        """
        ends, shape = self._sweep.ends, self._sweep.shape
        first = [(self.ask(end), self.ask(end, shape(end))) for end in ends]
        for end, told in zip(ends, first, strict=True):
            yield from (*told, self.ask(end, shape(end)))

    def _compiled(self, request: GenerateRequest) -> CompiledPrompt:
        """Cut: rules, the document, the question and what the template puts behind it."""
        return self.engine._compile(request.messages)


def _request(end: int, length: int, shape: str, *, cache: bool = True) -> GenerateRequest:
    text = "".join(random.Random(end).choices("abcdefgh .\n", k=length))
    messages = (
        ChatMessage("system", (TextSegment(SegmentKind.RULES, "Answer from it alone."),)),
        ChatMessage(
            "user",
            (
                TextSegment(SegmentKind.DOCUMENT, text, (Span(f"d{end}", 0, 0, length),)),
                TextSegment(SegmentKind.QUESTION, "How often?"),
            ),
        ),
    )
    return GenerateRequest(
        f"{end} {shape}",
        messages,
        namespace=f"{end}",
        max_tokens=MOST_TOKENS,
        draft=DraftMode.OFF if shape == PLAIN else DraftMode.AUTO,
        logprobs=True,
        cache=cache,
    )


class _Drafts:
    """Gives the next request its drafter, which knows the answer in part and errs beside it."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._propose: Propose = lambda history, budget: ()

    def make(self, _asked: object) -> StubDrafter:
        """Make the drafter of the request that is being asked."""
        return StubDrafter(self._propose)

    def prepare(self, end: int, shape: str, num_prompt: int) -> None:
        """Say what is asked next."""
        if shape == PLAIN:
            return
        following = answer_of(self._sweep.answers[end], num_prompt)
        wrong = (end // 2) % MOST_TOKENS

        def chain(history: Sequence[int], budget: int) -> list[int]:
            first = len(history) - num_prompt
            right = following(history)[:budget]
            return [0 if first + at == wrong else token for at, token in enumerate(right)]

        tree = wild_tree(following, len(TOKENS), end)
        self._propose = tree if shape == "tree" else chain


@contextmanager
def asking(model: Path, sessions: Path | None, sweep: Sweep) -> Iterator[Asker]:
    """Start an engine whose memory holds few documents."""
    drafts = _Drafts(sweep)
    options: dict[str, Any] = {
        "kv_format": sweep.kv_format,
        "grid_tokens": 512,
        "context_tokens": 2048,
        "max_slots": 1,
        "prefill_chunk_tokens": 512,
        "drafter_factory": drafts.make,
    }
    with engine_on(model, sessions, **options) as (engine, archive):
        yield Asker(engine, sweep, drafts, archive)


def main() -> None:
    sessions, model, spelled = sys.argv[1:]
    with asking(Path(model), Path(sessions), Sweep.of(spelled)) as asker:
        for told in asker.replay():
            print(json.dumps(asdict(told)), flush=True)


if __name__ == "__main__":
    main()
