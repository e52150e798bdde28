"""The library: everything that is stored about documents, behind one thread-safe face."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Self
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from ragflash.errors import Conflict, DocumentUnreadable, NotFound, StorageError, UnsafeName
from ragflash.rag.assemble import LibraryConfig, Parts, assemble
from ragflash.rag.embed import Embedder, TokenVectors
from ragflash.rag.files import StagedBlob, storage_errors
from ragflash.rag.ingest import DocumentParser
from ragflash.rag.jobs import now_ms
from ragflash.rag.library_replies import AddResult, LibraryHealth, Page
from ragflash.rag.lookup import LookupIndexes, TextCutter
from ragflash.rag.reconcile import Reconciliation
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
from ragflash.speculative.lookup import SourceIndex
from ragflash_ingest.document import Document, FailureReason
from ragflash_ingest.names import safe_display_name

__all__ = ["AddResult", "Library", "LibraryConfig", "LibraryHealth", "Page"]


class Library:
    """Documents in a folder that this process owns; a background thread does the long work.

    `prefills` has them read beforehand, on another one, once it is started with a model.

    Every method is synchronous and may be called from any thread. What a scope does not hold is
    `NotFound`, in the same words as what does not exist.
    """

    def __init__(
        self, config: LibraryConfig, embedder: Embedder, parts: Parts, closing: ExitStack
    ) -> None:
        """Use `open`."""
        self._config = config
        self._embedder = embedder
        self.trust = embedder.trust  # how far its vectors can be trusted with a text
        self._database = parts.database
        self._corpus = parts.corpus
        self._jobs = parts.jobs
        self._files = parts.files
        self._lookups = LookupIndexes(parts.files)
        self._eraser = parts.eraser
        self._reconciler = parts.reconciler
        self._ingestor = parts.ingestor
        self._worker = parts.worker
        self.prefills = parts.prefills
        self._retriever = parts.retriever
        self._closing = closing

    @classmethod
    def open(
        cls,
        config: LibraryConfig,
        embedder: Embedder,
        *,
        parser: DocumentParser | None = None,
        cutter: Callable[[], TextCutter] | None = None,
        on_drop: Callable[[str], None] | None = None,
    ) -> Self:
        """Take the data folder, finish what a crash interrupted, and start working.

        Args:
            config: Where it lies and its limits.
            embedder: Makes the vectors; another one than a collection was built with is refused.
            parser: Reads files; by default a pool of child processes. The library closes it.
            cutter: Gives what the language model cuts texts with, when it is first wanted.
            on_drop: Told the source id of every document that is erased, perhaps twice.

        Raises:
            DataFolderLocked: Another process has the folder.
            IndexMismatch: A collection was built with another embedding model.
            StorageError: The disk, the database or the vector store refused.
        """
        with ExitStack() as stack:
            parts = assemble(config, embedder, stack, parser, cutter, on_drop)
            parts.reconciler.run()
            stack.callback(parts.worker.close)
            parts.worker.start()
            stack.callback(parts.prefills.close)
            return cls(config, embedder, parts, stack.pop_all())

    @staticmethod
    def reconcile(
        config: LibraryConfig,
        embedder: Embedder,
        *,
        dry_run: bool = False,
        on_drop: Callable[[str], None] | None = None,
    ) -> Reconciliation:
        """Find and, unless `dry_run`, put right what is out of line in a folder nobody has open.

        What is queued again is worked on when a library is opened. `on_drop` and what is raised are
        as in `open`.
        """
        with ExitStack() as stack:
            parts = assemble(config, embedder, stack, None, None, on_drop)
            return parts.reconciler.run(dry_run=dry_run, count_points=True)

    def close(self) -> None:
        """Interrupt the running job (it resumes at the next start) and give the folder up."""
        self._closing.close()

    def add(
        self,
        scope: Scope,
        collection_id: str,
        name: str,
        source: Path | BinaryIO | bytes,
        on_duplicate: DuplicatePolicy = DuplicatePolicy.REUSE,
        *,
        prefill: bool = False,
    ) -> AddResult:
        """Store a document's bytes and queue the work on it; returns before that is done.

        `REUSE` returns the collection's document of the same bytes unless that has failed,
        `REPLACE` makes a new one that takes its place once it is searchable, `KEEP` keeps both.
        But for `KEEP`, bytes that are being worked on are not worked on again; work on them that
        rests after a fault goes on at once. With `prefill` it is read by the model once it is
        searchable, when that has nothing else to do.

        Raises:
            NotFound: The collection is not in scope.
            UnsafeName: The name cannot be shown safely.
            DocumentTooLarge: More bytes than `max_upload_bytes`.
            DocumentUnreadable: No bytes at all.
            StorageError: The source or the disk refused.
        """
        if not collection_id or collection_id not in scope:
            raise NotFound(f"there is no collection {collection_id!r}")
        try:
            label = safe_display_name(name)
        except ValueError as error:
            raise UnsafeName(f"{error}: send another name") from error
        staged = self._files.stage(source, self._config.max_upload_bytes)
        try:
            if not staged.size_bytes:
                raise DocumentUnreadable(FailureReason.EMPTY, f"{label} is empty")
            with self._database.transaction():
                result, failed = self._add_staged(collection_id, label, staged, on_duplicate)
                if prefill:
                    result = replace(result, prefill=self.prefills.queue(result.document))
        except StorageError:
            with suppress(StorageError):  # what then stays, the next start removes
                self._eraser.drop_unowned(staged.sha256)
            raise
        finally:
            self._files.discard(staged)
        if failed is not None:
            self._eraser.purge(failed)
        return result

    def get(self, scope: Scope, document_id: str) -> DocumentRecord:
        """One document's record.

        Raises:
            NotFound: It is not in scope.
        """
        return self._corpus.get(scope, document_id)

    def document(self, scope: Scope, document_id: str) -> Document:
        """A document's text, pages, sections and boxes; the last few are kept in memory.

        Raises:
            NotFound: It is not in scope.
            Conflict: It has not been parsed, or could not be.
        """
        record = self._corpus.get(scope, document_id)
        if not record.parser:
            raise Conflict(f"document {document_id!r} is {record.state}: there is no text yet")
        try:
            return self._files.read_document(record.sha256, record.parser)
        except StorageError:
            self._corpus.get(scope, document_id)  # deleted meanwhile: that is not a fault
            raise

    def lookup_index(
        self, record: DocumentRecord, document: Document, cutter: TextCutter
    ) -> SourceIndex | None:
        """What drafts are copied from a document with; see `LookupIndexes.open`."""
        return self._lookups.open(record.sha256, document.parser, document.text, cutter)

    def chunks(self, scope: Scope, document_id: str) -> list[ChunkRecord]:
        """A document's passages in order; none before it is parsed.

        Raises:
            NotFound: It is not in scope.
        """
        return self._corpus.chunks(self._corpus.get(scope, document_id).id)

    def content_path(self, scope: Scope, document_id: str) -> Path:
        """Where the original bytes lie; to be read, not changed.

        Raises:
            NotFound: It is not in scope.
        """
        return self._files.blob_path(self._corpus.get(scope, document_id).sha256)

    def delete(self, scope: Scope, document_id: str) -> None:
        """Erase a document in any state; when this returns, nothing of it can be found.

        A failure on the way leaves it hidden; the next deletion of it, job or start goes on.

        Raises:
            NotFound: It is not in scope.
        """
        with self._database.transaction():
            document = self._corpus.get(scope, document_id, even_deleting=True)
            self._corpus.move(document.id, DocumentState.DELETING)
            self._jobs.cancel_all(document.id)
        self._worker.leave(document.id)
        self.prefills.leave(document.id)
        self._eraser.purge(document)

    def prefill(self, scope: Scope, document_id: str) -> JobRecord:
        """Queue the reading of a document by the model; see `Prefills.add`."""
        return self.prefills.add(scope, document_id)

    def search(
        self,
        scope: Scope,
        query: str,
        *,
        document_ids: Sequence[str] | None = None,
        limit: int = 10,
        mode: SearchMode = SearchMode.HYBRID,
    ) -> list[SearchHit]:
        """Find passages, best first, in all of the scope or in the documents named.

        Raises:
            QuestionBlank: The query holds no word.
            NotFound: A document named is not in scope.
        """
        return self._retriever.search(
            scope, query, document_ids=document_ids, limit=limit, mode=mode
        )

    def embed_texts(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Embed texts as unit rows float32 [len(texts), dim]."""
        return self._embedder.encode_documents(texts)

    def embed_tokens(self, texts: Sequence[str]) -> list[TokenVectors]:
        """Embed short texts token by token."""
        return self._embedder.encode_tokens(texts)

    def term_weights(self, text: str) -> dict[int, float]:
        """Terms of a text, stop words left out, weighed by how rare they are in the library."""
        return self._retriever.term_weights(text)

    def job(self, scope: Scope, job_id: str) -> JobRecord:
        """One job.

        Raises:
            NotFound: It is not in scope, or went with its document.
        """
        return self._jobs.get(scope, job_id)

    def wait(self, scope: Scope, job_id: str, timeout_s: float | None = None) -> JobRecord:
        """Block until a job is final, or time is over, and return it as it then is."""
        return self._jobs.wait(scope, job_id, timeout_s)

    def watch(self, scope: Scope, job_id: str) -> Iterator[JobRecord]:
        """Yield a job as it is and after every change until it is final; blocks in between."""
        return self._jobs.watch(scope, job_id)

    def cancel(self, scope: Scope, job_id: str) -> JobRecord:
        """Ask a job to end; one that waits ends at once, one that runs between two batches."""
        with self._database.transaction():
            job = self._jobs.get(scope, job_id)
            self._jobs.ask_to_cancel(job.id)
            if job.kind is JobKind.PREFILL:
                self.prefills.cancel(job)
                return self._jobs.get(scope, job_id)
            is_waiting = job.state is JobState.QUEUED  # perhaps put off by who holds it still
            if is_waiting or not (job.state.is_final or self._worker.cancel(job.document_id)):
                document = self._corpus.find(job.document_id)
                if document is not None:
                    self._ingestor.cancel(document, job.id)
        return self._jobs.get(scope, job_id)

    def health(self) -> LibraryHealth:
        """How the library is doing, over all collections."""
        with storage_errors("the data folder cannot be read"):
            free = shutil.disk_usage(self._config.data_dir).free
        return LibraryHealth(
            documents=self._corpus.count_by_state(),
            jobs=self._jobs.count_by_state(),
            chunks=self._corpus.total_chunks(None),
            open_jobs=self._jobs.count_open(),
            worker_alive=self._worker.is_alive,
            embedding=self._embedder.fingerprint,
            free_bytes=free,
        )

    def list(
        self,
        scope: Scope,
        *,
        limit: int = 100,
        after: str | None = None,
        state: DocumentState | None = None,
        name_contains: str | None = None,
    ) -> Page:
        """Documents, newest first, from behind the document `after`.

        Raises:
            NotFound: `after` is not in scope.
        """
        found = self._corpus.page(
            scope, limit=limit + 1, after=after, state=state, name_contains=name_contains
        )
        return Page(tuple(found[:limit]), len(found) > limit)

    def _add_staged(
        self, collection_id: str, name: str, staged: StagedBlob, policy: DuplicatePolicy
    ) -> tuple[AddResult, DocumentRecord | None]:
        """Decide and insert, in one transaction, so that the same bytes sent twice meet once.

        Returns:
            The result, and a failed document of the same bytes that is now to be purged.
        """
        twin = None
        if policy is not DuplicatePolicy.KEEP:
            twin = self._corpus.find_content(collection_id, staged.sha256)
        if twin is not None and self._jobs.is_cancelling(twin.id):
            twin = None  # it ends as failed, whoever else wants these bytes
        failed = twin if twin is not None and twin.state is DocumentState.FAILED else None
        if twin is not None and failed is None and _is_wanted(twin, policy):
            self._corpus.add_alias(twin, name)
            self._jobs.hurry(twin.id)
            return AddResult(twin, self._jobs.of_document(twin.id), True), None
        if failed is not None:
            self._corpus.move(failed.id, DocumentState.DELETING)
        document = _new_record(collection_id, name, staged)
        fingerprint = self._embedder.fingerprint
        self._corpus.add_collection(collection_id, fingerprint, document.created_ms)
        replaces = twin.id if twin is not None and failed is None else None
        self._corpus.add(document, replaces)
        job = self._jobs.add(document, document.created_ms)
        self._files.keep(staged)
        return AddResult(document, job, False), failed


def _is_wanted(twin: DocumentRecord, policy: DuplicatePolicy) -> bool:
    """Whether a document of the same bytes will do; one that is on its way always does."""
    return policy is DuplicatePolicy.REUSE or not twin.state.is_searchable


def _new_record(collection_id: str, name: str, staged: StagedBlob) -> DocumentRecord:
    return DocumentRecord(
        id=f"doc_{uuid4().hex}",
        collection_id=collection_id,
        name=name,
        state=DocumentState.QUEUED,
        media_type="application/octet-stream",
        size_bytes=staged.size_bytes,
        sha256=staged.sha256,
        parser="",
        pages=0,
        chunks=0,
        characters=0,
        tokens=0,
        created_ms=now_ms(),
    )
