"""Background work: a table that survives a restart, and the thread that works through it.

Whoever works on a job holds a lease on it: a name, and a time that it puts off while it is at it.
The owner of the data folder is alone, so what others held when they died is free at once.
"""

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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

LEASE_MS = 60_000
MAX_ATTEMPTS = 3
"""So often may the process die at a job without a step forward in between."""

_RETRY_S = 5.0
_REPORT_EVERY_S = 0.05

_log = logging.getLogger(__name__)


class JobCancelled(Exception):
    """Raised inside a job that someone has cancelled."""


class JobInterrupted(Exception):
    """Raised inside a job when the library closes; the job goes on after the next start."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to work on a job.

    Attributes:
        attempts: How often the job was begun without a step forward, this time included.
        is_cancelling: Someone asked for its end before a restart.
    """

    job: JobRecord
    owner: str
    attempts: int
    is_cancelling: bool


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

    def claim(self, owner: str) -> Claim | None:
        """Take the oldest job that is free: first those that were begun before."""
        now_ms = _now_ms()
        with self._db.transaction():
            row = self._db.row(
                f"SELECT {_COLUMNS}, attempts, cancelling FROM jobs WHERE state = ? "
                "OR (state = ? AND (lease_until_ms <= ? OR owner = ?)) "
                "ORDER BY state = ? DESC, seq LIMIT 1",
                *(JobState.QUEUED.value, JobState.RUNNING.value, now_ms, owner),
                JobState.RUNNING.value,
            )
            if row is None:
                return None
            self._db.execute(
                "UPDATE jobs SET state = ?, owner = ?, lease_until_ms = ?, attempts = attempts + 1 "
                "WHERE id = ?",
                *(JobState.RUNNING.value, owner, now_ms + LEASE_MS, row["id"]),
            )
            self._db.changed.notify_all()
            job = self.get(Scope(frozenset({row["collection_id"]})), row["id"])
        return Claim(job, owner, row["attempts"] + 1, bool(row["cancelling"]))

    def take_over(self, owner: str) -> None:
        """Free what others hold; only the owner of the data folder knows that they are dead."""
        self._db.execute("UPDATE jobs SET owner = NULL, lease_until_ms = 0 WHERE owner <> ?", owner)

    def renew(self, claim: Claim) -> bool:
        """Put the end of a lease off; `False` when it is no longer the claimant's."""
        return (
            self._db.execute(
                "UPDATE jobs SET lease_until_ms = ? WHERE id = ? AND owner = ? AND state = ?",
                *(_now_ms() + LEASE_MS, claim.job.id, claim.owner, JobState.RUNNING.value),
            )
            == 1
        )

    def release(self, claim: Claim) -> None:
        """Give a job back that nothing went wrong with: it counts as not begun."""
        self._db.execute(
            "UPDATE jobs SET owner = NULL, lease_until_ms = 0, attempts = attempts - 1 "
            "WHERE id = ? AND owner = ? AND state = ?",
            *(claim.job.id, claim.owner, JobState.RUNNING.value),
        )

    def advance(self, claim: Claim, mark: int) -> None:
        """Note what is stored for good; if that is more than ever, attempts count from here."""
        self._db.execute(
            "UPDATE jobs SET attempts = 1, mark = ? WHERE id = ? AND mark < ?",
            *(mark, claim.job.id, mark),
        )

    def ask_to_cancel(self, job_id: str) -> None:
        """Remember that a job is to end, over a restart too."""
        self._db.execute("UPDATE jobs SET cancelling = 1 WHERE id = ?", job_id)

    def is_cancelling(self, document_id: str) -> bool:
        """Whether someone asked for the end of work on a document."""
        return (
            self._db.row(
                "SELECT 1 FROM jobs WHERE document_id = ? AND cancelling AND state = ?",
                *(document_id, JobState.RUNNING.value),
            )
            is not None
        )

    def cancel_all(self, document_id: str) -> None:
        """Cancel whatever is open on a document and wake who waits."""
        with self._db.changed:
            self._db.execute(
                "UPDATE jobs SET state = ? WHERE document_id = ? "
                f"AND state IN ({placeholders(len(_OPEN))})",
                *(JobState.CANCELLED.value, document_id, *_OPEN),
            )
            self._db.changed.notify_all()

    def open_documents(self) -> set[str]:
        """Documents that work waits for or runs on."""
        rows = self._db.rows(
            f"SELECT document_id FROM jobs WHERE state IN ({placeholders(len(_OPEN))})", *_OPEN
        )
        return {row["document_id"] for row in rows}

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

    def count_by_state(self) -> dict[str, int]:
        """Number of jobs in each state that occurs."""
        rows = self._db.rows("SELECT state, count(*) AS n FROM jobs GROUP BY state")
        return {row["state"]: row["n"] for row in rows}

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
    """What a running job reports to, and asks whether it should go on; each time it is alive."""

    def __init__(self, claim: Claim, table: JobTable, stopping: threading.Event) -> None:
        self.job = claim.job
        self.attempts = claim.attempts
        self._claim = claim
        self._table = table
        self._stopping = stopping
        self._cancelled = threading.Event()
        if claim.is_cancelling:
            self._cancelled.set()
        self._stage, self._reported, self._beaten = "", 0.0, time.monotonic()

    def cancel(self) -> None:
        """Ask the job to end; it does between two batches."""
        self._cancelled.set()

    def is_ending(self) -> bool:
        """Whether the job should end soon."""
        self._beat()
        return self._cancelled.is_set() or self._stopping.is_set()

    def check(self) -> None:
        """Raise `JobCancelled` or `JobInterrupted` when the job should end."""
        self._beat()
        if self._cancelled.is_set():
            raise JobCancelled
        if self._stopping.is_set():
            raise JobInterrupted

    def hold(self) -> None:
        """`check`, and make sure of the lease: what is about to be written is final."""
        self._beaten = 0.0
        self.check()

    def advance(self, mark: int) -> None:
        """Note how much is stored for good."""
        self._table.advance(self._claim, mark)

    def release(self) -> None:
        """Give the job back as it is."""
        self._table.release(self._claim)

    def _beat(self) -> None:
        now = time.monotonic()
        if self._beaten and now - self._beaten < LEASE_MS / 3000:
            return
        if not self._table.renew(self._claim) and not self._cancelled.is_set():
            raise JobInterrupted
        self._beaten = now

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
        self._owner = f"{os.getpid()}-{uuid4().hex[:8]}"
        self._stopping = threading.Event()
        self._current: JobControl | None = None
        self._thread = threading.Thread(target=self._work, name="ragflash-jobs", daemon=True)

    def start(self) -> None:
        """Begin with whatever the table holds; this process owns the data folder."""
        self._table.take_over(self._owner)
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
        while not self._stopping.is_set():
            try:
                self._work_on(self._take())
            except Exception:  # noqa: BLE001  (a full disk must not end the thread)
                _log.exception("a job could not be begun or ended and is tried again")
                self._stopping.wait(_RETRY_S)

    def _work_on(self, control: JobControl | None) -> None:
        if control is None:
            return
        try:
            self._run(control)
        except JobInterrupted:
            control.release()
        finally:
            with self._db.changed:
                self._current = None
                self._db.changed.notify_all()

    def _take(self) -> JobControl | None:
        with self._db.changed:
            while not self._stopping.is_set():
                claim = self._table.claim(self._owner)
                if claim is not None:
                    self._current = JobControl(claim, self._table, self._stopping)
                    return self._current
                self._db.changed.wait(LEASE_MS / 1000)
        return None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _record(row: sqlite3.Row) -> JobRecord:
    fields = dict(row)
    fields["state"] = JobState(fields["state"])
    return JobRecord(**fields)
