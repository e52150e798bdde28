"""What files of read documents are worth, what they cost, and how fast they are read."""

import asyncio
import errno
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ragflash.bench.filler import Filler
from ragflash.bench.record import Measurement, Series, paired
from ragflash.engine.cache import CacheTier
from ragflash.engine.client import EngineClient
from ragflash.engine.request import DraftMode, Finished, GenerateRequest
from ragflash.errors import EngineError

_BLOCK_BYTES = 4 << 20
_QUESTION_TOKENS = 12
# A restore may take this: the file's bytes at 0.8 of the rate of a plain read, and so much more.
_READ_SHARE, _MORE_MS = 0.8, 300.0

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Running:
    """An engine, and how to wait until all that it keeps is written."""

    client: EngineClient
    flush: Callable[[], None]


Start = Callable[[bool], AbstractContextManager[Running]]
"""Starts an engine over the folder of sessions, or over none; a new one each time."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is read, and how often.

    Attributes:
        document_tokens: Of the document that is remembered.
        short_tokens: Of the documents whose writing is looked at, each asked about once.
        pairs: Readings of each figure but the first one, 7 or more.
    """

    document_tokens: int = 6000
    short_tokens: int = 384
    pairs: int = 7


def measure(start: Start, sessions: Path, sizes: Sizes, progress: Progress) -> Measurement:
    """Ask about a document that is not read yet, is in memory, and is in a file.

    Args:
        start: Starts engines, over `sessions` or over none.
        sessions: The folder of files, empty.
        sizes: How much is read, and how often.
        progress: Called with what is done, how far it is, and out of how much.

    Raises:
        ContextTooLong: The document does not fit the model's context.
        EngineError: The document was not where it should have been.
    """
    bench = _Bench(start, sessions, sizes, progress)
    parameters, model = bench.read()
    file = max(sessions.glob("*/*.segment"), key=lambda path: path.stat().st_size)
    are_dropped = [bench.restart(file, is_dropped=at % 2 == 0) for at in range(2 * sizes.pairs)]
    archived_ms, plain_ms = bench.cost()
    series = bench.series
    cold_ms = series["first_token_unread_ms"][0]
    named = {name: Series(_unit(name), values) for name, values in series.items()}
    for tier in ("memory", "file", "file_dropped"):
        values = [cold_ms / value for value in series[f"first_token_{tier}_ms"]]
        named[f"{tier}_speedup"] = Series("times", values)
    for suffix in ("", "_dropped"):
        restores = series[f"restore{suffix}_ms"]
        named[f"restore{suffix}_ms"] = Series("ms", restores, against=f"restore_bound{suffix}_ms")
    named["unread_archived_ms"] = Series("ms", archived_ms, against="unread_plain_ms")
    named["unread_plain_ms"] = Series("ms", plain_ms)
    return Measurement(
        series=named,
        threads=torch.get_num_threads(),
        parameters=parameters
        | {
            "file_bytes": file.stat().st_size,
            "short_document_tokens": sizes.short_tokens,
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
    asked: int = 0

    def read(self) -> tuple[dict[str, object], dict[str, str]]:
        """Time the first question, and further ones to the same engine; say what was used."""
        with self.start(True) as running:
            client = running.client
            self.document = Filler(client).text(self.sizes.document_tokens, seed=1)
            self.progress("reading the document", 0, 0)
            first = self._ask(client, self.document, CacheTier.NONE)
            self._add("first_token_unread_ms", first.timings.ttft_ms)
            running.flush()
            for at in range(self.sizes.pairs):
                self.progress("asking again", at, self.sizes.pairs)
                again = self._ask(client, self.document, CacheTier.DEVICE)
                self._add("first_token_memory_ms", again.timings.ttft_ms)
            info = client.info()
        parameters: dict[str, object] = {
            "document_tokens": self.sizes.document_tokens,
            "prompt_tokens": first.usage.prompt_tokens,
            "reused_tokens": again.usage.cached_tokens,
            "weights": info.weights,
            "compute_dtype": info.compute_dtype,
            "kv_format": info.kv_format,
        }
        return parameters, {"file": info.model, "sha256": info.model_hash}

    def restart(self, file: Path, *, is_dropped: bool) -> bool:
        """Read the file, start a new engine, ask it; return whether the page cache was empty."""
        self.progress("starting anew", len(self.series.get("read_gb_s", ())), self.sizes.pairs)
        suffix = "_dropped" if is_dropped else ""
        was_dropped = is_dropped and drop_pages(file)
        rate_gb_s = read_gb_s(file)
        with self.start(True) as running:
            if is_dropped:
                was_dropped = drop_pages(file) and was_dropped
            timings = self._ask(running.client, self.document, CacheTier.FILE).timings
        bound_ms = file.stat().st_size / (_READ_SHARE * rate_gb_s * 1e6) + _MORE_MS
        self._add(f"first_token_file{suffix}_ms", timings.ttft_ms)
        self._add(f"restore{suffix}_ms", timings.restore_ms)
        self._add(f"restore_bound{suffix}_ms", bound_ms)
        self._add(f"restore{suffix}_gb_s", timings.restore_gb_s)
        self._add(f"read{suffix}_gb_s", rate_gb_s)
        return was_dropped

    def cost(self) -> tuple[list[float], list[float]]:
        """Time first questions about short documents, with files and without, alternately."""
        with self.start(True) as kept, self.start(False) as plain:
            filler = Filler(kept.client)
            for running in (kept, plain):  # what is only slow the first time
                self._ask(running.client, filler.text(self.sizes.short_tokens, 2), CacheTier.NONE)
                running.flush()
            seeds = {id(kept): iter(range(3, 10_000)), id(plain): iter(range(3, 10_000))}

            def first(running: Running) -> float:
                text = filler.text(self.sizes.short_tokens, next(seeds[id(running)]))
                begun = time.perf_counter()
                self._ask(running.client, text, CacheTier.NONE)
                seconds = time.perf_counter() - begun
                running.flush()  # beside the clock, so that the other one is not disturbed
                return 1000 * seconds

            self.progress("what writing costs", 0, 0)
            return paired(lambda: first(kept), lambda: first(plain), self.sizes.pairs)

    def _ask(self, client: EngineClient, document: str, tier: CacheTier) -> Finished:
        self.asked += 1
        filler = Filler(client)
        question = filler.text(_QUESTION_TOKENS, seed=1000 + self.asked)
        request = GenerateRequest(
            f"bench-{self.asked}",
            filler.prompt(document, question),
            max_tokens=1,
            draft=DraftMode.OFF,
        )
        finished = asyncio.run(client.complete(request))
        if finished.tier is not tier:
            why = f", {finished.miss_reason}" if finished.miss_reason else ""
            raise EngineError(f"the document was looked for in {tier}, was in {finished.tier}{why}")
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
