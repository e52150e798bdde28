"""A library without an index."""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

from ragflash.errors import NotFound, QuestionBlank, RagflashError, UnsafeName
from ragflash.rag.records import (
    ChunkRecord,
    DocumentRecord,
    DocumentState,
    DuplicatePolicy,
    JobKind,
    JobRecord,
    JobState,
    Scope,
    SearchHit,
    SearchMode,
)

TEXT = "Records are kept for seven years. They are then destroyed."


def hit() -> SearchHit:
    chunk = ChunkRecord("doc_1", 0, 0, len(TEXT), TEXT, 1, 1, "Keeping")
    return SearchHit(chunk, "law.txt", 0.03, 0.8, 4.2, exact=False)


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
    prefill: JobRecord | None = None


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
        *,
        prefill: bool = False,
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
        read = self.prefill(scope, record.id) if prefill else None
        return FakeAdded(record, job, False, read)

    def prefill(self, scope: Scope, document_id: str) -> JobRecord:
        record = self.get(scope, document_id)
        name = f"read_{record.id}"
        job = JobRecord(
            name, record.collection_id, record.id, JobState.QUEUED, "", 0, 3, 1,
            kind=JobKind.PREFILL,
        )  # fmt: skip
        return self.jobs.setdefault(name, job)

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
