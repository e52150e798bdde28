"""The thread that works through the jobs, and what a running job is steered by."""

import logging
import os
import threading
import time
from collections.abc import Callable
from uuid import uuid4

from ragflash.errors import RagflashError, StorageError
from ragflash.rag.database import Database
from ragflash.rag.jobs import LEASE_MS, Claim, JobCancelled, JobInterrupted, JobTable, now_ms
from ragflash.rag.records import JobKind

_RETRY_S = 5.0
_REPORT_EVERY_S = 0.05

_log = logging.getLogger(__name__)


class JobControl:
    """What a running job reports to, and asks whether it should go on; each time it is alive."""

    def __init__(self, claim: Claim, table: JobTable, stopping: threading.Event) -> None:
        self.job = claim.job
        self.attempts = claim.attempts
        self.faults = claim.faults
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

    def put_off(self, pause_s: float, error: RagflashError) -> bool:
        """Have the job tried again after a pause; `False` when it is no longer this claimant's."""
        return self._table.put_off(self._claim, now_ms() + round(1000 * pause_s), error)

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
    """One thread that runs jobs of a kind in order; what ran when a process died comes first.

    While there is none it calls `tidy`, at least once in the time of a lease.
    """

    def __init__(
        self,
        database: Database,
        table: JobTable,
        kind: JobKind,
        run: Callable[[JobControl], None],
        tidy: Callable[[], None] = lambda: None,
    ) -> None:
        self._db = database
        self._table = table
        self._kind = kind
        self._run = run
        self._tidy = tidy
        self._owner = f"{os.getpid()}-{uuid4().hex[:8]}"
        self._stopping = threading.Event()
        self._current: JobControl | None = None
        self._thread = threading.Thread(target=self._work, name=f"ragflash-{kind}", daemon=True)

    def start(self) -> None:
        """Begin with whatever the table holds; this process owns the data folder."""
        self._table.take_over(self._owner, self._kind)
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
        except StorageError:  # the end of the job could not be written: nobody died of it
            control.release()
            raise
        finally:
            with self._db.changed:
                self._current = None
                self._db.changed.notify_all()

    def _take(self) -> JobControl | None:
        with self._db.changed:
            while not self._stopping.is_set():
                claim = self._table.claim(self._owner, self._kind)
                if claim is not None:
                    self._current = JobControl(claim, self._table, self._stopping)
                    return self._current
                self._tidy()
                self._db.changed.wait(self._table.next_pause_s(self._kind))
        return None
