"""Stand-ins for what the API is given: the same contracts, no model, no index, no disk."""

import asyncio
import hashlib
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import httpx
from fastapi import FastAPI

from ragflash.api.app import create_app
from ragflash.api.deps import ApiConfig, Services
from ragflash.engine.request import (
    Delta,
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
from ragflash.errors import NotFound, QuestionBlank, RagflashError, UnsafeName
from ragflash.rag.records import (
    Answer,
    AnswerDelta,
    AskEvent,
    AskMode,
    AskRequest,
    AskSources,
    AskStatus,
    AskTimings,
    ChunkRecord,
    Citation,
    CitationFound,
    DocumentRecord,
    DocumentState,
    DuplicatePolicy,
    JobRecord,
    JobState,
    PageBox,
    PageRange,
    QuoteMatch,
    Scope,
    SearchHit,
    SearchMode,
)

TEXT = "Records are kept for seven years. They are then destroyed."
INFO = EngineInfo("tiny.gguf", "ab" * 32, "llama", "Q4_1", "float32", "q8_0", 2048, "cpu")
TIMINGS = Timings(1.0, 30, 10, 20.0, 4, 40.0, 21.0, 3, 2, 33)
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
    def __init__(self, script: Sequence[Any] = ()) -> None:
        super().__init__(script or spoken("Seven", " years."))
        self.is_alive = True
        self.requests: list[GenerateRequest] = []

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

    def stats(self) -> EngineStats:
        return EngineStats(*range(1, 17))


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


def hit() -> SearchHit:
    chunk = ChunkRecord("doc_1", 0, 0, len(TEXT), TEXT, 1, 1, "Keeping")
    return SearchHit(chunk, "law.txt", 0.03, 0.8, 4.2, exact=False)


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


@dataclass(frozen=True)
class FakePage:
    number: int
    label: str | None
    start: int
    end: int


@dataclass(frozen=True)
class FakeDocument:
    text: str
    pages: tuple[FakePage, ...]


@dataclass(frozen=True)
class FakeAdded:
    document: DocumentRecord
    job: JobRecord
    deduplicated: bool


class FakeLibrary:
    """Documents in a dictionary; a job moves one step whenever somebody looks at it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.records: dict[str, DocumentRecord] = {}
        self.jobs: dict[str, JobRecord] = {}
        self.failure: RagflashError | None = None
        self.names: list[str] = []

    def close(self) -> None:
        self._folder.cleanup()

    def add(
        self,
        scope: Scope,
        collection_id: str,
        name: str,
        source: BinaryIO | bytes,
        on_duplicate: DuplicatePolicy = DuplicatePolicy.REUSE,
    ) -> FakeAdded:
        if self.failure is not None:
            raise self.failure
        if not name or name.startswith("..") or "\0" in name:
            raise UnsafeName(f"the file name {name!r} is not acceptable")
        content = source if isinstance(source, bytes) else source.read()
        sha256 = hashlib.sha256(content).hexdigest()
        known = next((r for r in self.records.values() if r.sha256 == sha256), None)
        if known is not None and on_duplicate is DuplicatePolicy.REUSE:
            return FakeAdded(known, self.jobs[known.id.replace("doc", "job")], deduplicated=True)
        record = self._record(collection_id, name, content, sha256)
        job = JobRecord(
            id=record.id.replace("doc", "job"),
            collection_id=collection_id,
            document_id=record.id,
            state=JobState.QUEUED,
            stage="parsing",
            done=0,
            total=2,
            created_ms=1,
        )
        self.records[record.id] = record
        self.jobs[job.id] = job
        return FakeAdded(record, job, deduplicated=False)

    def _record(self, collection_id: str, name: str, content: bytes, sha256: str) -> DocumentRecord:
        document_id = f"doc_{len(self.records) + 1}"
        (Path(self._folder.name) / document_id).write_bytes(content)
        return DocumentRecord(
            id=document_id,
            collection_id=collection_id,
            name=name,
            state=DocumentState.QUEUED,
            media_type="text/plain",
            size_bytes=len(content),
            sha256=sha256,
            parser="text/1",
            pages=2,
            chunks=1,
            characters=len(content.decode(errors="replace")),
            tokens=12,
            created_ms=1,
        )

    def get(self, scope: Scope, document_id: str) -> DocumentRecord:
        record = self.records.get(document_id)
        if record is None or record.collection_id not in scope:
            raise NotFound(f"there is no document {document_id!r}")
        return record

    def health(self) -> SimpleNamespace:
        records, jobs = self.records.values(), self.jobs.values()
        return SimpleNamespace(
            documents=Counter(r.state.value for r in records),
            jobs=Counter(j.state.value for j in jobs),
        )

    def list(self, scope: Scope, *, limit: int = 20, after: str | None = None) -> SimpleNamespace:
        items = [record for record in self.records.values() if record.collection_id in scope]
        if after is not None:
            items = items[items.index(self.get(scope, after)) + 1 :]
        return SimpleNamespace(items=items[:limit], has_more=len(items) > limit)

    def delete(self, scope: Scope, document_id: str) -> None:
        del self.records[self.get(scope, document_id).id]

    def document(self, scope: Scope, document_id: str) -> FakeDocument:
        text = self.content_path(scope, document_id).read_text(errors="replace")
        half = text.find("\n") if "\n" in text else len(text)
        pages = (FakePage(1, "i", 0, half), FakePage(2, "ii", min(half + 1, len(text)), len(text)))
        return FakeDocument(text, pages)

    def content_path(self, scope: Scope, document_id: str) -> Path:
        return Path(self._folder.name) / self.get(scope, document_id).id

    def job(self, scope: Scope, job_id: str) -> JobRecord:
        job = self.jobs.get(job_id)
        if job is None or job.collection_id not in scope:
            raise NotFound(f"there is no job {job_id!r}")
        if not job.state.is_final:
            done = job.done + 1
            state = JobState.DONE if done == job.total else JobState.RUNNING
            self.jobs[job_id] = replace(job, state=state, done=done)
            if state.is_final:
                record = self.records[job.document_id]
                self.records[record.id] = replace(record, state=DocumentState.READY)
        return self.jobs[job_id]

    def cancel(self, scope: Scope, job_id: str) -> None:
        job = self.jobs.get(job_id)
        if job is None:
            raise NotFound(f"there is no job {job_id!r}")
        self.jobs[job_id] = replace(job, state=JobState.CANCELLED)

    def search(
        self,
        scope: Scope,
        query: str,
        *,
        document_ids: Sequence[str] | None = None,
        limit: int = 10,
        mode: SearchMode = SearchMode.HYBRID,
    ) -> Sequence[SearchHit]:
        if not query.strip():
            raise QuestionBlank("the query holds no word")
        for document_id in document_ids or ():
            self.get(scope, document_id)
        return [hit()][:limit]


class World:
    """An app with its fakes."""

    def __init__(self, config: ApiConfig = CONFIG, *, loaded: bool = True) -> None:
        self.library = FakeLibrary()
        self.engine = FakeEngine()
        self.answerer = FakeAnswerer(self.library)
        self.services = Services(config)
        if loaded:
            self.services.provide_library(self.library)
            self.services.provide_engine(self.engine, self.answerer)
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
