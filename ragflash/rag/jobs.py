"""Background work as a table that survives a restart; `job_worker` works through it.

Whoever works on a job holds a lease on it: a name, and a time that it puts off while it is at it.
The owner of the data folder is alone, so what others held when they died is free at once.
"""

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from uuid import uuid4

from ragflash.errors import NotFound, RagflashError
from ragflash.rag.database import Database, placeholders
from ragflash.rag.records import DocumentRecord, DocumentState, JobKind, JobRecord, JobState, Scope

# States move along this table: forward, but for a job that is put off to be tried again.
NEXT_STATES: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.FAILED, JobState.CANCELLED}),
    JobState.RUNNING: frozenset(
        {JobState.QUEUED, JobState.DONE, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.DONE: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}

_COLUMNS = (
    "id, collection_id, document_id, state, stage, done, total, created_ms, code, detail, "
    "retry_at_ms, kind"
)
_ASKABLE = f"('{DocumentState.READY}', '{DocumentState.PARTIAL}')"
_OPEN = tuple(state.value for state in JobState if not state.is_final)

LEASE_MS = 60_000
MAX_ATTEMPTS = 3
"""So often may the process die at a job without a step forward in between."""


class JobCancelled(Exception):
    """Raised inside a job that someone has cancelled."""


class JobInterrupted(Exception):
    """Raised inside a job when the library closes; the job goes on after the next start."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to work on a job.

    Attributes:
        attempts: How often the job was begun without a step forward, this time included.
        faults: How often it was put off without a step forward.
        is_cancelling: Someone asked for its end before a restart.
    """

    job: JobRecord
    owner: str
    attempts: int
    faults: int
    is_cancelling: bool


class JobTable:
    """Jobs in the library's database; waiting is on its condition, never by asking again."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(
        self, document: DocumentRecord, created_ms: int, kind: JobKind = JobKind.INGEST
    ) -> JobRecord:
        """Queue work on a document; to have it read waits until it can be asked."""
        job_id = f"job_{uuid4().hex}"
        with self._db.changed:
            self._db.execute(
                f"INSERT INTO jobs ({_COLUMNS}) VALUES ({placeholders(12)})",
                *(job_id, document.collection_id, document.id, JobState.QUEUED.value),
                *("", 0, 0, created_ms, None, None, None, kind.value),
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
        """The newest job that took a document in."""
        row = self._db.row(
            f"SELECT {_COLUMNS} FROM jobs WHERE document_id = ? AND kind = ? ORDER BY seq DESC",
            *(document_id, JobKind.INGEST.value),
        )
        if row is None:
            raise NotFound(f"there is no job for document {document_id!r}")
        return _record(row)

    def open_of(self, document_id: str, kind: JobKind) -> JobRecord | None:
        """The job of a kind that waits for a document or runs on it."""
        row = self._db.row(
            f"SELECT {_COLUMNS} FROM jobs WHERE document_id = ? AND kind = ? "
            f"AND state IN ({placeholders(len(_OPEN))})",
            *(document_id, kind.value, *_OPEN),
        )
        return None if row is None else _record(row)

    def claim(self, owner: str, kind: JobKind) -> Claim | None:
        """Take the oldest job of a kind that is free: first those that were begun before."""
        now = now_ms()
        with self._db.transaction():
            row = self._db.row(
                f"SELECT {_COLUMNS}, attempts, faults, cancelling FROM jobs "
                "WHERE kind = ? AND (kind = ? OR document_id IN "
                f"(SELECT id FROM documents WHERE state IN {_ASKABLE})) "
                "AND ((state = ? AND coalesce(retry_at_ms, 0) <= ?) "
                "OR (state = ? AND (lease_until_ms <= ? OR owner = ?))) "
                "ORDER BY state = ? DESC, seq LIMIT 1",
                *(kind.value, JobKind.INGEST.value),
                *(JobState.QUEUED.value, now, JobState.RUNNING.value, now, owner),
                JobState.RUNNING.value,
            )
            if row is None:
                return None
            self._db.execute(
                "UPDATE jobs SET state = ?, owner = ?, lease_until_ms = ?, retry_at_ms = NULL, "
                "attempts = attempts + 1, code = NULL, detail = NULL WHERE id = ?",
                *(JobState.RUNNING.value, owner, now + LEASE_MS, row["id"]),
            )
            self._db.changed.notify_all()
            job = self.get(Scope(frozenset({row["collection_id"]})), row["id"])
        return Claim(job, owner, row["attempts"] + 1, row["faults"], bool(row["cancelling"]))

    def next_pause_s(self, kind: JobKind) -> float:
        """Longest time after which there may be a job to claim, if nothing is added meanwhile."""
        row = self._db.row(
            "SELECT min(retry_at_ms) AS at FROM jobs WHERE state = ? AND kind = ?",
            *(JobState.QUEUED.value, kind.value),
        )
        due_ms = LEASE_MS if row is None or row["at"] is None else row["at"] - now_ms()
        return max(0, min(due_ms, LEASE_MS)) / 1000

    def take_over(self, owner: str, kind: JobKind) -> None:
        """Free what others hold; only the owner of the data folder knows that they are dead.

        What was put off is tried at once: the restart may have mended what was wrong.
        """
        with self._db.transaction():
            self._db.execute(
                "UPDATE jobs SET owner = NULL, lease_until_ms = 0 WHERE owner <> ? AND kind = ?",
                *(owner, kind.value),
            )
            self._db.execute(
                "UPDATE jobs SET retry_at_ms = NULL, faults = 0 WHERE faults > 0 AND kind = ?",
                kind.value,
            )

    def hurry(self, document_id: str) -> None:
        """Have a job on a document that was put off tried at once."""
        with self._db.changed:
            self._db.execute(
                "UPDATE jobs SET retry_at_ms = NULL WHERE document_id = ?", document_id
            )
            self._db.changed.notify_all()

    def renew(self, claim: Claim) -> bool:
        """Put the end of a lease off; `False` when it is no longer the claimant's."""
        return (
            self._db.execute(
                "UPDATE jobs SET lease_until_ms = ? WHERE id = ? AND owner = ? AND state = ?",
                *(now_ms() + LEASE_MS, claim.job.id, claim.owner, JobState.RUNNING.value),
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

    def put_off(self, claim: Claim, retry_at_ms: int, error: RagflashError) -> bool:
        """Queue a job again that something else was to blame for; it says what and until when.

        Returns:
            Whether the job was still the claimant's.
        """
        with self._db.changed:
            changed = self._db.execute(
                "UPDATE jobs SET state = ?, owner = NULL, lease_until_ms = 0, "
                "attempts = attempts - 1, faults = faults + 1, retry_at_ms = ?, code = ?, "
                "detail = ? WHERE id = ? AND owner = ? AND state = ?",
                *(JobState.QUEUED.value, retry_at_ms, error.code, error.detail),
                *(claim.job.id, claim.owner, JobState.RUNNING.value),
            )
            self._db.changed.notify_all()
        return changed == 1

    def advance(self, claim: Claim, mark: int) -> None:
        """Note what is stored for good; if that is more than ever, all counts begin again."""
        self._db.execute(
            "UPDATE jobs SET attempts = 1, faults = 0, mark = ? WHERE id = ? AND mark < ?",
            *(mark, claim.job.id, mark),
        )

    def ask_to_cancel(self, job_id: str) -> None:
        """Remember that a job is to end, over a restart too."""
        self._db.execute("UPDATE jobs SET cancelling = 1 WHERE id = ?", job_id)

    def is_cancelling(self, document_id: str) -> bool:
        """Whether someone asked for the end of taking a document in."""
        return (
            self._db.row(
                "SELECT 1 FROM jobs WHERE document_id = ? AND cancelling AND state = ? "
                "AND kind = ?",
                *(document_id, JobState.RUNNING.value, JobKind.INGEST.value),
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
        """Documents that are being taken in, or wait for it."""
        rows = self._db.rows(
            "SELECT document_id FROM jobs WHERE kind = ? "
            f"AND state IN ({placeholders(len(_OPEN))})",
            *(JobKind.INGEST.value, *_OPEN),
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


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def _record(row: sqlite3.Row) -> JobRecord:
    fields = dict(row)
    fields["state"], fields["kind"] = JobState(fields["state"]), JobKind(fields["kind"])
    return JobRecord(**fields)
