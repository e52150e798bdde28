"""From stored bytes to a searchable document: parse, cut, embed, count; resumable, cancellable."""

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from ragflash.errors import (
    DocumentUnreadable,
    RagflashError,
    StorageError,
    UnsupportedMedia,
    UpstreamError,
)
from ragflash.rag.corpus import Corpus, ParsedFacts
from ragflash.rag.database import Database
from ragflash.rag.embed import Embedder
from ragflash.rag.erase import Eraser
from ragflash.rag.files import FileStore, storage_errors
from ragflash.rag.index import VectorIndex
from ragflash.rag.job_worker import JobControl
from ragflash.rag.jobs import MAX_ATTEMPTS, JobCancelled, JobInterrupted, JobTable
from ragflash.rag.lookup import LookupIndexes, TextCutter
from ragflash.rag.points import PointWriter, indexed_text
from ragflash.rag.records import DocumentRecord, DocumentState, JobState
from ragflash.rag.sparse import document_vector
from ragflash_ingest.chunk import chunk
from ragflash_ingest.document import Document, FailureReason, ParseError
from ragflash_ingest.pool import ParseCancelled, Progress

CANCELLED = "cancelled"
RETRY_PAUSES_S = (5.0, 30.0, 120.0, 600.0, 1800.0)
"""How long work rests after faults in a row that are not the document's; then it fails."""

_UNFINISHED = {DocumentState.QUEUED, DocumentState.PARSING, DocumentState.EMBEDDING}
_PAGE = "page "

_log = logging.getLogger(__name__)


class DocumentParser(Protocol):
    """What reads files; the pool of child processes, or a stand-in inside this one."""

    def parse(
        self,
        source: Path | bytes,
        name: str,
        *,
        progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Document:
        """Read a file; `progress` gets stage, done and total, `cancelled` is asked meanwhile.

        Raises:
            ParseError: It cannot be read.
            ParseCancelled: `cancelled` said so.
        """

    def close(self) -> None:
        """End what the parser started."""


class Ingestor:
    """Runs one job on one document; every method is called on the job thread or before it."""

    def __init__(
        self,
        *,
        database: Database,
        corpus: Corpus,
        jobs: JobTable,
        files: FileStore,
        index: VectorIndex,
        parser: DocumentParser,
        embedder: Embedder,
        eraser: Eraser,
        cutter: Callable[[], TextCutter] | None,
        lookups: LookupIndexes | None,
    ) -> None:
        self._db = database
        self._corpus = corpus
        self._jobs = jobs
        self._files = files
        self._index = index
        self._writer = PointWriter(index, embedder)
        self._parser = parser
        self._eraser = eraser
        self._cutter = cutter
        self._lookups = lookups

    def run(self, control: JobControl) -> None:
        """Bring a document as far as it can go and end the job with it.

        Raises:
            JobInterrupted: The library closes; the next run continues.
        """
        document = self._corpus.find(control.job.document_id)
        if document is None or document.state not in _UNFINISHED:
            self._jobs.move(control.job.id, JobState.CANCELLED)
            return
        job_id = control.job.id
        if control.attempts > MAX_ATTEMPTS:
            self._give_up(document, control)
            return
        try:
            control.check()
            self._work(document, control)
        except JobCancelled:
            self.cancel(document, job_id)
        except RagflashError as error:
            reason = error.reason if isinstance(error, DocumentUnreadable) else error.code
            tried = f" (tried {control.faults + 1} times)" if control.faults else ""
            self._fail(document, job_id, reason, error.code, error.detail + tried)
        except JobInterrupted:
            raise
        except Exception:  # noqa: BLE001  (whatever one document does, the next one gets its turn)
            _log.exception("ingest failed in a way nobody foresaw", extra={"id": document.id})
            detail = "the work stopped at an internal error; the server's log says more"
            self._fail(document, job_id, RagflashError.code, RagflashError.code, detail)

    def _work(self, document: DocumentRecord, control: JobControl) -> None:
        """Do what is left; a fault of the disk or of a service puts the job off."""
        try:
            if document.reason is not None:
                self._corpus.note(document.id, None)
            if document.state in {DocumentState.QUEUED, DocumentState.PARSING}:
                self._parse(document, control)
            self._embed(document, control)
            self._finish(document, control)
        except (StorageError, UpstreamError) as error:
            if control.faults >= len(RETRY_PAUSES_S):
                raise
            pause_s = RETRY_PAUSES_S[control.faults]
            with self._db.transaction():
                control.check()
                if control.put_off(pause_s, error):
                    self._corpus.note(document.id, error.code)
            fields = {"id": document.id, "code": error.code, "pause_s": pause_s}
            _log.warning("work on a document rests after a fault", extra=fields)

    def cancel(self, document: DocumentRecord, job_id: str) -> None:
        """End a job that is not wanted any more, and its document with it."""
        self._end(document, job_id, JobState.CANCELLED, CANCELLED)

    def _give_up(self, document: DocumentRecord, control: JobControl) -> None:
        stage = control.job.stage or "queued"
        detail = (
            f"the process ended {MAX_ATTEMPTS} times while it worked on {document.name} "
            f"(stage {stage}), so it is not tried again: send the file again to retry"
        )
        _log.error("a document that the process dies of is given up", extra={"id": document.id})
        self._fail(document, control.job.id, FailureReason.CRASHED, RagflashError.code, detail)

    def _fail(
        self, document: DocumentRecord, job_id: str, reason: str, code: str, detail: str
    ) -> None:
        self._end(document, job_id, JobState.FAILED, reason, code, detail)

    def _end(
        self,
        document: DocumentRecord,
        job_id: str,
        state: JobState,
        reason: str,
        code: str | None = None,
        detail: str | None = None,
    ) -> None:
        """Leave a document as failed, without passages or points, and its job with it."""
        with self._db.transaction():
            self._jobs.move(job_id, state, code=code, detail=detail)
            self._jobs.cancel_all(document.id)
            if not self._corpus.move(document.id, DocumentState.FAILED, reason):
                return
            self._corpus.put_chunks(document, [], {})
        try:
            self._index.delete_document(document.collection_id, document.id)
        except RagflashError:
            # Nothing finds them, and the next start, or `reconcile`, removes them.
            _log.warning("points of a failed document stay", extra={"id": document.id})

    def _parse(self, document: DocumentRecord, control: JobControl) -> None:
        self._corpus.move(document.id, DocumentState.PARSING)
        control.report("parsing", 0, 0)
        parsed = self._read(document, control)
        chunks = chunk(parsed, check=control.check)
        if not chunks:
            raise DocumentUnreadable(
                FailureReason.NO_TEXT, f"{document.name} holds no text that can be read"
            )
        self._files.write_document(document.sha256, parsed)
        facts = ParsedFacts(
            media_type=parsed.media_type,
            parser=parsed.parser,
            pages=len(parsed.pages),
            characters=len(parsed.text),
            tokens=self._cut(document.sha256, parsed),
            warnings=_warnings(parsed),
        )
        frequencies: Counter[int] = Counter()
        for passage in chunks:
            control.check()
            frequencies.update(document_vector(indexed_text(passage)).keys())
        with self._db.transaction():
            self._corpus.put_parsed(document.id, facts)
            self._corpus.put_chunks(document, chunks, frequencies)
            self._corpus.move(document.id, DocumentState.EMBEDDING)

    def _cut(self, digest: str, parsed: Document) -> int:
        """Cut a text into tokens and index them; return how many, 0 where there is no model."""
        if self._cutter is None:
            return 0
        cutter = self._cutter()
        token_ids = cutter.encode(parsed.text)
        if self._lookups is not None:
            named = digest, parsed.parser, parsed.text
            self._lookups.make(*named, token_ids, cutter.fingerprint)
        return len(token_ids)

    def _read(self, document: DocumentRecord, control: JobControl) -> Document:
        def report(_: str, done: int, total: int) -> None:
            control.report("parsing", done, total)

        try:
            with storage_errors("the original cannot be parsed"):
                return self._parser.parse(
                    self._files.blob_path(document.sha256),
                    document.name,
                    progress=report,
                    cancelled=control.is_ending,
                )
        except ParseCancelled as cancelled:
            control.check()
            raise JobInterrupted from cancelled
        except ParseError as error:
            if error.reason is FailureReason.UNSUPPORTED_TYPE:
                raise UnsupportedMedia(error.detail) from error
            raise DocumentUnreadable(error.reason, error.detail) from error

    def _embed(self, document: DocumentRecord, control: JobControl) -> None:
        stored = self._writer.count(document)
        control.advance(1 + stored)
        self._writer.write(
            document,
            self._corpus.chunks(document.id),
            stored,
            report=partial(control.report, "embedding"),
            check=control.check,
        )

    def _finish(self, document: DocumentRecord, control: JobControl) -> None:
        """Make the document visible and what it replaces invisible, at once."""
        parsed = self._corpus.find(document.id)
        missing = parsed is not None and any(w.startswith(_PAGE) for w in parsed.warnings)
        replaced = self._corpus.replaced_by(document.id)
        with self._db.transaction():
            control.hold()
            self._corpus.move(
                document.id, DocumentState.PARTIAL if missing else DocumentState.READY
            )
            if replaced is not None:
                self._corpus.move(replaced.id, DocumentState.DELETING)
            self._jobs.move(control.job.id, JobState.DONE)
            tombstones = self._corpus.tombstones()  # also of what could not be erased before
        for tombstone in tombstones:
            try:
                self._eraser.purge(tombstone)
            except RagflashError:
                # Nothing finds it, and the next job or the next start goes on.
                _log.warning("a document is not erased yet", extra={"id": tombstone.id})


def _warnings(document: Document) -> tuple[str, ...]:
    missing = tuple(
        f"{_PAGE}{page.number} could not be read: {page.error}"
        for page in document.pages
        if page.error
    )
    return (*missing, *document.warnings)
