"""Background work: a table that survives a restart, and the thread that works through it."""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from uuid import uuid4

from ragflash.errors import NotFound
from ragflash.rag.database import Database, placeholders
from ragflash.rag.records import DocumentRecord, JobRecord, JobState, Scope

# States only move forward: along this table.
NEXT_STATES: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.FAILED, JobState.CANCELLED}),
    JobState.RUNNING: frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED}),
    JobState.DONE: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}

_COLUMNS = "id, collection_id, document_id, state, stage, done, total, created_ms, code, detail"
_OPEN = tuple(state.value for state in JobState if not state.is_final)

_RETRY_S = 5.0
_REPORT_EVERY_S = 0.05

_log = logging.getLogger(__name__)


class JobCancelled(Exception):
    """Raised inside a job that someone has cancelled."""


class JobInterrupted(Exception):
    """Raised inside a job when the library closes; the job goes on after the next start."""


class JobTable:
    """Jobs in the library's database; waiting is on its condition, never by asking again."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, document: DocumentRecord, now_ms: int) -> JobRecord:
        """Queue work on a document."""
        job_id = f"job_{uuid4().hex}"
        with self._db.changed:
            self._db.execute(
                f"INSERT INTO jobs ({_COLUMNS}) VALUES ({placeholders(10)})",
                *(job_id, document.collection_id, document.id, JobState.QUEUED.value),
                *("", 0, 0, now_ms, None, None),
            )
            self._db.changed.notify_all()
            return self.get(Scope(frozenset({document.collection_id})), job_id)

    def get(self, scope: Scope, job_id: str) -> JobRecord:
        """One job.

        Raises:
            NotFound: There is none in scope; a job goes with its document.
        """
        row = self._db.row(f"SELECT {_COLUMNS} FROM jobs WHERE id = ?", job_id)
        if row is None or row["collection_id"] not in scope:
            raise NotFound(f"there is no job {job_id!r}")
        return _record(row)

    def of_document(self, document_id: str) -> JobRecord:
        """The newest job of a document."""
        row = self._db.row(
            f"SELECT {_COLUMNS} FROM jobs WHERE document_id = ? ORDER BY seq DESC", document_id
        )
        if row is None:
            raise NotFound(f"there is no job for document {document_id!r}")
        return _record(row)

    def next(self) -> JobRecord | None:
        """The oldest job that is not final: first those that a restart interrupted."""
        row = self._db.row(
            f"SELECT {_COLUMNS} FROM jobs WHERE state IN ({placeholders(len(_OPEN))}) "
            "ORDER BY state = ? DESC, seq",
            *_OPEN,
            JobState.RUNNING.value,
        )
        return None if row is None else _record(row)

    def move(
        self, job_id: str, state: JobState, *, code: str | None = None, detail: str | None = None
    ) -> bool:
        """Move a job forward and wake who waits; `False` when the table has no such step."""
        sources = [source.value for source, nexts in NEXT_STATES.items() if state in nexts]
        with self._db.changed:
            changed = self._db.execute(
                "UPDATE jobs SET state = ?, code = ?, detail = ? WHERE id = ? "
                f"AND state IN ({placeholders(len(sources))})",
                *(state.value, code, detail, job_id, *sources),
            )
            self._db.changed.notify_all()
        return changed == 1

    def report(self, job_id: str, stage: str, done: int, total: int) -> None:
        """Record progress and wake who waits."""
        with self._db.changed:
            self._db.execute(
                "UPDATE jobs SET stage = ?, done = ?, total = ? WHERE id = ? AND state = ?",
                *(stage, done, total, job_id, JobState.RUNNING.value),
            )
            self._db.changed.notify_all()

    def watch(
        self, scope: Scope, job_id: str, timeout_s: float | None = None
    ) -> Iterator[JobRecord]:
        """Yield the job as it is and after every change until it is final or time is over.

        A job that goes with its document ends as cancelled.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        seen = self.get(scope, job_id)
        yield seen
        while not seen.state.is_final:
            with self._db.changed:
                while (current := self._current(scope, seen)) == seen:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return
                    self._db.changed.wait(left)
            seen = current
            yield seen

    def wait(self, scope: Scope, job_id: str, timeout_s: float | None = None) -> JobRecord:
        """Block until the job is final, or time is over, and return its last state."""
        *_, last = self.watch(scope, job_id, timeout_s)
        return last

    def count_open(self) -> int:
        """Number of jobs that wait or run."""
        rows = self._db.rows(
            f"SELECT count(*) AS n FROM jobs WHERE state IN ({placeholders(len(_OPEN))})", *_OPEN
        )
        return int(rows[0]["n"])

    def _current(self, scope: Scope, seen: JobRecord) -> JobRecord:
        try:
            return self.get(scope, seen.id)
        except NotFound:
            return replace(seen, state=JobState.CANCELLED)


class JobControl:
    """What a running job reports to, and asks whether it should go on."""

    def __init__(self, job: JobRecord, table: JobTable, stopping: threading.Event) -> None:
        self.job = job
        self._table = table
        self._stopping = stopping
        self._cancelled = threading.Event()
        self._stage, self._reported = "", 0.0

    def cancel(self) -> None:
        """Ask the job to end; it does between two batches."""
        self._cancelled.set()

    def is_ending(self) -> bool:
        """Whether the job should end soon."""
        return self._cancelled.is_set() or self._stopping.is_set()

    def check(self) -> None:
        """Raise `JobCancelled` or `JobInterrupted` when the job should end."""
        if self._cancelled.is_set():
            raise JobCancelled
        if self._stopping.is_set():
            raise JobInterrupted

    def report(self, stage: str, done: int, total: int) -> None:
        """Record progress, some twenty times a second at most, then `check`."""
        now = time.monotonic()
        if done == total or stage != self._stage or now - self._reported >= _REPORT_EVERY_S:
            self._stage, self._reported = stage, now
            self._table.report(self.job.id, stage, done, total)
        self.check()


class JobWorker:
    """One thread that runs jobs in order; what was running when a process died comes first."""

    def __init__(
        self, database: Database, table: JobTable, run: Callable[[JobControl], None]
    ) -> None:
        self._db = database
        self._table = table
        self._run = run
        self._stopping = threading.Event()
        self._current: JobControl | None = None
        self._thread = threading.Thread(target=self._work, name="ragflash-jobs", daemon=True)

    def start(self) -> None:
        """Begin with whatever the table holds."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether jobs are being worked on."""
        return self._thread.is_alive()

    def cancel(self, document_id: str) -> bool:
        """Ask the job that runs on a document to end; `False` when none does."""
        with self._db.changed:
            current = self._current
            if current is None or current.job.document_id != document_id:
                return False
            current.cancel()
            return True

    def leave(self, document_id: str) -> None:
        """Cancel the job on a document, if one runs, and wait until its hands are off."""
        with self._db.changed:
            while self.cancel(document_id):
                self._db.changed.wait()

    def close(self) -> None:
        """Interrupt the running job and end the thread; the job resumes at the next start."""
        with self._db.changed:
            self._stopping.set()
            self._db.changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _work(self) -> None:
        while (control := self._take()) is not None:
            try:
                self._run(control)
            except JobInterrupted:
                return
            except Exception:  # noqa: BLE001  (a full disk must not end the thread)
                _log.exception("a job could not be ended and is tried again")
                self._stopping.wait(_RETRY_S)
            finally:
                with self._db.changed:
                    self._current = None
                    self._db.changed.notify_all()

    def _take(self) -> JobControl | None:
        with self._db.changed:
            while not self._stopping.is_set():
                job = self._table.next()
                if job is not None:
                    self._table.move(job.id, JobState.RUNNING)
                    self._current = JobControl(job, self._table, self._stopping)
                    return self._current
                self._db.changed.wait()
        return None


def _record(row: sqlite3.Row) -> JobRecord:
    fields = dict(row)
    fields["state"] = JobState(fields["state"])
    return JobRecord(**fields)
