"""The thread that owns the model.

In: jobs and orders, over one queue. Out: events, through each job's `emit`. Every accepted job gets
exactly one
terminal event, also when the model fails, when it is cancelled, and when the engine shuts down.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Self

from ragflash.engine.core import EngineCore
from ragflash.engine.job import Job
from ragflash.engine.request import Event, Failed, Finished
from ragflash.engine.stats import EngineStats
from ragflash.errors import EngineDead, EngineOverloaded, GenerationCancelled, RagflashError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _DropSource:
    source_id: str
    done: Future[int]


@dataclass(frozen=True, slots=True)
class _Weigh:
    done: Future[dict[bytes, int]]


@dataclass(frozen=True, slots=True)
class _Hold:
    change: int


class _Stop:
    """Ends the thread."""


_Order = Job | _DropSource | _Weigh | _Hold | _Stop


class Worker:
    """Runs an engine core on a daemon thread of its own.

    Args:
        core: Touched by the thread only.
        max_in_flight: Jobs that wait or run; one more is refused.
        prepare: Called first on the thread, e.g. to set its number of compute threads.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        max_in_flight: int,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._core = core
        self._prepare = prepare
        self._permits = threading.Semaphore(max_in_flight)
        self._inbox: queue.Queue[_Order] = queue.Queue()
        self._lock = threading.Lock()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="ragflash-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether jobs are accepted."""
        return self._is_open

    def stats(self) -> EngineStats:
        """Look at the engine, from any thread."""
        return self._core.stats(self._inbox.qsize())

    def awaited(self) -> Self:
        """Return the worker once it serves; blocks for what it does first.

        Raises:
            EngineDead: That failed.
        """
        self.stored_bytes().result()
        return self

    def submit(self, job: Job) -> None:
        """Hand a job over; its events come from the worker thread.

        Raises:
            EngineOverloaded: Too many are in flight.
            EngineDead: The thread has ended.
        """
        if not self._permits.acquire(blocking=False):
            raise EngineOverloaded("the engine's queue is full; try again later")
        try:
            self._put(replace(job, emit=self._metered(job.emit)))
        except EngineDead:
            self._permits.release()
            raise

    def drop_source(self, source_id: str) -> "Future[int]":
        """Have stored segments with text of a document forgotten; the future counts them."""
        order = _DropSource(source_id, Future())
        self._put(order)
        return order.done

    def stored_bytes(self) -> "Future[dict[bytes, int]]":
        """Have stored segments weighed, after the current step; see `EngineCore.stored_bytes`."""
        order = _Weigh(Future())
        self._put(order)
        return order.done

    def hold(self, change: int) -> None:
        """Count one more, or one less, who holds background requests off; see `EngineClient`."""
        self._put(_Hold(change))

    def close(self) -> None:
        """Stop after the current step, fail what is in flight, and wait for the thread."""
        try:
            self._put(_Stop())
        except EngineDead:
            _log.debug("engine was already stopped")
        self._thread.join()

    def _put(self, item: _Order) -> None:
        with self._lock:
            if not self._is_open:
                raise EngineDead("the engine has stopped; restart the server")
            self._inbox.put(item)

    def _metered(self, emit: Callable[[Event], None]) -> Callable[[Event], None]:
        def forward(event: Event) -> None:
            if isinstance(event, Finished | Failed):
                self._permits.release()
            emit(event)

        return forward

    def _run(self) -> None:
        error: RagflashError = GenerationCancelled("the engine was shut down")
        try:
            self._prepare()
            while self._take_orders():
                self._core.step()
        except Exception as cause:  # noqa: BLE001 - whatever a model raises, every job must get its end
            _log.exception("engine failed")
            error = EngineDead(f"the engine failed: {type(cause).__name__}: {cause}")
        finally:
            self._end(error)

    def _take_orders(self) -> bool:
        """Take in all that was sent, waiting for something when idle; return whether to go on."""
        is_idle = self._core.is_idle
        while True:
            try:
                item = self._inbox.get(block=is_idle)
            except queue.Empty:
                return True
            is_idle = False
            try:
                if not self._carry_out(item):
                    return False
            except Exception:
                self._inbox.put(item)  # so that whoever sent it is told of the end, too
                raise

    def _carry_out(self, item: _Order) -> bool:
        """Do what one item says; return whether to go on."""
        match item:
            case Job():
                self._core.add(item)
            case _DropSource(source_id, done):
                done.set_result(self._core.drop_source(source_id))
            case _Hold(change):
                self._core.hold(change)
            case _Weigh(done):
                done.set_result(self._core.stored_bytes())
            case _Stop():
                return False
        return True

    def _end(self, error: RagflashError) -> None:
        with self._lock:
            self._is_open = False
        self._core.fail_all(error)
        while not self._inbox.empty():
            match self._inbox.get():
                case Job() as job:
                    job.emit(Failed(job.request.id, error))
                case _DropSource(done=done) | _Weigh(done=done):
                    done.set_exception(error)
                case _Hold() | _Stop():
                    pass
