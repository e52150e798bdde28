"""Puts a library together from its parts, in the order in which they depend on each other."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ragflash import metrics
from ragflash.errors import IndexMismatch
from ragflash.rag.corpus import Corpus
from ragflash.rag.database import Database
from ragflash.rag.embed import Embedder
from ragflash.rag.erase import Eraser
from ragflash.rag.files import FileStore, FolderLock
from ragflash.rag.ingest import DocumentParser, Ingestor
from ragflash.rag.job_worker import JobWorker
from ragflash.rag.jobs import JobTable
from ragflash.rag.lookup import LookupIndexes, TextCutter
from ragflash.rag.measure import measured
from ragflash.rag.placement import ServerAddress
from ragflash.rag.prefill_jobs import Prefills
from ragflash.rag.reconcile import Reconciler
from ragflash.rag.records import JobKind
from ragflash.rag.retrieve import Retriever
from ragflash.rag.stores import open_store
from ragflash_ingest.pool import ParserPool


@dataclass(frozen=True, slots=True)
class LibraryConfig:
    """Where a library lies and what it accepts.

    Attributes:
        parse_timeout_s: Longest time a parser may spend on one document.
        parse_memory_bytes: Memory that one parser process may use.
        server: Of the vectors; `None` keeps them in the data folder.
        lookup: Whether documents get the indexes that drafts are copied from.
    """

    data_dir: Path
    max_upload_bytes: int = 256 << 20
    parse_timeout_s: float = 120.0
    parse_memory_bytes: int = 2 << 30
    server: ServerAddress | None = None
    lookup: bool = True


@dataclass(frozen=True, slots=True)
class Parts:
    """What a library is made of."""

    database: Database
    corpus: Corpus
    jobs: JobTable
    files: FileStore
    eraser: Eraser
    reconciler: Reconciler
    ingestor: Ingestor
    worker: JobWorker
    prefills: Prefills
    retriever: Retriever


def assemble(
    config: LibraryConfig,
    embedder: Embedder,
    stack: ExitStack,
    parser: DocumentParser | None,
    cutter: Callable[[], TextCutter] | None,
    on_drop: Callable[[str], None] | None,
) -> Parts:
    """Take the data folder and open what is in it; `stack` closes it all, last opened first.

    Raises:
        DataFolderLocked: Another process has the folder.
        IndexMismatch: A collection was built with another embedding model.
        Conflict: The vectors are in another store than the one configured.
        StorageError: The disk, the database or the embedded vector store refused.
        VectorStoreUnavailable: The vector server does not answer, or refuses.
    """
    stack.callback(FolderLock.acquire(config.data_dir).release)
    files = FileStore(config.data_dir)
    database = Database.open(config.data_dir / "library.sqlite")
    stack.callback(database.close)
    corpus = Corpus(database)
    check_fingerprint(corpus, embedder.fingerprint)
    index = open_store(
        config.data_dir,
        config.server,
        embedder,
        holds_passages=corpus.total_chunks(None) > 0,
    )
    stack.callback(index.close)
    reader = parser or ParserPool(
        timeout_s=config.parse_timeout_s, memory_bytes=config.parse_memory_bytes
    )
    stack.callback(reader.close)
    jobs = JobTable(database)
    eraser = Eraser(database, corpus, files, index, on_drop)
    reconciler = Reconciler(database, corpus, jobs, files, index, eraser)
    ingestor = Ingestor(
        database=database,
        corpus=corpus,
        jobs=jobs,
        files=files,
        index=index,
        parser=reader,
        embedder=embedder,
        eraser=eraser,
        cutter=cutter,
        lookups=LookupIndexes(files) if config.lookup else None,
    )
    run = measured(ingestor.run, jobs, metrics.INGEST_SECONDS)
    worker = JobWorker(database, jobs, JobKind.INGEST, run, index.tidy)
    prefills = Prefills(database, corpus, jobs)
    retriever = Retriever(corpus, index, embedder)
    return Parts(
        database, corpus, jobs, files, eraser, reconciler, ingestor, worker, prefills, retriever
    )


def check_fingerprint(corpus: Corpus, fingerprint: str) -> None:
    """Raise `IndexMismatch` when another embedding model's vectors are stored."""
    foreign = corpus.foreign_fingerprints(fingerprint)
    if foreign:
        collection_id, other = min(foreign.items())
        raise IndexMismatch(
            f"collection {collection_id!r} was built with the embedding model [{other}], but "
            f"[{fingerprint}] is configured: run `ragflash reindex` to embed all documents again, "
            "or configure the former model again"
        )
    corpus.adopt_fingerprint(fingerprint)
