"""Puts a library together from its parts, in the order in which they depend on each other."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from ragflash.errors import IndexMismatch
from ragflash.rag.corpus import Corpus
from ragflash.rag.database import Database
from ragflash.rag.embed import Embedder
from ragflash.rag.erase import Eraser
from ragflash.rag.files import FileStore, FolderLock, storage_errors
from ragflash.rag.index_edge import QdrantEdgeIndex
from ragflash.rag.ingest import DocumentParser, Ingestor
from ragflash.rag.jobs import JobTable, JobWorker
from ragflash.rag.retrieve import Retriever
from ragflash_ingest.pool import ParserPool


@dataclass(frozen=True, slots=True)
class LibraryConfig:
    """Where a library lies and what it accepts.

    Attributes:
        parse_timeout_s: Longest time a parser may spend on one document.
        parse_memory_bytes: Memory that one parser process may use.
    """

    data_dir: Path
    max_upload_bytes: int = 256 << 20
    parse_timeout_s: float = 120.0
    parse_memory_bytes: int = 2 << 30


@dataclass(frozen=True, slots=True)
class Parts:
    """What a library is made of."""

    database: Database
    corpus: Corpus
    jobs: JobTable
    files: FileStore
    eraser: Eraser
    ingestor: Ingestor
    worker: JobWorker
    retriever: Retriever


def assemble(
    config: LibraryConfig,
    embedder: Embedder,
    stack: ExitStack,
    parser: DocumentParser | None,
    count_tokens: Callable[[str], int] | None,
    on_drop: Callable[[str], None] | None,
) -> Parts:
    """Take the data folder and open what is in it; `stack` closes it all, last opened first.

    Raises:
        DataFolderLocked: Another process has the folder.
        IndexMismatch: A collection was built with another embedding model.
        StorageError: The disk, the database or the vector store refused.
    """
    stack.callback(FolderLock.acquire(config.data_dir).release)
    files = FileStore(config.data_dir)
    database = Database.open(config.data_dir / "library.sqlite")
    stack.callback(database.close)
    corpus = Corpus(database)
    _check_fingerprint(corpus, embedder.fingerprint)
    index = _open_index(config.data_dir, embedder)
    stack.callback(index.close)
    reader = parser or ParserPool(
        timeout_s=config.parse_timeout_s, memory_bytes=config.parse_memory_bytes
    )
    stack.callback(reader.close)
    jobs = JobTable(database)
    eraser = Eraser(database, corpus, files, index, on_drop)
    ingestor = Ingestor(
        database=database,
        corpus=corpus,
        jobs=jobs,
        files=files,
        index=index,
        parser=reader,
        embedder=embedder,
        eraser=eraser,
        count_tokens=count_tokens,
    )
    worker = JobWorker(database, jobs, ingestor.run)
    retriever = Retriever(corpus, index, embedder)
    return Parts(database, corpus, jobs, files, eraser, ingestor, worker, retriever)


def _check_fingerprint(corpus: Corpus, fingerprint: str) -> None:
    foreign = corpus.foreign_fingerprints(fingerprint)
    if foreign:
        collection_id, other = min(foreign.items())
        raise IndexMismatch(
            f"collection {collection_id!r} was built with the embedding model [{other}], but "
            f"[{fingerprint}] is configured: configure the former again, or choose another data "
            "folder and add the documents there"
        )
    corpus.adopt_fingerprint(fingerprint)


def _open_index(data_dir: Path, embedder: Embedder) -> QdrantEdgeIndex:
    """Open the store of this embedding model; those of others hold nothing any more."""
    root = data_dir / "index"
    own = root / sha256(embedder.fingerprint.encode()).hexdigest()[:16]
    with storage_errors("the vector store's folder cannot be used"):
        root.mkdir(mode=0o700, exist_ok=True)
        for folder in root.iterdir():
            if folder != own:
                shutil.rmtree(folder)
    return QdrantEdgeIndex.open(own, embedder.dim)
