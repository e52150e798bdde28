"""How fast passages are found and removed in a large library, embedding of questions excluded.

The library is synthetic: words drawn by Zipf's law, each passage near one of a few hundred points
of the vector space, as the passages of real documents are near their subjects.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ragflash.bench.record import Measurement, Series
from ragflash.rag.corpus import Corpus
from ragflash.rag.database import Database
from ragflash.rag.embed import TokenVectors
from ragflash.rag.files import FileStore
from ragflash.rag.index import BATCH_POINTS, VectorIndex, VectorPoint
from ragflash.rag.library import Library, LibraryConfig
from ragflash.rag.records import DEFAULT_COLLECTION, DocumentRecord, DocumentState, Scope
from ragflash.rag.sparse import analyse
from ragflash.rag.stores import open_store
from ragflash_ingest.document import Chunk, Document, DocumentPage

DIM = 384
CHUNKS_PER_DOCUMENT = 250  # of a manual of a hundred pages

_SCOPE = Scope(frozenset({DEFAULT_COLLECTION}))
_CLUSTERS = 400
_SPREAD = 1.0  # of a cluster, beside the distance of its centre from the origin
_WORDS = 50_000
_ZIPF = 1.1
_CHUNK_WORDS = 170
_QUERY_WORDS = 8
_COMMON_WORDS = 50  # that questions leave out as they do stop words
_DELETED = 5
_REOPENED = 3

Progress = Callable[[str, int, int], None]
Vectors = npt.NDArray[np.float32]


def measure(folder: Path, documents: int, queries: int, progress: Progress) -> Measurement:
    """Fill a library and search it, open it again, and delete some of its documents.

    Args:
        folder: An empty one.
        documents: Of `CHUNKS_PER_DOCUMENT` passages each; more than are deleted.
        queries: Readings of each kind of search.
        progress: Called with what is done, how far it is, and out of how much.
    """
    world = _World.make()
    rates = _fill(folder, world, documents, progress)
    stored_bytes = sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))
    reopened = []
    for _ in range(_REOPENED):
        started = time.perf_counter()
        library = Library.open(LibraryConfig(data_dir=folder), world)
        reopened.append(time.perf_counter() - started)
        library.close()
    library = Library.open(LibraryConfig(data_dir=folder), world)
    try:
        ids = [record.id for record in library.list(_SCOPE, limit=documents).items]
        everywhere = _search(library, world, queries, None, progress)
        in_some = _search(library, world, queries, ids[: max(documents // 100, 1)], progress)
        deleted = [_time_s(partial(library.delete, _SCOPE, id_)) for id_ in ids[:_DELETED]]
    finally:
        library.close()
    return Measurement(
        series={
            "search_ms": Series("ms", everywhere),
            "search_one_percent_ms": Series("ms", in_some),
            "delete_document_s": Series("s", deleted),
            "open_s": Series("s", reopened),
            "store_chunks_per_s": Series("chunks/s", rates),
            "stored_bytes": Series("bytes", [stored_bytes]),
        },
        threads=1,
        parameters={
            "documents": documents,
            "chunks": documents * CHUNKS_PER_DOCUMENT,
            "dimension": DIM,
            "mode": "hybrid",
            "limit": 10,
            "chunk_words": _CHUNK_WORDS,
            "query_words": _QUERY_WORDS,
            "vocabulary": _WORDS,
            "clusters": _CLUSTERS,
        },
    )


@dataclass(frozen=True, eq=False)
class _World:
    """What passages and questions are drawn from; an embedder that looks its vectors up."""

    words: Sequence[str]
    terms: Sequence[tuple[int, ...]]
    shares: npt.NDArray[np.float64]
    centres: Vectors
    random: np.random.Generator
    vectors: dict[str, Vectors]

    fingerprint = "synthetic"
    dim = DIM

    @classmethod
    def make(cls) -> "_World":
        random = np.random.default_rng(0)
        syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
        words = ["".join(random.choice(syllables, size)) for size in random.integers(2, 5, _WORDS)]
        shares = 1 / np.arange(1, _WORDS + 1) ** _ZIPF
        terms = [tuple({term.id for term in analyse(word)}) for word in words]
        centres = random.standard_normal((_CLUSTERS, DIM)).astype(np.float32)
        return cls(words, terms, shares / shares.sum(), centres, random, {})

    def near(self, cluster: int, count: int) -> Vectors:
        noise = self.random.standard_normal((count, DIM)).astype(np.float32)
        vectors: Vectors = self.centres[cluster] + _SPREAD * noise
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors

    def passages(self, count: int) -> Iterator[tuple[str, dict[int, float]]]:
        drawn = self.random.choice(_WORDS, (count, _CHUNK_WORDS), p=self.shares)
        for row in drawn.tolist():
            weights: dict[int, float] = {}
            for word in row:
                for term in self.terms[word]:
                    weights[term] = min(weights.get(term, 0.2) + 0.8, 2.2)
            yield " ".join(self.words[word] for word in row), weights

    def question(self) -> str:
        shares = self.shares[_COMMON_WORDS:] / self.shares[_COMMON_WORDS:].sum()
        drawn = self.random.choice(_WORDS - _COMMON_WORDS, _QUERY_WORDS, p=shares)
        text = " ".join(self.words[_COMMON_WORDS + word] for word in drawn)
        self.vectors[text] = self.near(int(self.random.integers(_CLUSTERS)), 1)[0]
        return text

    def encode_query(self, text: str) -> Vectors:
        return self.vectors[text]

    def trust(self, text: str) -> float:
        return 1.0

    def encode_documents(
        self, texts: Sequence[str], progress: Callable[[int], None] | None = None
    ) -> Vectors:
        raise NotImplementedError("the library is filled without it")

    def encode_tokens(self, texts: Sequence[str]) -> list[TokenVectors]:
        raise NotImplementedError("nothing is answered")


def _fill(folder: Path, world: _World, documents: int, progress: Progress) -> list[float]:
    """Store documents as ingest does, and return the passages stored a second, by document."""
    rates = []
    with ExitStack() as stack:
        files = FileStore(folder)
        database = Database.open(folder / "library.sqlite")
        stack.callback(database.close)
        corpus = Corpus(database)
        corpus.add_collection(DEFAULT_COLLECTION, world.fingerprint, 0)
        index = open_store(folder, None, world, holds_passages=False)
        stack.callback(index.close)
        for number in range(documents):
            progress("storing documents", number, documents)
            seconds = _store(world, number, files, corpus, index)
            rates.append(CHUNKS_PER_DOCUMENT / seconds)
        index.flush()
    progress("storing documents", documents, documents)
    return rates


def _store(
    world: _World, number: int, files: FileStore, corpus: Corpus, index: VectorIndex
) -> float:
    drawn = list(world.passages(CHUNKS_PER_DOCUMENT))
    text = "\n".join(passage for passage, _ in drawn)
    chunks, start = [], 0
    for at, (passage, _) in enumerate(drawn):
        chunks.append(Chunk(at, start, start + len(passage), passage, 1, 1, None))
        start += len(passage) + 1
    page = DocumentPage(1, None, 0, len(text))
    parsed = Document(text, (page,), (), "text/plain", None, (), "synthetic 1")
    digest = sha256(text.encode()).hexdigest()
    record = DocumentRecord(
        id=f"doc_{number:032x}",
        collection_id=DEFAULT_COLLECTION,
        name=f"{number}.txt",
        state=DocumentState.READY,
        media_type="text/plain",
        size_bytes=len(text),
        sha256=digest,
        parser=parsed.parser,
        pages=1,
        chunks=len(chunks),
        characters=len(text),
        tokens=0,
        created_ms=0,
    )
    vectors = world.near(number % _CLUSTERS, len(chunks))
    points = [
        VectorPoint(DEFAULT_COLLECTION, record.id, chunk.index, vector, weights)
        for chunk, vector, (_, weights) in zip(chunks, vectors, drawn, strict=True)
    ]
    frequencies: dict[int, int] = {}
    for _, weights in drawn:
        for term in weights:
            frequencies[term] = frequencies.get(term, 0) + 1
    started = time.perf_counter()
    files.keep(files.stage(text.encode(), len(text) * 4))
    files.write_document(digest, parsed)
    corpus.add(record)
    corpus.put_chunks(record, chunks, frequencies)
    for at in range(0, len(points), BATCH_POINTS):
        index.upsert(points[at : at + BATCH_POINTS])
    return time.perf_counter() - started


def _search(
    library: Library,
    world: _World,
    queries: int,
    document_ids: Sequence[str] | None,
    progress: Progress,
) -> list[float]:
    label = "searching everywhere" if document_ids is None else "searching in some documents"
    readings = []
    for number in range(queries):
        progress(label, number, queries)
        question = world.question()
        find = partial(library.search, _SCOPE, question, document_ids=document_ids)
        readings.append(1000 * _time_s(find))
    progress(label, queries, queries)
    return readings


def _time_s(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
