"""The engine's archive: a folder of session files, and a thread that writes them."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ragflash.errors import StorageError
from ragflash.kvcache.archive import (
    ArchivedItem,
    FileMiss,
    Landing,
    SegmentArchive,
    SegmentCopy,
)
from ragflash.kvcache.identity import Identity
from ragflash.sessions.folder import SessionFolder
from ragflash.sessions.hit import FileHit
from ragflash.sessions.records import RefusalReason, SegmentRecord, prefix_keys
from ragflash.sessions.segment_file import StoredItem

_log = logging.getLogger(__name__)

_QUEUED_BYTES = 1 << 30
_REFUSAL_HOLDS_S = 600.0
_REFUSALS_REMEMBERED = 4096
_RECOUNT_EVERY_S = 3600.0
_REFUSALS = [reason for reason in RefusalReason if reason is not RefusalReason.ALREADY_STORED]


@dataclass(frozen=True, slots=True)
class ArchiveCounts:
    """What became of the segments that were to be saved since the start.

    Attributes:
        saved: Written.
        dropped: Not taken, since too much was waiting.
        refused: Not written, by `RefusalReason`.
        queued_bytes: Of those that wait or are being written.
    """

    saved: int
    dropped: int
    refused: Mapping[str, int]
    queued_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Save:
    key: bytes
    num_bytes: int
    copy: SegmentCopy


class FolderArchive(SegmentArchive):
    """Keeps segments in a folder; what the engine calls waits for no write.

    One thread writes, evicts for it, and now and then counts the files again. Should it fail, it
    says so in the log and goes on.

    Args:
        folder: Stays the caller's, and open until `close` has returned.
        queued_bytes: That may wait to be written; a larger segment is taken when nothing waits.
        recount_every_s: How often files are counted again, for what happened behind our back.
    """

    def __init__(
        self,
        folder: SessionFolder,
        *,
        queued_bytes: int = _QUEUED_BYTES,
        recount_every_s: float = _RECOUNT_EVERY_S,
    ) -> None:
        self._folder = folder
        self._most_bytes = queued_bytes
        self._lock = threading.Lock()
        self._underway: dict[bytes, int] = {}
        self._refused_at: dict[bytes, float] = {}
        self._num_saved = self._num_dropped = 0
        self._num_refused = dict.fromkeys(map(str, _REFUSALS), 0)
        self._recount_every_s = recount_every_s
        self._recount_at = time.monotonic() + recount_every_s
        self._saves: queue.Queue[_Save | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="ragflash-saves", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what waits, and end the thread; nothing may be saved any more."""
        self._saves.put(None)
        self._thread.join()

    def flush(self) -> None:
        """Wait until all that was taken is written, or refused."""
        self._saves.join()

    def counts(self) -> ArchiveCounts:
        """Return what was done so far."""
        with self._lock:
            waiting = sum(self._underway.values())
            refused = dict(self._num_refused)
            return ArchiveCounts(self._num_saved, self._num_dropped, refused, waiting)

    def find(
        self, segments: Sequence[tuple[int, ...]], *, identity: Identity, namespace: str
    ) -> FileHit | FileMiss:
        """See `SegmentArchive`."""
        return self._folder.find(segments, identity=identity, namespace=namespace)

    def read(self, targets: Iterable[tuple[ArchivedItem, Landing]]) -> FileMiss | None:
        """See `SegmentArchive`; items are of this folder's hits."""
        return self._folder.read(cast("Iterable[tuple[StoredItem, Landing]]", targets))

    def missing(
        self, segments: Sequence[tuple[int, ...]], *, identity: Identity, namespace: str
    ) -> tuple[int, ...]:
        """See `SegmentArchive`; what was refused lately, and what follows it, is not worth it."""
        if not self._folder.is_writable:
            return ()
        found = []
        with self._lock:
            for index, keys in enumerate(prefix_keys(segments, identity, namespace)):
                if self._was_refused(keys.key):
                    break
                if keys.key not in self._underway and not self._folder.holds(keys.key):
                    found.append(index)
        return tuple(found)

    def save(self, num_bytes: int, copy: Callable[[], SegmentCopy]) -> bool:
        """See `SegmentArchive`."""
        with self._lock:
            if self._underway and sum(self._underway.values()) + num_bytes > self._most_bytes:
                self._num_dropped += 1
                return False
        made = copy()
        key = prefix_keys(made.segments, made.identity, made.namespace)[-1].key
        with self._lock:
            self._underway[key] = num_bytes
        self._saves.put(_Save(key, num_bytes, made))
        return True

    def _run(self) -> None:
        """Work until the end."""
        is_over = False
        while not is_over:
            try:
                is_over = self._work()
            except Exception:  # noqa: BLE001 - whatever one thing does, the next gets its turn
                _log.exception("the thread that keeps sessions failed, and goes on")

    def _work(self) -> bool:
        """Write the next segment, or count the files when it is time; return whether all is done.

        No more than one thing, so that nothing is kept of it while the next one is waited for.
        """
        pause_s = self._recount_at - time.monotonic()
        if pause_s <= 0:
            self._recount()
            return False
        try:
            save = self._saves.get(timeout=pause_s)
        except queue.Empty:
            return False
        try:
            if save is None:
                return True
            reason: RefusalReason | None = RefusalReason.INTERNAL
            try:
                reason = self._store(save.copy)
            finally:
                with self._lock:
                    self._end(save.key, reason)
        finally:
            self._saves.task_done()
        return False

    def _recount(self) -> None:
        self._recount_at = time.monotonic() + self._recount_every_s
        if not self._folder.is_writable:
            return
        try:
            self._folder.recount()
        except StorageError as error:
            _log.warning("sessions were not counted again", extra={"reason": error.detail})

    def _store(self, copy: SegmentCopy) -> RefusalReason | None:
        """Write a segment; return why it is not there."""
        record = SegmentRecord(
            segments=copy.segments,
            identity=copy.identity,
            namespace=copy.namespace,
            source_ids=tuple(sorted(copy.source_ids)),
            items=copy.items,
            prefill_seconds=copy.prefill_seconds,
        )
        refused = self._folder.store(record, copy.buffers)
        if refused is None or refused.reason is RefusalReason.ALREADY_STORED:
            return None
        fields = {"reason": str(refused.reason), "detail": refused.detail}
        _log.warning("a session was not saved", extra=fields)
        return refused.reason

    def _end(self, key: bytes, reason: RefusalReason | None) -> None:
        del self._underway[key]
        self._refused_at.pop(key, None)
        if reason is None:
            self._num_saved += 1
            return
        self._num_refused[reason] += 1
        self._refused_at[key] = time.monotonic()
        if len(self._refused_at) > _REFUSALS_REMEMBERED:
            del self._refused_at[next(iter(self._refused_at))]

    def _was_refused(self, key: bytes) -> bool:
        refused_at = self._refused_at.get(key)
        return refused_at is not None and time.monotonic() - refused_at < _REFUSAL_HOLDS_S
