"""Stand-ins for what the API is given: the same contracts, no model, no index, no disk."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
from fastapi import FastAPI

from ragflash.api.app import create_app
from ragflash.api.deps import ApiConfig, Services
from ragflash.engine.request import (
    Delta,
    DraftCount,
    EngineInfo,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    PrefillProgress,
    Timings,
    Usage,
)
from ragflash.engine.stats import EngineStats
from ragflash.errors import Conflict, NotFound, QuestionBlank
from ragflash.rag.records import (
    Answer,
    AnswerDelta,
    AskEvent,
    AskMode,
    AskRequest,
    AskSources,
    AskStatus,
    AskTimings,
    Citation,
    CitationFound,
    PageBox,
    PageRange,
    QuoteMatch,
    Scope,
)
from ragflash.sessions import ArchiveCounts
from tests.api.fake_library import TEXT, FakeLibrary, hit
from tests.api.fake_sessions import FakeSessions

INFO = EngineInfo("tiny.gguf", "ab" * 32, "llama", "Q4_1", "float32", "q8_0", 2048, "cpu")
DRAFTS = (DraftCount("lookup", 2, 2), DraftCount("lookup_output", 1, 0))
IDLE_STEPS = (("no_gain", 1),)
TIMINGS = Timings(1.0, 30, 10, 20.0, 4, 40.0, 21.0, 3, 2, 33, DRAFTS, IDLE_STEPS)
CONFIG = ApiConfig(
    api_key=None,
    allowed_hosts=frozenset({"localhost", "127.0.0.1", "::1"}),
    heartbeat_s=5.0,
    max_upload_bytes=10_000,
)
HEADERS = {"host": "127.0.0.1:8000"}


def finished(text: str, reason: FinishReason = FinishReason.STOP) -> Finished:
    return Finished("r", text, (1, 2, 3, 4), reason, Usage(40, 4, 10), TIMINGS, None)


def spoken(*deltas: str) -> list[Event]:
    """The events of a request whose output comes in these pieces."""
    text = "".join(deltas)
    return [
        PrefillProgress("r", 40, 40),
        *(Delta("r", delta) for delta in deltas),
        finished(text),
    ]


class Scripted:
    """Plays a list: values are yielded, seconds slept, errors raised, functions called."""

    def __init__(self, script: Sequence[Any]) -> None:
        self.script = list(script)
        self.started = 0
        self.running = 0

    async def play(self) -> AsyncGenerator[Any, None]:
        self.started += 1
        self.running += 1
        try:
            for step in self.script:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, Exception):
                    raise step
                elif callable(step):
                    step()
                else:
                    yield step
        finally:
            self.running -= 1


class FakeEngine(Scripted):
    lookup_tokenizer = None

    def __init__(self, script: Sequence[Any] = ()) -> None:
        super().__init__(script or spoken("Seven", " years."))
        self.is_alive = True
        self.requests: list[GenerateRequest] = []
        self.in_memory: dict[str, int] = {}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        events = self.play()
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    def info(self) -> EngineInfo:
        return INFO

    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def stored_bytes(self) -> dict[str, int]:
        return self.in_memory

    def stats(self) -> EngineStats:
        return EngineStats(*range(1, 9), {"lookup": 9}, {"lookup": 10}, *range(11, 17))


class FakeModels:
    def __init__(self) -> None:
        self.used: list[str] = []

    def names(self) -> list[str]:
        return ["tiny.gguf", "own/large.gguf"]

    def use(self, name: str) -> None:
        if name == "busy":
            raise Conflict("a model is being loaded")
        if name not in self.names():
            raise NotFound(f"there is no model {name!r}")
        self.used.append(name)


def answer(question: str = "How long are records kept?") -> Answer:
    quote = "Records are kept for seven years."
    citation = Citation(
        n=1,
        document_id="doc_1",
        document_name="law.txt",
        version_sha256="cd" * 32,
        quote=quote,
        start=0,
        end=len(quote),
        page_start=1,
        page_end=1,
        page_label=None,
        section="Keeping",
        match=QuoteMatch.EXACT,
        pages=(PageRange(1, None, 0, len(quote)),),
        boxes=(PageBox(1, 72.0, 72.0, 300.0, 84.0),),
    )
    return Answer(
        id="ans_1",
        question=question,
        answered=True,
        answer="Seven years. [1]",
        citations=(citation,),
        mode=AskMode.FULL,
        mode_reason="the document fits",
        context="single",
        usage=Usage(40, 4, 10),
        timings=AskTimings(1.0, 2.0, 30.0, 21.0, TIMINGS),
        engine=INFO,
    )


def unfolding() -> list[AskEvent]:
    final = answer()
    return [
        AskStatus("retrieving"),
        AskSources((hit(),), ("doc_1",)),
        AskStatus("reading", 20, 40),
        CitationFound(final.citations[0]),
        AnswerDelta("Seven years. "),
        AnswerDelta("[1]"),
        final,
    ]


class FakeAnswerer(Scripted):
    def __init__(self, library: "FakeLibrary", script: Sequence[Any] = ()) -> None:
        super().__init__(script or unfolding())
        self._library = library
        self.requests: list[AskRequest] = []

    async def ask(self, scope: Scope, request: AskRequest) -> AsyncGenerator[AskEvent, None]:
        self.requests.append(request)
        if not request.question.strip():
            raise QuestionBlank("the question holds no word")
        for document_id in request.document_ids or ():
            self._library.get(scope, document_id)
        events = self.play()
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()


class World:
    """An app with its fakes."""

    def __init__(
        self, config: ApiConfig = CONFIG, *, loaded: bool = True, keeps_sessions: bool = True
    ) -> None:
        self.library = FakeLibrary()
        self.engine = FakeEngine()
        self.answerer = FakeAnswerer(self.library)
        self.services = Services(config)
        self.sessions = FakeSessions()
        self.models = FakeModels()
        if loaded and keeps_sessions:
            self.services.provide_sessions(
                self.sessions, lambda: ArchiveCounts(1, 2, {"quota": 3, "write_budget": 0}, 4)
            )
        if loaded:
            self.services.provide_library(self.library)
            self.services.provide_engine(self.engine, self.answerer)
            self.services.provide_models(self.models)
        self.app: FastAPI = create_app(self.services)

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send one request and wait for the whole reply."""
        options["headers"] = HEADERS | options.get("headers", {})

        async def sent() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1:8000"
            ) as client:
                return await client.request(method, path, **options)

        return asyncio.run(sent())

    def add_text(self, text: str = TEXT, name: str = "law.txt") -> str:
        """Put a document in and give its id."""
        reply = self.send("POST", "/v1/documents", json={"text": text, "name": name})
        return str(reply.json()["document"]["id"])


def events_of(reply: httpx.Response) -> list[tuple[str | None, str]]:
    """Name and data of each event of a stream."""
    found = []
    for block in reply.text.split("\n\n"):
        if not block:
            continue
        name: str | None = None
        data = []
        for line in block.split("\n"):
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                data.append(value)
        found.append((name, "\n".join(data)))
    return found
