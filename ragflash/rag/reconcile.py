"""Brings catalogue, vector store and files into line after a crash, or shows where they are not."""

import logging
from dataclasses import dataclass, fields

from ragflash.rag.corpus import Corpus
from ragflash.rag.database import Database
from ragflash.rag.erase import Eraser
from ragflash.rag.files import FileStore
from ragflash.rag.index import VectorIndex
from ragflash.rag.jobs import JobTable, now_ms
from ragflash.rag.records import DocumentRecord, DocumentState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """What was found and put right, or would be.

    Attributes:
        erased: Documents whose deletion had begun.
        orphan_points: Documents that have points and no passages, or no row.
        orphan_files: SHA-256 of originals, or of what was made of them, that no document needs.
        left_overs: Names of files that were half written.
        requeued: Documents to be worked on again, since points, text or their job were missing.
        lost: Documents whose original is gone; nothing is done about them.
    """

    erased: tuple[str, ...]
    orphan_points: tuple[str, ...]
    orphan_files: tuple[str, ...]
    left_overs: tuple[str, ...]
    requeued: tuple[str, ...]
    lost: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """Whether everything was in line."""
        return not any(getattr(self, field.name) for field in fields(self))


class Reconciler:
    """To be run while no job runs and nothing is added; every step may be repeated."""

    def __init__(
        self,
        database: Database,
        corpus: Corpus,
        jobs: JobTable,
        files: FileStore,
        index: VectorIndex,
        eraser: Eraser,
    ) -> None:
        self._db = database
        self._corpus = corpus
        self._jobs = jobs
        self._files = files
        self._index = index
        self._eraser = eraser

    def run(self, *, dry_run: bool = False, count_points: bool = False) -> Reconciliation:
        """Finish deletions, remove what nobody owns, and queue again what is incomplete.

        Args:
            dry_run: Only look.
            count_points: Count every document's points, which takes a query each; otherwise
                only documents without any are noticed.

        Raises:
            StorageError: The disk or the database refused.
            VectorStoreUnavailable: The vector store did.
        """
        erased = self._corpus.tombstones()
        documents = [d for d in self._corpus.all() if d.state is not DocumentState.DELETING]
        begun = {document.id for document in erased}
        indexed = {key for key in self._index.documents() if key[1] not in begun}
        orphans = sorted(indexed - {(d.collection_id, d.id) for d in documents if _has_points(d)})
        again = self._incomplete(documents, {key[1] for key in indexed}, count_points=count_points)
        found = Reconciliation(
            erased=tuple(document.id for document in erased),
            orphan_points=tuple(document_id for _, document_id in orphans),
            orphan_files=tuple(sorted(self._files.digests() - {d.sha256 for d in documents})),
            left_overs=tuple(path.name for path in self._files.left_overs()),
            requeued=tuple(document.id for document, _ in again),
            lost=tuple(d.id for d in documents if not self._files.blob_path(d.sha256).is_file()),
        )
        if dry_run:
            return found
        for document in erased:
            self._eraser.purge(document)
        for collection_id, document_id in orphans:
            self._index.delete_document(collection_id, document_id)
        for document, state in again:
            self._queue(document, state)
        for digest in self._files.digests() - self._corpus.digests():
            self._files.drop(digest)
        self._files.remove_left_overs()
        self._db.shred()
        if not found.is_clean:
            _log.warning("what a crash left is put right", extra=_counts(found))
        return found

    def _incomplete(
        self, documents: list[DocumentRecord], indexed: set[str], *, count_points: bool
    ) -> list[tuple[DocumentRecord, DocumentState]]:
        """Documents that work has to go on with, and the state in which it has to begin."""
        worked_on = self._jobs.open_documents()
        again = []
        for document in documents:
            state = document.state
            if state.is_searchable:
                whole = document.id in indexed
                if whole and count_points:
                    points = self._index.count(document.collection_id, document.id)
                    whole = points == document.chunks
                if not self._files.has_document(document.sha256, document.parser):
                    if self._files.blob_path(document.sha256).is_file():
                        again.append((document, DocumentState.QUEUED))
                elif not whole:
                    again.append((document, DocumentState.EMBEDDING))
            elif state is not DocumentState.FAILED and document.id not in worked_on:
                again.append((document, state))
        return again

    def _queue(self, document: DocumentRecord, state: DocumentState) -> None:
        """Have a document worked on from a state on, as if it had no points yet."""
        self._index.delete_document(document.collection_id, document.id)
        with self._db.transaction():
            self._corpus.reset(document.id, state)
            self._jobs.add(document, now_ms())


def _has_points(document: DocumentRecord) -> bool:
    return document.state.is_searchable or document.state is DocumentState.EMBEDDING


def _counts(found: Reconciliation) -> dict[str, int]:
    return {field.name: len(getattr(found, field.name)) for field in fields(found)}
