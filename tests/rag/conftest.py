"""Stand-ins that make a library fast and deterministic: no model, no child process."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ragflash.rag import index_edge
from ragflash.rag.embed import TokenVectors
from ragflash.rag.library import Library, LibraryConfig
from ragflash.rag.records import DuplicatePolicy, Scope, SearchHit
from ragflash.rag.sparse import analyse
from ragflash_ingest.document import Document, DocumentPage
from ragflash_ingest.pool import ParseCancelled

if TYPE_CHECKING:
    from tests.rag.qdrant_stub import QdrantStub


@pytest.fixture(autouse=True)
def short_log(monkeypatch):
    """Spare every closed library the writing of 50 MB; `test_index_edge` looks into the log."""
    monkeypatch.setattr(index_edge, "_LOG_SEGMENT_BYTES", 1 << 10)


@cache
def direction(term: int, dim: int):
    return np.random.default_rng(term).standard_normal(dim).astype(np.float32)


class HashEmbedder:
    """Each word is a fixed random direction, a text the sum of its words."""

    def __init__(self, dim: int = 64, name: str = "hash") -> None:
        self.dim = dim
        self.fingerprint = f"{name} dim={dim}"
        self.encoded: list[str] = []
        self.before_batch: Callable[[], None] = lambda: None

    def encode_documents(self, texts, progress=None):
        self.before_batch()
        self.encoded += texts
        rows = np.array([self.encode_query(text) for text in texts], np.float32)
        for done in range(1, len(texts) + 1):
            if progress is not None:
                progress(done)
        return rows.reshape(len(texts), self.dim)

    def encode_tokens(self, texts):
        found = []
        for text in texts:
            words = tuple(text.split())
            rows = np.array([self.encode_query(word) for word in words], np.float32)
            found.append(TokenVectors(words, rows.reshape(len(words), self.dim)))
        return found

    def trust(self, text):
        return 1.0

    def encode_query(self, text):
        total = np.zeros(self.dim, np.float32)
        for term in analyse(text):
            total += direction(term.id, self.dim)
        return total / max(float(np.linalg.norm(total)), 1e-6)


class TextParser:
    """UTF-8 text with a form feed between pages; a page that says `unreadable` is missing.

    A parse waits while `gate` is clear, and raises what `fault` holds.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fault: Exception | None = None
        self.parsed: list[str] = []

    def parse(self, source, name, *, progress=None, cancelled=None):
        self.entered.set()
        while not self.gate.wait(0.01):
            if cancelled is not None and cancelled():
                raise ParseCancelled
        self.parsed.append(name)
        if self.fault is not None:
            raise self.fault
        data = source if isinstance(source, bytes) else source.read_bytes()
        pieces, pages, start = data.decode().split("\f"), [], 0
        texts = ["" if piece == "unreadable" else piece for piece in pieces]
        for number, (piece, text) in enumerate(zip(pieces, texts, strict=True), 1):
            error = "broken" if piece == "unreadable" else None
            pages.append(DocumentPage(number, None, start, start + len(text), error=error))
            start += len(text) + 1
            if progress is not None:
                progress("pages", number, len(pieces))
        return Document("\n".join(texts), tuple(pages), (), "text/plain", "utf-8", (), "text 1")

    def close(self):
        pass


@pytest.fixture
def embedder() -> HashEmbedder:
    return HashEmbedder()


@pytest.fixture
def parser() -> TextParser:
    return TextParser()


@pytest.fixture
def open_library(tmp_path: Path, embedder, parser) -> Iterator[Callable[..., Library]]:
    """Opens libraries over one data folder, by default with the stand-ins; closes them all."""
    opened: list[Library] = []

    def open_one(**changes) -> Library:
        config = LibraryConfig(
            tmp_path / "data", max_upload_bytes=changes.pop("max_bytes", 1 << 20)
        )
        chosen = {"parser": parser, **changes}
        library = Library.open(config, chosen.pop("embedder", embedder), **chosen)
        opened.append(library)
        return library

    yield open_one
    for library in opened:
        library.close()


@pytest.fixture
def library(open_library) -> Library:
    return open_library()


@dataclass
class Shelf:
    """A library shared by a module's tests, of which each has a collection of its own."""

    library: Library
    parser: TextParser
    embedder: HashEmbedder
    collection: str = "mine"

    @property
    def scope(self) -> Scope:
        return Scope(frozenset({self.collection}))

    def add(self, text: str, name: str = "a.txt", **options: DuplicatePolicy) -> str:
        """Add a text, wait until the work on it has ended, and return its id."""
        data = text.encode()
        result = self.library.add(self.scope, self.collection, name, data, **options)
        assert self.library.wait(self.scope, result.job.id, 60).state.is_final
        return result.document.id

    def search(self, query: str, **options) -> list[SearchHit]:
        return self.library.search(self.scope, query, **options)


@pytest.fixture
def own_shelf(library, parser, embedder) -> Shelf:
    return Shelf(library, parser, embedder)


@pytest.fixture(scope="module")
def module_shelf(tmp_path_factory) -> Iterator[Shelf]:
    parser, embedder = TextParser(), HashEmbedder()
    config = LibraryConfig(tmp_path_factory.mktemp("library") / "data")
    library = Library.open(config, embedder, parser=parser)
    yield Shelf(library, parser, embedder)
    library.close()


@pytest.fixture
def shelf(module_shelf, request) -> Iterator[Shelf]:
    """A collection of this test's own in the module's library."""
    yield replace(module_shelf, collection=request.node.name)
    module_shelf.parser.fault = None


@pytest.fixture
def add(own_shelf: Shelf) -> Callable[..., str]:
    return own_shelf.add


@pytest.fixture(scope="session")
def qdrant_server(tmp_path_factory) -> "Iterator[QdrantStub]":
    from tests.rag.qdrant_stub import running  # its imports take seconds, and few tests need it

    with running(tmp_path_factory.mktemp("qdrant")) as stub:
        yield stub


@pytest.fixture
def qdrant(qdrant_server: "QdrantStub") -> "Iterator[QdrantStub]":
    """A Qdrant server that is empty and well."""
    yield qdrant_server
    qdrant_server.reset()
