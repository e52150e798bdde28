"""Stand-ins that make a library fast and deterministic: no model, no child process."""

import re
import threading
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ragflash.rag.embed import Embedder
from ragflash.rag.library import Library, LibraryConfig
from ragflash.rag.records import Scope
from ragflash.rag.sparse import analyse
from ragflash_ingest.document import Document, DocumentPage, FailureReason, ParseError

MINE = Scope(frozenset({"mine"}))
THEIRS = Scope(frozenset({"theirs"}))


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

    def encode_query(self, text):
        total = np.zeros(self.dim, np.float32)
        for term in analyse(text):
            total += np.random.default_rng(term.id).standard_normal(self.dim).astype(np.float32)
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
                raise ParseError(FailureReason.TOO_SLOW, "cancelled")
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
                progress(number, len(pieces))
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
        config = LibraryConfig(tmp_path / "data", max_upload_bytes=changes.pop("max_bytes", 1 << 20))
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


@pytest.fixture
def add(library: Library) -> Callable[..., str]:
    """Adds a text, waits until it is searchable, and returns its id."""

    def add_one(text: str, name: str = "a.txt", scope: Scope = MINE, collection: str = "mine", **kw):
        result = library.add(scope, collection, name, text.encode(), **kw)
        job = library.wait(scope, result.job.id, 30)
        assert job.state.is_final, job
        return result.document.id

    return add_one
