"""Moves a library's vectors between its folder and a Qdrant server; the catalogue stays."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ragflash.errors import Conflict, VectorStoreUnavailable
from ragflash.rag.assemble import check_fingerprint
from ragflash.rag.corpus import Corpus
from ragflash.rag.database import Database
from ragflash.rag.embed import Embedder
from ragflash.rag.files import FolderLock
from ragflash.rag.index import VectorIndex
from ragflash.rag.placement import Placement, ServerAddress, StoreKind
from ragflash.rag.stores import open_embedded, open_server

Report = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class MoveResult:
    """What a move did.

    Attributes:
        documents: In the store, all told.
        points: In the store, all told.
        copied: Documents copied by this run; an earlier one may have copied the others.
        was_there: The store was the library's already, and nothing was looked at.
    """

    documents: int
    points: int
    copied: int
    was_there: bool = False


def move_points(
    data_dir: Path, server: ServerAddress, embedder: Embedder, to: StoreKind, report: Report
) -> MoveResult:
    """Move all vectors to the store `to`; a run that is interrupted is continued by the next.

    The library keeps using the store that it has until every document's points have been counted in
    the other one; only then is the old store removed.

    Raises:
        DataFolderLocked: Another process has the folder.
        IndexMismatch: The library was built with another embedding model.
        Conflict: The store to be moved holds nothing, and the catalogue says that it should.
        VectorStoreUnavailable: The server does not answer, or refuses; nothing is lost.
    """
    with ExitStack() as stack:
        stack.callback(FolderLock.acquire(data_dir).release)
        database = Database.open(data_dir / "library.sqlite")
        stack.callback(database.close)
        corpus = Corpus(database)
        check_fingerprint(corpus, embedder.fingerprint)
        placement = Placement.load(data_dir)
        embedded = open_embedded(placement, data_dir, embedder)
        stack.callback(embedded.close)
        holds_passages = corpus.total_chunks(None) > 0
        is_source = to is StoreKind.EMBEDDED and placement.kind is not to and holds_passages
        remote = open_server(placement, server, embedder, create=not is_source)
        stack.callback(remote.close)
        source, target = (embedded, remote) if to is StoreKind.SERVER else (remote, embedded)
        result = MoveResult(0, 0, 0, was_there=True)
        if placement.kind is not to:
            if holds_passages and not source.documents():
                raise Conflict(
                    f"the {placement.kind} store holds no vectors, though the catalogue lists "
                    "passages: nothing was moved; see that RAGFLASH_QDRANT_URL is the right server"
                )
            result = copy_points(source, target, report)
            placement.moved(data_dir, to)
        source.destroy()
    return result


def copy_points(source: VectorIndex, target: VectorIndex, report: Report) -> MoveResult:
    """Make the target hold exactly what the source holds, document by document.

    Documents of which the target has the right number of points are left as they are.

    Raises:
        VectorStoreUnavailable: A store failed, or the counts differ at the end.
    """
    owners = sorted(source.documents())
    for stranger in target.documents() - set(owners):
        target.delete_document(*stranger)
    copied = points = 0
    for done, owner in enumerate(owners):
        report(done, len(owners))
        expected = source.count(*owner)
        if target.count(*owner) != expected:
            target.delete_document(*owner)
            for batch in source.points(*owner):
                target.upsert(batch)
            copied += 1
        points += expected
    target.flush()
    for owner in owners:
        expected, found = source.count(*owner), target.count(*owner)
        if found != expected:
            raise VectorStoreUnavailable(
                f"document {owner[1]} has {expected} points, and {found} arrived: run the command "
                "again; nothing was deleted"
            )
    report(len(owners), len(owners))
    return MoveResult(len(owners), points, copied)
