"""From passages to points: embedded, stored and counted, batch by batch."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from ragflash.errors import ModelError, VectorStoreUnavailable
from ragflash.rag.embed import Embedder
from ragflash.rag.index import VectorIndex, VectorPoint
from ragflash.rag.records import ChunkRecord, DocumentRecord
from ragflash.rag.sparse import document_vector
from ragflash_ingest.document import Chunk

EMBED_BATCH = 64

_log = logging.getLogger(__name__)


class PointWriter:
    """Makes a document's passages findable in one store with one embedding model."""

    def __init__(self, index: VectorIndex, embedder: Embedder) -> None:
        self._index = index
        self._embedder = embedder

    def count(self, document: DocumentRecord) -> int:
        """How many of a document's passages are stored."""
        return self._index.count(document.collection_id, document.id)

    def write(
        self,
        document: DocumentRecord,
        passages: Sequence[ChunkRecord],
        stored: int,
        *,
        report: Callable[[int, int], None],
        check: Callable[[], None],
    ) -> None:
        """Store all passages, beginning with the first batch that is not whole.

        Args:
            document: Whose passages they are.
            passages: All of them, in order.
            stored: What `count` says.
            report: Is told how many passages of how many are done; what it raises ends the work.
            check: Asked before each batch is stored; likewise.

        Raises:
            ModelError: The embedding model does not give a vector of its size for each passage.
            VectorStoreUnavailable: The store refused, or does not hold what it was given.
        """
        whole = stored == len(passages)
        first = stored if whole else stored // EMBED_BATCH * EMBED_BATCH
        complete = self._write(document, passages, first, report, check)
        if not complete and first:
            _log.warning("stored points do not fit the passages", extra={"id": document.id})
            self._index.delete_document(document.collection_id, document.id)
            complete = self._write(document, passages, 0, report, check)
        if not complete:
            held = f"{self.count(document)} of {len(passages)} passages"
            raise VectorStoreUnavailable(f"the vector store holds {held}")

    def _write(
        self,
        document: DocumentRecord,
        passages: Sequence[ChunkRecord],
        first: int,
        report: Callable[[int, int], None],
        check: Callable[[], None],
    ) -> bool:
        """Store passages from `first` on; whether the store counts what it should, each time."""
        total = len(passages)
        report(first, total)
        for start in range(first, total, EMBED_BATCH):
            batch = passages[start : start + EMBED_BATCH]
            points = self.points(document, batch, partial(_report_from, report, start, total))
            check()
            self._index.upsert(points)
            if self.count(document) != start + len(batch):
                return False
        self._index.flush()
        return self.count(document) == total

    def points(
        self,
        document: DocumentRecord,
        passages: Sequence[ChunkRecord],
        progress: Callable[[int], None] | None = None,
    ) -> list[VectorPoint]:
        """Embed passages; `progress` is told how many are done."""
        texts = [indexed_text(passage) for passage in passages]
        vectors = self._embedder.encode_documents(texts, progress)
        if vectors.shape != (len(texts), self._embedder.dim):
            raise ModelError(
                f"the embedding model gave vectors of shape {vectors.shape} for {len(texts)} "
                f"passages, and says that it makes vectors of {self._embedder.dim} numbers"
            )
        owner = (document.collection_id, document.id)
        return [
            VectorPoint(*owner, passage.index, vector, document_vector(text))
            for passage, vector, text in zip(passages, vectors, texts, strict=True)
        ]


def _report_from(
    report: Callable[[int, int], None], start: int, total: int, done_in_batch: int
) -> None:
    report(start + done_in_batch, total)


def indexed_text(passage: Chunk | ChunkRecord) -> str:
    """What is embedded and indexed of a passage: its headings, then its text."""
    return f"{passage.section}\n{passage.text}" if passage.section else passage.text
