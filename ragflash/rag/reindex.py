"""Embeds a library's documents again, with another model; texts and catalogue stay as they are."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ragflash.rag.corpus import Corpus
from ragflash.rag.database import Database
from ragflash.rag.embed import Embedder
from ragflash.rag.files import FolderLock
from ragflash.rag.index import VectorIndex
from ragflash.rag.move import Report
from ragflash.rag.placement import ServerAddress
from ragflash.rag.points import PointWriter
from ragflash.rag.records import DocumentRecord
from ragflash.rag.stores import drop_former_stores, open_new_store


@dataclass(frozen=True, slots=True)
class ReindexResult:
    """What was done.

    Attributes:
        former: Fingerprints of the models that vectors came from; none when nothing was to be done.
        documents: Now found with the new model.
        passages: Of these.
        embedded: Passages embedded by this run; an earlier one may have embedded the others.
    """

    former: tuple[str, ...]
    documents: int
    passages: int
    embedded: int


def reindex(
    data_dir: Path, server: ServerAddress | None, embedder: Embedder, report: Report
) -> ReindexResult:
    """Give every document vectors of `embedder`; an interrupted run is continued by the next.

    They are made beside those of the former model, which the library uses until every passage has
    been counted in the new store. Documents that are on their way are embedded when they get there.

    Args:
        data_dir: A library's, which nobody has open.
        server: Of the vectors; `None` is the embedded store.
        embedder: The model to change to.
        report: Is told how many passages of how many are done.

    Raises:
        DataFolderLocked: Another process has the folder.
        Conflict: The vectors are in another store than the one configured.
        ModelError: The embedding model is missing or cannot be used.
        StorageError: The disk, the database or the embedded store refused.
        VectorStoreUnavailable: The store failed, or does not hold what it was given.
    """
    with ExitStack() as stack:
        stack.callback(FolderLock.acquire(data_dir).release)
        database = Database.open(data_dir / "library.sqlite")
        stack.callback(database.close)
        corpus = Corpus(database)
        former = tuple(sorted(set(corpus.foreign_fingerprints(embedder.fingerprint).values())))
        documents = [document for document in corpus.all() if document.state.is_searchable]
        passages = sum(document.chunks for document in documents)
        if not former:
            return ReindexResult((), len(documents), passages, 0)
        index = open_new_store(data_dir, server, embedder)
        stack.callback(index.close)
        embedded = _embed_again(corpus, documents, index, embedder, report)
        drop_former_stores(data_dir, server, embedder, former)
        corpus.change_fingerprint(embedder.fingerprint)
    return ReindexResult(former, len(documents), passages, embedded)


def _embed_again(
    corpus: Corpus,
    documents: list[DocumentRecord],
    index: VectorIndex,
    embedder: Embedder,
    report: Report,
) -> int:
    """Store the passages that are not stored yet, and return how many those were."""
    writer = PointWriter(index, embedder)
    total = sum(document.chunks for document in documents)
    for stranger in index.documents() - {(d.collection_id, d.id) for d in documents}:
        index.delete_document(*stranger)
    embedded = before = 0
    for document in documents:
        stored = writer.count(document)
        writer.write(
            document,
            corpus.chunks(document.id),
            stored,
            report=partial(_report_from, report, before, total),
            check=_go_on,
        )
        embedded += document.chunks - stored
        before += document.chunks
    report(total, total)
    return embedded


def _report_from(report: Report, before: int, total: int, done: int, _of_document: int) -> None:
    report(before + done, total)


def _go_on() -> None:
    """Nobody cancels a reindexing but by ending the process."""
