"""Opens the vector store that a library's vectors are in, and no other."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from ragflash.errors import Conflict
from ragflash.rag.embed import Embedder
from ragflash.rag.files import storage_errors
from ragflash.rag.index import VectorIndex
from ragflash.rag.index_edge import QdrantEdgeIndex
from ragflash.rag.placement import Placement, ServerAddress, StoreKind

_WAY_OUT = {
    StoreKind.EMBEDDED: (
        "the vectors of this library are in its data folder, and RAGFLASH_QDRANT_URL names a "
        "server: run `ragflash move-store` to move them there, or unset RAGFLASH_QDRANT_URL"
    ),
    StoreKind.SERVER: (
        "the vectors of this library are on a Qdrant server: set RAGFLASH_QDRANT_URL to it, and "
        "run `ragflash move-store --back` if they are to be in the data folder"
    ),
}


def open_store(
    data_dir: Path, server: ServerAddress | None, embedder: Embedder, *, holds_passages: bool
) -> VectorIndex:
    """Open the configured store; what other stores of this data folder hold is left over.

    Args:
        data_dir: Owned by this process.
        server: Of the vectors; `None` is the embedded store.
        embedder: Names the store and gives the vectors' dimension.
        holds_passages: Whether the catalogue expects vectors in the store.

    Raises:
        Conflict: The vectors are in the other store, or the server has lost them.
        StorageError: The embedded store cannot be opened, or the vectors are of another kind.
        VectorStoreUnavailable: The server does not answer, or refuses.
    """
    placement = _placed(data_dir, server, holds_passages=holds_passages)
    own = placement.folder(data_dir, embedder.fingerprint)
    remove_folders(own.parent, keep=own if server is None else None)
    if server is None:
        return open_embedded(placement, data_dir, embedder)
    return open_server(placement, server, embedder, create=not holds_passages)


def open_new_store(data_dir: Path, server: ServerAddress | None, embedder: Embedder) -> VectorIndex:
    """Open or create the store of another embedding model beside the one in use.

    Raises:
        Conflict: The vectors are in the other kind of store than the one configured.
        StorageError: The embedded store cannot be opened.
        VectorStoreUnavailable: The server does not answer, or refuses.
    """
    placement = _placed(data_dir, server, holds_passages=True)
    if server is None:
        return open_embedded(placement, data_dir, embedder)
    return open_server(placement, server, embedder, create=True)


def drop_former_stores(
    data_dir: Path, server: ServerAddress | None, embedder: Embedder, former: Iterable[str]
) -> None:
    """Remove the stores of models that are used no more, given by their fingerprints."""
    placement = Placement.load(data_dir)
    own = placement.folder(data_dir, embedder.fingerprint)
    remove_folders(own.parent, keep=own if server is None else None)
    if server is not None:
        from ragflash.rag.index_server import drop_collection  # noqa: PLC0415  (as in open_server)

        for fingerprint in former:
            drop_collection(server, placement.collection(fingerprint))


def _placed(data_dir: Path, server: ServerAddress | None, *, holds_passages: bool) -> Placement:
    """Where the vectors are, which has to be what is configured unless there are none."""
    placement = Placement.load(data_dir)
    wanted = StoreKind.EMBEDDED if server is None else StoreKind.SERVER
    if placement.kind is wanted:
        return placement
    if holds_passages:
        raise Conflict(_WAY_OUT[placement.kind])
    return placement.moved(data_dir, wanted)


def open_embedded(placement: Placement, data_dir: Path, embedder: Embedder) -> QdrantEdgeIndex:
    """Open or create the embedded store of an embedding model."""
    return QdrantEdgeIndex.open(placement.folder(data_dir, embedder.fingerprint), embedder.dim)


def open_server(
    placement: Placement, server: ServerAddress, embedder: Embedder, *, create: bool
) -> VectorIndex:
    """Open the server's collection of an embedding model, and create it if that is wanted."""
    from ragflash.rag.index_server import (  # noqa: PLC0415  (its client takes a second to import)
        QdrantServerIndex,
    )

    name = placement.collection(embedder.fingerprint)
    return QdrantServerIndex.open(server, name, embedder.dim, create=create)


def remove_folders(root: Path, *, keep: Path | None) -> None:
    """Remove embedded stores: those of former embedding models, or all, hold nothing any more."""
    with storage_errors("the vector store's folder cannot be used"):
        root.mkdir(mode=0o700, exist_ok=True)
        for folder in root.iterdir():
            if folder != keep:
                shutil.rmtree(folder)
