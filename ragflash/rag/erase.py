"""Deletion: a tombstone first, then points, caches, files and rows; begun again after a crash."""

from collections.abc import Callable

from ragflash.rag.corpus import Corpus
from ragflash.rag.database import Database
from ragflash.rag.files import FileStore
from ragflash.rag.index import VectorIndex
from ragflash.rag.records import DocumentRecord


class Eraser:
    """Removes documents from everywhere; every step may be repeated."""

    def __init__(
        self,
        database: Database,
        corpus: Corpus,
        files: FileStore,
        index: VectorIndex,
        on_drop: Callable[[str], None] | None,
    ) -> None:
        self._db = database
        self._corpus = corpus
        self._files = files
        self._index = index
        self._on_drop = on_drop

    def purge(self, document: DocumentRecord) -> None:
        """Erase a document that has its tombstone and that nothing works on.

        Bytes that another document has too stay. The row goes last: until then `reconcile`
        finds the tombstone and begins again.
        """
        self._index.delete_document(document.collection_id, document.id)
        if self._on_drop is not None:
            self._on_drop(document.source_id)
        with self._db.transaction():
            if not self._corpus.shares_content(document):
                self._files.drop(document.sha256)
            self._corpus.remove(document.id)
        self._db.shred()
        with self._db.changed:
            self._db.changed.notify_all()

    def drop_unowned(self, digest: str) -> None:
        """Remove files that were stored for a document whose row could not be."""
        with self._db.changed:
            if digest not in self._corpus.digests():
                self._files.drop(digest)
