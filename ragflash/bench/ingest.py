"""How fast a document is read in: pages parsed, passages embedded, all of it, and the disk."""

import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import torch

from ragflash.bench.record import Measurement, Series
from ragflash.errors import DocumentUnreadable
from ragflash.rag.embed import Embedder
from ragflash.rag.library import Library, LibraryConfig
from ragflash.rag.points import EMBED_BATCH, indexed_text
from ragflash.rag.records import DEFAULT_COLLECTION, Scope
from ragflash_ingest.chunk import chunk
from ragflash_ingest.document import Document, ParseError
from ragflash_ingest.pool import ParserPool

Progress = Callable[[str, int, int], None]

_SCOPE = Scope(frozenset({DEFAULT_COLLECTION}))


def measure(
    path: Path, embedder: Embedder, folder: Path, runs: int, progress: Progress
) -> Measurement:
    """Parse a file `runs` times, embed its passages, and read it into a new library.

    Args:
        path: The file.
        embedder: Loaded before anything is timed.
        folder: An empty one, for the library.
        runs: Readings of parsing.
        progress: Called with what is done, how far it is, and out of how much.

    Raises:
        DocumentUnreadable: The file holds nothing to read.
    """
    data = path.read_bytes()
    parse_s, document = _parse(data, path.name, runs, progress)
    texts = [indexed_text(passage) for passage in chunk(document)]
    embed_rates = _embed(embedder, texts, progress)
    progress("reading it into a library", 0, 0)
    library_s, stored_bytes = _read_in(path, embedder, folder)
    return Measurement(
        series={
            "parse_pages_per_s": Series(
                "pages/s", [len(document.pages) / seconds for seconds in parse_s]
            ),
            "embed_chunks_per_s": Series("chunks/s", embed_rates),
            "ingest_s": Series("s", [library_s]),
            "stored_bytes": Series("bytes", [stored_bytes]),
        },
        threads=torch.get_num_threads(),
        parameters={
            "document": path.name,
            "sha256": sha256(data).hexdigest(),
            "bytes": len(data),
            "media_type": document.media_type,
            "pages": len(document.pages),
            "characters": len(document.text),
            "chunks": len(texts),
            "parser_processes": 1,
        },
        embedder=embedder.fingerprint,
    )


def _parse(data: bytes, name: str, runs: int, progress: Progress) -> tuple[list[float], Document]:
    """Seconds from handing a file to a parser process that runs to having all of it back."""
    seconds = []
    with ParserPool(1) as pool:
        try:
            document = pool.parse(data, name)
        except ParseError as error:
            raise DocumentUnreadable(error.reason, f"{name}: {error.detail}") from error
        for run in range(runs):
            progress("parsing", run, runs)
            started = time.perf_counter()
            pool.parse(data, name)
            seconds.append(time.perf_counter() - started)
    progress("parsing", runs, runs)
    return seconds, document


def _embed(embedder: Embedder, texts: list[str], progress: Progress) -> list[float]:
    """Passages a second, in batches as the library makes them; the short last one is left out."""
    embedder.encode_documents(texts[:1])
    rates = []
    batches = max(len(texts) // EMBED_BATCH, 1)
    for number in range(batches):
        progress("embedding", number, batches)
        batch = texts[number * EMBED_BATCH :][:EMBED_BATCH]
        started = time.perf_counter()
        embedder.encode_documents(batch)
        rates.append(len(batch) / (time.perf_counter() - started))
    progress("embedding", batches, batches)
    return rates


def _read_in(path: Path, embedder: Embedder, folder: Path) -> tuple[float, int]:
    library = Library.open(LibraryConfig(data_dir=folder), embedder)
    try:
        started = time.perf_counter()
        added = library.add(_SCOPE, DEFAULT_COLLECTION, path.name, path)
        library.wait(_SCOPE, added.job.id)
        seconds = time.perf_counter() - started
    finally:
        library.close()
    return seconds, sum(file.stat().st_blocks * 512 for file in folder.rglob("*"))
