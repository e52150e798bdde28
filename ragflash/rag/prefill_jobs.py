"""Jobs that have documents read beforehand: one at a time, on a thread of their own."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from ragflash import metrics
from ragflash.engine.request import Finished, PrefillProgress
from ragflash.errors import NotFound, RagflashError
from ragflash.rag.corpus import Corpus
from ragflash.rag.database import Database
from ragflash.rag.ingest import RETRY_PAUSES_S
from ragflash.rag.job_worker import JobControl, JobWorker
from ragflash.rag.jobs import MAX_ATTEMPTS, JobCancelled, JobInterrupted, JobTable, now_ms
from ragflash.rag.measure import measured
from ragflash.rag.records import DocumentRecord, JobKind, JobRecord, JobState, Scope

_CHECK_EVERY_S = 0.2  # for an end that somebody asked for, while the engine has other work

_log = logging.getLogger(__name__)


class DocumentReader(Protocol):
    """The model, as far as reading goes; see `EngineReader`."""

    def check(self, document: DocumentRecord) -> None:
        """Raise if a question about the whole document cannot be asked."""

    def read(self, document: DocumentRecord) -> AsyncGenerator[PrefillProgress | Finished, None]:
        """Read it, and yield how far that is."""


class Prefills:
    """The jobs; they wait in the catalogue until there is a model to read with."""

    def __init__(self, database: Database, corpus: Corpus, jobs: JobTable) -> None:
        self._db = database
        self._corpus = corpus
        self._jobs = jobs
        self._reader: DocumentReader | None = None
        run = measured(self._run, jobs, metrics.PREFILL_SECONDS)
        self._worker = JobWorker(database, jobs, JobKind.PREFILL, run)

    def start(self, reader: DocumentReader) -> None:
        """Begin with what waits, or go on with another model from the next job on.

        `close` is to be called before the last model goes.
        """
        is_first, self._reader = self._reader is None, reader
        if is_first:
            self._worker.start()

    def close(self) -> None:
        """Interrupt the running job, which begins anew at the next start, and end the thread."""
        self._worker.close()

    def add(self, scope: Scope, document_id: str) -> JobRecord:
        """Queue the reading of a document; the job that waits or runs already, if there is one.

        Raises:
            NotFound: The document is outside the scope, or cannot be asked yet.
            ContextTooLong: It does not fit the model, if that is known already.
        """
        document = self._corpus.get(scope, document_id)
        if not document.state.is_searchable:
            raise NotFound(f"document {document.id} is {document.state} and cannot be read yet")
        if self._reader is not None:
            self._reader.check(document)
        with self._db.transaction():
            return self.queue(self._corpus.get(scope, document_id))

    def queue(self, document: DocumentRecord) -> JobRecord:
        """Queue the reading of a document, which waits until it can be asked; in a transaction."""
        found = self._jobs.open_of(document.id, JobKind.PREFILL)
        return found or self._jobs.add(document, now_ms(), JobKind.PREFILL)

    def cancel(self, job: JobRecord) -> None:
        """End a job; one that runs ends soon. In a transaction."""
        is_waiting = job.state is JobState.QUEUED
        if is_waiting or not (job.state.is_final or self._worker.cancel(job.document_id)):
            self._jobs.move(job.id, JobState.CANCELLED)

    def leave(self, document_id: str) -> None:
        """Cancel the job on a document, if one runs, and wait until its hands are off."""
        self._worker.leave(document_id)

    def _run(self, control: JobControl) -> None:
        """Read a document and end the job with it.

        Raises:
            JobInterrupted: The library closes; the next run begins anew.
        """
        job = control.job
        document = self._corpus.find(job.document_id)
        if document is None or not document.state.is_searchable:
            self._jobs.move(job.id, JobState.CANCELLED)
            return
        if control.attempts > MAX_ATTEMPTS:
            detail = f"the process ended {MAX_ATTEMPTS} times while {document.name} was read"
            self._jobs.move(job.id, JobState.FAILED, code=RagflashError.code, detail=detail)
            return
        try:
            control.check()
            asyncio.run(self._read(document, control))
            self._jobs.move(job.id, JobState.DONE)
        except JobCancelled:
            self._jobs.move(job.id, JobState.CANCELLED)
        except JobInterrupted:
            raise
        except RagflashError as error:
            self._put_off_or_fail(control, error)
        except Exception:  # noqa: BLE001  (whatever one document does, the next one gets its turn)
            _log.exception("a document was not read", extra={"id": document.id})
            detail = "the work stopped at an internal error; the server's log says more"
            self._jobs.move(job.id, JobState.FAILED, code=RagflashError.code, detail=detail)

    def _put_off_or_fail(self, control: JobControl, error: RagflashError) -> None:
        if error.retryable and control.faults < len(RETRY_PAUSES_S):
            control.put_off(RETRY_PAUSES_S[control.faults], error)
            return
        self._jobs.move(control.job.id, JobState.FAILED, code=error.code, detail=error.detail)

    async def _read(self, document: DocumentRecord, control: JobControl) -> None:
        """Follow the reading, and end it when the job should end."""
        reading = asyncio.create_task(self._follow(document, control))
        try:
            while not reading.done():
                await asyncio.wait({reading}, timeout=_CHECK_EVERY_S)
                if not reading.done():
                    control.check()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        reading.result()

    async def _follow(self, document: DocumentRecord, control: JobControl) -> None:
        assert self._reader is not None
        control.report("reading", 0, document.tokens)
        async with aclosing(self._reader.read(document)) as events:
            async for event in events:
                if isinstance(event, PrefillProgress):
                    control.report("reading", event.done, event.total)
