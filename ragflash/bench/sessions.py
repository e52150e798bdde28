"""What files of read documents are worth, what they cost, and how fast they are read."""

import asyncio
import errno
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ragflash.bench.filler import Filler
from ragflash.bench.record import LEAST_PAIRS, Measurement, Series, paired
from ragflash.engine.cache import CacheTier
from ragflash.engine.client import EngineClient
from ragflash.engine.request import DraftMode, Finished, GenerateRequest
from ragflash.errors import EngineError
from ragflash.kvcache.archive import (
    ArchivedItem,
    ArchiveHit,
    FileMiss,
    FileMissReason,
    Landing,
    SegmentArchive,
    SegmentCopy,
)
from ragflash.kvcache.identity import Identity
from ragflash.sessions import FolderArchive, SessionFolder, SessionLimits

_BLOCK_BYTES = 4 << 20
_QUESTION_TOKENS = 12
_MANY_BYTES = 1 << 50
# A restore may take this: the file's bytes at 0.8 of the rate of a plain read, and so much more.
_READ_SHARE, _MORE_MS = 0.8, 300.0

Progress = Callable[[str, int, int], None]


class Switch(SegmentArchive):
    """An archive that can be off: then it has nothing and takes nothing, like none at all."""

    def __init__(self, archive: SegmentArchive) -> None:
        self.is_on = True
        self._archive = archive

    def find(
        self, segments: Sequence[tuple[int, ...]], *, identity: Identity, namespace: str
    ) -> ArchiveHit | FileMiss:
        """See `SegmentArchive`."""
        if not self.is_on:
            return FileMiss(FileMissReason.NONE_STORED)
        return self._archive.find(segments, identity=identity, namespace=namespace)

    def read(self, targets: Iterable[tuple[ArchivedItem, Landing]]) -> FileMiss | None:
        """See `SegmentArchive`."""
        return self._archive.read(targets)

    def missing(
        self, segments: Sequence[tuple[int, ...]], *, identity: Identity, namespace: str
    ) -> tuple[int, ...]:
        """See `SegmentArchive`."""
        if not self.is_on:
            return ()
        return self._archive.missing(segments, identity=identity, namespace=namespace)

    def save(self, num_bytes: int, copy: Callable[[], SegmentCopy]) -> bool:
        """See `SegmentArchive`."""
        return self._archive.save(num_bytes, copy)


@dataclass(frozen=True, slots=True)
class Running:
    """An engine over the folder of sessions.

    Attributes:
        client: Of the engine.
        flush: Waits until all that it keeps is written.
        archive: That the engine was started with.
    """

    client: EngineClient
    flush: Callable[[], None]
    archive: Switch


Start = Callable[[], AbstractContextManager[Running]]
"""Starts an engine; a new one each time, over the same folder."""


@contextmanager
def run_over(path: Path, start: Callable[[SegmentArchive], EngineClient]) -> Iterator[Running]:
    """Run an engine over a folder of sessions, on a card that the engine before has left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    limits = SessionLimits(quota_bytes=_MANY_BYTES, min_free_bytes=0)
    with closing(SessionFolder.open(path, limits)) as folder, closing(FolderArchive(folder)) as own:
        archive = Switch(own)
        with closing(start(archive)) as client:
            yield Running(client, own.flush, archive)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is read, and how often.

    Attributes:
        document_tokens: Of the document that is remembered.
        short_tokens: Of the documents whose writing is looked at, each asked about once.
        answer_tokens: Of each answer about the document; they must be the same ones every time.
        pairs: Readings of what writing costs and of documents in memory, 7 or more.
        restarts: Engines that read the file from the page cache, and as many that read it cold.
    """

    document_tokens: int = 6000
    short_tokens: int = 384
    answer_tokens: int = 16
    pairs: int = LEAST_PAIRS
    restarts: int = LEAST_PAIRS


def measure(start: Start, sessions: Path, sizes: Sizes, progress: Progress) -> Measurement:
    """Ask about a document that is not read yet, is in memory, and is in a file.

    Args:
        start: Starts engines over `sessions`.
        sessions: The folder of files, empty.
        sizes: How much is read, and how often.
        progress: Called with what is done, how far it is, and out of how much.

    Raises:
        ContextTooLong: The document does not fit the model's context.
        EngineError: The document was not where it should have been, or the answer was another.
    """
    bench = _Bench(start, sessions, sizes, progress)
    parameters, model = bench.read()
    file = max(sessions.glob("*/*.segment"), key=lambda path: path.stat().st_size)
    turns = range(2 * sizes.restarts)
    are_dropped = [bench.restart(file, is_dropped=at % 2 == 0) for at in turns]
    return Measurement(
        series=bench.named(),
        threads=torch.get_num_threads(),
        parameters=parameters
        | {
            "file_bytes": file.stat().st_size,
            "short_document_tokens": sizes.short_tokens,
            "tokens_of_equal_answers": len(bench.answer),
            "page_cache_dropped": all(are_dropped[::2]),
            "restart": "a new engine over the same folder, in the same process; loading excluded",
        },
        model=model,
    )


@dataclass
class _Bench:
    start: Start
    sessions: Path
    sizes: Sizes
    progress: Progress
    series: dict[str, list[float]] = field(default_factory=dict)
    document: str = ""
    answer: tuple[int, ...] = ()
    asked: int = 0

    def read(self) -> tuple[dict[str, object], dict[str, str]]:
        """Time the first question, further ones to the same engine, and what writing costs."""
        with self.start() as running:
            client = running.client
            self.document = Filler(client).text(self.sizes.document_tokens, seed=1)
            self.progress("reading the document", 0, 0)
            begun = time.perf_counter()
            first = self._ask(client, self.document, CacheTier.NONE)
            running.flush()
            written_ms = 1000 * (time.perf_counter() - begun)
            self.answer = first.token_ids
            self._add("first_token_unread_ms", first.timings.ttft_ms)
            self._add("first_token_to_file_ms", written_ms - first.timings.ttft_ms)
            for at in range(self.sizes.pairs):
                self.progress("asking again", at, self.sizes.pairs)
                again = self._ask(client, self.document, CacheTier.DEVICE)
                self._add("first_token_memory_ms", again.timings.ttft_ms)
            self._cost(running)
            info = client.info()
        parameters: dict[str, object] = {
            "document_tokens": self.sizes.document_tokens,
            "prompt_tokens": first.usage.prompt_tokens,
            "reused_tokens": again.usage.cached_tokens,
            "weights": info.weights,
            "compute_dtype": info.compute_dtype,
            "kv_format": info.kv_format,
            "device": info.device,
        }
        return parameters, {"file": info.model, "sha256": info.model_hash}

    def restart(self, file: Path, *, is_dropped: bool) -> bool:
        """Read the file, start a new engine, ask it; return whether the page cache was empty."""
        self.progress("starting anew", len(self.series.get("read_gb_s", ())), self.sizes.restarts)
        suffix = "_dropped" if is_dropped else ""
        was_dropped = is_dropped and drop_pages(file)
        rate_gb_s = read_gb_s(file)
        with self.start() as running:
            if is_dropped:
                was_dropped = drop_pages(file) and was_dropped
            timings = self._ask(running.client, self.document, CacheTier.FILE).timings
        bound_ms = file.stat().st_size / (_READ_SHARE * rate_gb_s * 1e6) + _MORE_MS
        self._add(f"first_token_file{suffix}_ms", timings.ttft_ms)
        self._add(f"queue_file{suffix}_ms", timings.queue_ms)
        self._add(f"restore{suffix}_ms", timings.restore_ms)
        self._add(f"restore_bound{suffix}_ms", bound_ms)
        self._add(f"restore{suffix}_gb_s", timings.restore_gb_s)
        self._add(f"read{suffix}_gb_s", rate_gb_s)
        return was_dropped

    def named(self) -> dict[str, Series]:
        """Return all readings, with ratios where there are enough of them."""
        series = self.series
        named = {name: Series(_unit(name), values) for name, values in series.items()}
        cold_ms = series["first_token_unread_ms"][0]
        for tier in ("memory", "file", "file_dropped"):
            values = [cold_ms / value for value in series[f"first_token_{tier}_ms"]]
            named[f"{tier}_speedup"] = Series("times", values)
        pairs = [("unread_archived_ms", "unread_plain_ms")]
        if self.sizes.restarts >= LEAST_PAIRS:
            pairs += [(f"restore{of}_ms", f"restore_bound{of}_ms") for of in ("", "_dropped")]
        for name, against in pairs:
            named[name] = Series("ms", series[name], against=against)
        return named

    def _cost(self, running: Running) -> None:
        """Time first questions about short documents, with files and without, alternately."""
        client, filler, seeds = running.client, Filler(running.client), iter(range(2, 10_000))

        def first(*, keeps: bool) -> float:
            running.archive.is_on = keeps
            text = filler.text(self.sizes.short_tokens, next(seeds))
            begun = time.perf_counter()
            self._ask(client, text, CacheTier.NONE)
            seconds = time.perf_counter() - begun
            running.flush()  # beside the clock, so that the other one is not disturbed
            return 1000 * seconds

        for keeps in (True, False):  # what is only slow the first time
            first(keeps=keeps)
        self.progress("what writing costs", 0, 0)
        self.series["unread_archived_ms"], self.series["unread_plain_ms"] = paired(
            lambda: first(keeps=True), lambda: first(keeps=False), self.sizes.pairs
        )

    def _ask(self, client: EngineClient, document: str, tier: CacheTier) -> Finished:
        self.asked += 1
        filler = Filler(client)
        is_remembered = document == self.document
        request = GenerateRequest(
            f"bench-{self.asked}",
            filler.prompt(document, filler.text(_QUESTION_TOKENS, seed=1000)),
            max_tokens=self.sizes.answer_tokens if is_remembered else 1,
            draft=DraftMode.OFF,
        )
        finished = asyncio.run(client.complete(request))
        if finished.tier is not tier:
            why = f", {finished.miss_reason}" if finished.miss_reason else ""
            raise EngineError(f"the document was looked for in {tier}, was in {finished.tier}{why}")
        if is_remembered and self.answer and finished.token_ids != self.answer:
            raise EngineError(f"from {tier} the answer was not the one that was computed")
        return finished

    def _add(self, name: str, value: float) -> None:
        self.series.setdefault(name, []).append(value)


def drop_pages(file: Path) -> bool:
    """Have the page cache forget a file; return whether its first page is gone from there."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
    except OSError as error:
        return error.errno == errno.EAGAIN
    finally:
        os.close(descriptor)
    return False


def read_gb_s(file: Path) -> float:
    """Read a file from its start to its end; return 10⁹ bytes a second."""
    buffer, num_bytes = bytearray(_BLOCK_BYTES), 0
    begun = time.perf_counter()
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            num_bytes += count
    return num_bytes / (time.perf_counter() - begun) / 1e9


def _unit(name: str) -> str:
    return "GB/s" if name.endswith("gb_s") else "ms"
