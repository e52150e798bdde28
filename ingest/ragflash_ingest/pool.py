"""Parsing in child processes with limits on time and memory.

PDFium is not safe in threads and no parser is safe from the files it meets. A child has its own
memory limit, is killed when a file takes too long, and is replaced after some documents.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Self

from ragflash_ingest import wire
from ragflash_ingest.document import Document, FailureReason, ParseError
from ragflash_ingest.parsers import Progress, parse_bytes

__all__ = ["ParseCancelled", "ParserPool", "Progress", "parse_bytes"]

_POLL_S = 0.05
_START_LIMIT_S = 60.0
_SOURCE_ROOT = Path(__file__).resolve().parent.parent
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


class ParseCancelled(Exception):
    """The caller asked to stop; the child that was at it has been killed."""


class _ChildDied(Exception):
    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class ParserPool:
    """A fixed number of parser processes, started when first needed.

    Safe to use from several threads: a call takes a process for itself or waits for one.

    Args:
        workers: Processes at most.
        timeout_s: Wall time for one file, apart from waiting for a process.
        memory_bytes: Address space of one process. Libraries alone take about 0.5 GiB of it.
        documents_per_worker: A process is replaced after so many.
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        timeout_s: float = 300.0,
        memory_bytes: int = 4 << 30,
        documents_per_worker: int = 100,
    ) -> None:
        if workers < 1 or documents_per_worker < 1 or timeout_s <= 0:
            raise ValueError("a pool needs a worker, a document for it and time")
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._documents_per_worker = documents_per_worker
        self._slots: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        self._workers = workers
        self._closed = threading.Event()
        for _ in range(workers):
            self._slots.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes for good; files that are being parsed are given up."""
        self._closed.set()
        for _ in range(self._workers):
            child = self._slots.get()
            if child:
                child.kill()

    def parse(
        self,
        source: bytes | Path,
        name: str,
        *,
        progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Document:
        """Parse a file, given as bytes or as a path.

        A child that dies is tried once more with a fresh one.

        Args:
            source: The whole file, or where it lies.
            name: Its name, used only to tell kinds of text apart.
            progress: Called in this thread.
            cancelled: Asked some twenty times a second.

        Raises:
            ParseError: With the reason; `too_slow`, `out_of_memory` and `crashed` are the pool's.
            ParseCancelled: `cancelled` said so, or the pool was closed.
            OSError: The path cannot be read, or no process can be started.
        """
        data = source if isinstance(source, bytes) else source.read_bytes()

        def stop() -> bool:
            return self._closed.is_set() or (cancelled is not None and cancelled())

        child = self._take(stop)
        try:
            for last in (False, True):
                child = child or _Child(self._memory_bytes)
                try:
                    return child.parse(data, name, self._timeout_s, progress, stop)
                except _ChildDied as death:
                    if last:
                        detail = f"the parser ended by {death.how}, twice"
                        raise ParseError(FailureReason.CRASHED, detail) from death
                finally:
                    if child.busy:
                        child.kill()
                        child = None
            raise AssertionError("the loop ends by a return or a raise")
        finally:
            self._put_back(child)

    def _take(self, stop: Callable[[], bool]) -> "_Child | None":
        while True:
            if stop():
                raise ParseCancelled
            try:
                return self._slots.get(timeout=_POLL_S)
            except queue.Empty:
                continue

    def _put_back(self, child: "_Child | None") -> None:
        if child and child.documents >= self._documents_per_worker:
            child.kill()
            child = None
        self._slots.put(child)


class _Child:
    """One parser process and the pipe to it."""

    def __init__(self, memory_bytes: int) -> None:
        self.documents = 0
        self.busy = False  # until it has answered: after an error it is of no more use
        ours, theirs = Pipe()
        environment = {key: os.environ[key] for key in _KEPT_VARIABLES if key in os.environ}
        environment |= {
            "PYTHONPATH": str(_SOURCE_ROOT),
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "ragflash_ingest.worker"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(memory_bytes)],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._pipe: Connection = ours
        self._ready = False

    def parse(
        self,
        data: bytes,
        name: str,
        timeout_s: float,
        progress: Progress | None,
        stop: Callable[[], bool],
    ) -> Document:
        self.documents += 1
        self.busy = True
        if not self._ready:
            self._await_start(stop)
        deadline = time.monotonic() + timeout_s
        try:
            self._pipe.send_bytes(name.encode("utf-8", "surrogatepass"))
            self._pipe.send_bytes(data)
        except OSError as error:
            raise _ChildDied(self._cause_of_death()) from error
        while True:
            message = json.loads(self._receive(deadline, stop))
            if "progress" in message:
                if progress:
                    progress(*message["progress"])
            elif "failure" in message:
                failure = message["failure"]
                self.busy = failure["reason"] == FailureReason.OUT_OF_MEMORY
                raise ParseError(FailureReason(failure["reason"]), failure["detail"])
            else:
                body, boxes = self._receive(deadline, stop), self._receive(deadline, stop)
                self.busy = False
                return wire.from_parts(body, boxes)

    def _await_start(self, stop: Callable[[], bool]) -> None:
        try:
            self._receive(time.monotonic() + _START_LIMIT_S, stop)
        except ParseError as error:
            raise _ChildDied(f"not starting within {_START_LIMIT_S:.0f} s") from error
        self._ready = True

    def _receive(self, deadline: float, stop: Callable[[], bool]) -> bytes:
        while True:
            if stop():
                raise ParseCancelled
            try:
                if self._pipe.poll(_POLL_S):
                    return self._pipe.recv_bytes()
            except (EOFError, OSError) as error:
                raise _ChildDied(self._cause_of_death()) from error
            if time.monotonic() > deadline:
                detail = "the file takes longer to parse than is allowed"
                raise ParseError(FailureReason.TOO_SLOW, detail)

    def _cause_of_death(self) -> str:
        code = self._process.wait(timeout=10)
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()
