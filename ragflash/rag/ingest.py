"""From stored bytes to a searchable document: parse, cut, embed, count; resumable, cancellable."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from ragflash.errors import (
    DocumentUnreadable,
    RagflashError,
    UnsupportedMedia,
    VectorStoreUnavailable,
)
from ragflash.rag.corpus import Corpus, ParsedFacts
from ragflash.rag.database import Database
from ragflash.rag.embed import Embedder
from ragflash.rag.erase import Eraser
from ragflash.rag.files import FileStore, storage_errors
from ragflash.rag.index import VectorIndex, VectorPoint
from ragflash.rag.jobs import JobCancelled, JobControl, JobInterrupted, JobTable
from ragflash.rag.records import ChunkRecord, DocumentRecord, DocumentState, JobState
from ragflash.rag.sparse import document_vector
from ragflash_ingest.chunk import chunk
from ragflash_ingest.document import Chunk, Document, FailureReason, ParseError
from ragflash_ingest.pool import ParseCancelled, Progress

EMBED_BATCH = 64
CANCELLED = "cancelled"

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
        count_tokens: Callable[[str], int] | None,
    ) -> None:
        self._db = database
        self._corpus = corpus
        self._jobs = jobs
        self._files = files
        self._index = index
        self._parser = parser
        self._embedder = embedder
        self._eraser = eraser
        self._count_tokens = count_tokens

    def run(self, control: JobControl) -> None:
        """Bring a document as far as it can go and end the job with it.

        Raises:
            JobInterrupted: The library closes; the next run continues.
        """
        document = self._corpus.find(control.job.document_id)
        if document is None or document.state not in _UNFINISHED:
            self._jobs.move(control.job.id, JobState.CANCELLED)
            return
        try:
            control.check()
            if document.state in {DocumentState.QUEUED, DocumentState.PARSING}:
                self._parse(document, control)
            self._embed(document, control)
            self._finish(document, control)
        except JobCancelled:
            self.abandon(document, CANCELLED)
            self._jobs.move(control.job.id, JobState.CANCELLED)
        except RagflashError as error:
            reason = error.reason if isinstance(error, DocumentUnreadable) else error.code
            self.abandon(document, reason)
            self._jobs.move(control.job.id, JobState.FAILED, code=error.code, detail=error.detail)
        except JobInterrupted:
            raise
        except Exception:  # noqa: BLE001  (whatever one document does, the next one gets its turn)
            _log.exception("ingest failed in a way nobody foresaw", extra={"id": document.id})
            self.abandon(document, RagflashError.code)
            detail = "the work stopped at an internal error; the server's log says more"
            self._jobs.move(control.job.id, JobState.FAILED, code=RagflashError.code, detail=detail)

    def abandon(self, document: DocumentRecord, reason: str) -> None:
        """Leave a document as failed, without passages or points."""
        with self._db.transaction():
            self._corpus.move(document.id, DocumentState.FAILED, reason)
            self._corpus.put_chunks(document, [], {})
        self._index.delete_document(document.collection_id, document.id)

    def _parse(self, document: DocumentRecord, control: JobControl) -> None:
        self._corpus.move(document.id, DocumentState.PARSING)
        control.report("parsing", 0, 0)
        parsed = self._read(document, control)
        control.check()
        chunks = chunk(parsed)
        if not chunks:
            raise DocumentUnreadable(
                FailureReason.NO_TEXT, f"{document.name} holds no text that can be read"
            )
        self._files.write_document(document.sha256, parsed)
        tokens = self._count_tokens(parsed.text) if self._count_tokens is not None else 0
        facts = ParsedFacts(
            media_type=parsed.media_type,
            parser=parsed.parser,
            pages=len(parsed.pages),
            characters=len(parsed.text),
            tokens=tokens,
            warnings=_warnings(parsed),
        )
        frequencies = Counter(
            term for passage in chunks for term in document_vector(indexed_text(passage))
        )
        with self._db.transaction():
            self._corpus.put_parsed(document.id, facts)
            self._corpus.put_chunks(document, chunks, frequencies)
            self._corpus.move(document.id, DocumentState.EMBEDDING)

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
        """Embed and store batch by batch, from the first batch that is not stored yet."""
        passages = self._corpus.chunks(document.id)
        total = len(passages)
        stored = self._index.count(document.collection_id, document.id)
        first = stored // EMBED_BATCH * EMBED_BATCH
        control.report("embedding", first, total)
        for start in range(first, total, EMBED_BATCH):
            batch = passages[start : start + EMBED_BATCH]
            progress = partial(self._report_embedding, control, start, total)
            points = self._points(document, batch, progress)
            control.check()
            self._index.upsert(points)
        self._index.flush()
        stored = self._index.count(document.collection_id, document.id)
        if stored != total:
            raise VectorStoreUnavailable(f"the vector store holds {stored} of {total} passages")

    def _points(
        self,
        document: DocumentRecord,
        passages: Sequence[ChunkRecord],
        progress: Callable[[int], None],
    ) -> list[VectorPoint]:
        texts = [indexed_text(passage) for passage in passages]
        vectors = self._embedder.encode_documents(texts, progress)
        if vectors.shape != (len(texts), self._embedder.dim):
            raise VectorStoreUnavailable(
                f"{len(texts)} passages gave vectors of shape {vectors.shape}"
            )
        owner = (document.collection_id, document.id)
        return [
            VectorPoint(*owner, passage.index, vector, document_vector(text))
            for passage, vector, text in zip(passages, vectors, texts, strict=True)
        ]

    @staticmethod
    def _report_embedding(control: JobControl, start: int, total: int, done: int) -> None:
        control.report("embedding", start + done, total)

    def _finish(self, document: DocumentRecord, control: JobControl) -> None:
        """Make the document visible and what it replaces invisible, at once."""
        parsed = self._corpus.find(document.id)
        missing = parsed is not None and any(w.startswith(_PAGE) for w in parsed.warnings)
        replaced = self._corpus.replaced_by(document.id)
        with self._db.transaction():
            control.check()
            self._corpus.move(
                document.id, DocumentState.PARTIAL if missing else DocumentState.READY
            )
            if replaced is not None:
                self._corpus.move(replaced.id, DocumentState.DELETING)
            self._jobs.move(control.job.id, JobState.DONE)
        if replaced is not None:
            self._eraser.purge(replaced)


def indexed_text(passage: Chunk | ChunkRecord) -> str:
    """What is embedded and indexed of a passage: its headings, then its text."""
    return f"{passage.section}\n{passage.text}" if passage.section else passage.text


def _warnings(document: Document) -> tuple[str, ...]:
    missing = tuple(
        f"{_PAGE}{page.number} could not be read: {page.error}"
        for page in document.pages
        if page.error
    )
    return (*missing, *document.warnings)
