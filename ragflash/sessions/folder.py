"""The folder of session files: segments that outlive the process; one writes, many read."""

import logging
import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from ragflash.errors import DataFolderLocked, NotFound, StorageError
from ragflash.kvcache.archive import FileMiss, FileMissReason, Landing
from ragflash.kvcache.identity import Identity
from ragflash.sessions.changes import Changes
from ragflash.sessions.disk import Buffer, Disk
from ragflash.sessions.format import SegmentUnusable
from ragflash.sessions.hit import FileHit
from ragflash.sessions.index import SessionIndex
from ragflash.sessions.inventory import PIN_SUFFIX, Inventory, place_of
from ragflash.sessions.lock import WriterLock
from ragflash.sessions.part_file import PartFile
from ragflash.sessions.records import (
    PrefixKeys,
    RefusalReason,
    Refused,
    SegmentRecord,
    SessionCounts,
    SessionInfo,
    prefix_keys,
)
from ragflash.sessions.segment_file import ReadFailed, SegmentFile, StoredItem, read_items
from ragflash.sessions.writer import SegmentWriter, SessionLimits

_log = logging.getLogger(__name__)


class SessionFolder:
    """Finds, reads and stores segments. Thread-safe.

    What a request needs (`find`, `read`, `store`) raises for no fault of disk or file: it says
    why there is nothing, and the request goes on cold.
    """

    def __init__(
        self, disk: Disk, path: Path, limits: SessionLimits, lock: WriterLock | None, readers: int
    ) -> None:
        self._disk = disk
        self._path = path
        self._lock = lock
        self._limits = limits
        self._num_readers = readers
        self._index = SessionIndex.open(path / "index.sqlite", disk, writable=lock is not None)
        self._inventory = Inventory(disk, path, self._index)
        self._changes = Changes(disk, path, self._inventory)
        self._writer = SegmentWriter(disk, path, self._inventory, self._changes, limits)
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="ragflash-sessions")

    @classmethod
    def open(
        cls,
        path: Path,
        limits: SessionLimits,
        *,
        disk: Disk | None = None,
        num_readers: int | None = None,
        read_only: bool = False,
    ) -> Self:
        """Open or create a folder; whoever comes while a living process has it can only read.

        Args:
            path: Nothing but sessions is in it.
            limits: What files may take.
            disk: How files are reached.
            num_readers: Blocks that are read at once; 4 to 8, by the cores, unless given.
            read_only: Leave the right to write to others, though nobody has it.

        Raises:
            StorageError: The folder cannot be made or listed.
        """
        disk = disk or Disk()
        num_readers = num_readers or min(8, max(4, (os.cpu_count() or 1) // 2))
        with _storage_errors(f"the sessions in {path} cannot be used"):
            disk.make_folder(path)
            lock = None if read_only else WriterLock.acquire(path / "lock")
            try:
                folder = cls(disk, path, limits, lock, num_readers)
                if lock:
                    folder._changes.tidy(())
                else:
                    folder._inventory.recount()
            except BaseException:
                if lock:
                    lock.release()
                raise
        return folder

    def close(self) -> None:
        """Give the folder up; nothing may be using it."""
        self._pool.shutdown()
        self._index.close()
        if self._lock:
            self._lock.release()

    @property
    def is_writable(self) -> bool:
        """Whether this process is the one that may store."""
        return self._lock is not None

    def find(
        self, segments: Sequence[tuple[int, ...]], *, identity: Identity, namespace: str
    ) -> FileHit | FileMiss:
        """Find and validate the longest stored run of whole segments at the start of a prompt.

        Tokens are compared one by one. Payloads are not read yet.
        """
        files: list[SegmentFile] = []
        miss: FileMiss | None = None
        all_keys = prefix_keys(segments, identity, namespace)
        for keys, tokens in zip(all_keys, segments, strict=True):
            found = self._open(keys, tokens, identity, namespace)
            if isinstance(found, FileMiss):
                miss = found
                break
            files.append(found)
        if not files:
            return miss or FileMiss(FileMissReason.NONE_STORED)
        now = time.time()
        for file in files:
            self._disk.touch(file.path, now)
        self._inventory.touch([file.header.keys.key for file in files], now)
        return FileHit(tuple(files), identity, miss)

    def read(self, targets: Iterable[tuple[StoredItem, Landing]]) -> FileMiss | None:
        """Read items of hits in parallel, verifying each block before it counts.

        Args:
            targets: Items, each with where it lands. They are drawn one by one, from any thread.

        Returns:
            `None` when all is read. Otherwise anything may have landed, and a damaged file has
            been set aside.
        """
        try:
            read_items(self._pool, self._num_readers, targets)
        except ReadFailed as error:
            if isinstance(error.cause, SegmentUnusable):
                return self._damaged(error.file, error.cause)
            return FileMiss(FileMissReason.IO_ERROR, detail=str(error.cause))
        return None

    def store(self, record: SegmentRecord, buffers: Iterable[Buffer]) -> Refused | None:
        """Write a segment; return `None` when it is there for good, or why it is not.

        Room is made before the first buffer is asked for. Other calls go on meanwhile.

        Args:
            record: What it is.
            buffers: All bytes of all items in order; an item may come in several buffers, and
                none holds bytes of two. Each is done with before the next is asked for.

        Raises:
            ValueError: Buffers and items do not match.
        """
        if not self.is_writable:
            return Refused(RefusalReason.READ_ONLY, "another process has the sessions")
        return self._writer.store(record, buffers)

    def holds(self, key: bytes) -> bool:
        """Whether there is a segment of that key, as far as is known without a look at the disk."""
        return self._inventory.entry(key) is not None

    def list(self) -> Sequence[SessionInfo]:
        """Return all segments, the last used first."""
        return self._inventory.infos()

    def counts(self) -> SessionCounts:
        """Say what there is; raises `StorageError` when the disk does not tell."""
        with _storage_errors("the sessions cannot be counted"):
            return self._counts()

    def _counts(self) -> SessionCounts:
        return SessionCounts(
            num_segments=len(self._inventory.entries()),
            size_bytes=self._changes.size_bytes(),
            largest_collection_bytes=max(self._inventory.sizes_bytes().values(), default=0),
            num_set_aside=self._changes.num_set_aside,
            written_today_bytes=self._inventory.written_today(),
            quota_bytes=self._limits.quota_bytes,
            collection_quota_bytes=self._limits.collection_quota_bytes,
            daily_write_bytes=self._limits.daily_write_bytes,
        )

    def pin(self, session_id: str) -> None:
        """Keep a segment and all before it from eviction; raises as `delete` does."""
        with self._changing():
            path = self._file_of(session_id)
            self._disk.make_mark(path.with_suffix(PIN_SUFFIX))
            self._inventory.pin(bytes.fromhex(session_id), pinned=True)

    def unpin(self, session_id: str) -> None:
        """Undo `pin`; raises as `delete` does."""
        with self._changing():
            self._disk.remove(self._file_of(session_id).with_suffix(PIN_SUFFIX))
            self._inventory.pin(bytes.fromhex(session_id), pinned=False)

    def delete(self, session_id: str) -> int:
        """Remove a segment and all that follow it, pinned or not; return how many.

        Raises:
            NotFound: There is none of that id.
            DataFolderLocked: Another process has the folder.
            StorageError: The disk refused; what is left can be deleted again.
        """
        with self._changing():
            self._file_of(session_id)
            entries = self._inventory.following([bytes.fromhex(session_id)])
            self._changes.remove(entries)
        return len(entries)

    def delete_source(self, source_id: str) -> int:
        """Remove every segment that holds or follows text of a document; return how many.

        What is being written of it is not published, nor is it ever stored again by this process.
        All that was set aside goes too, since nobody knows what is in it. Raises as `delete`, but
        for `NotFound`.
        """
        with self._changing():
            self._writer.forget_source(source_id)
            keys = [e.key for e in self._inventory.entries() if source_id in e.row.source_ids]
            entries = self._inventory.following(keys)
            self._changes.drop_set_aside()
            self._changes.remove(entries)
        return len(entries)

    def recount(self) -> SessionCounts:
        """Look at all files again, for what happened behind our back; raises as `delete_source`."""
        with self._changing():
            self._changes.tidy(self._writer.targets())
            return self._counts()

    def gc(self) -> SessionCounts:
        """Count again, remove what is of no use, and keep the quotas; raises as `delete_source`."""
        with self._changing():
            self._changes.tidy(self._writer.targets())
            self._changes.drop_set_aside()
            for name, size_bytes in self._inventory.sizes_bytes().items():
                too_many = size_bytes - self._limits.collection_quota_bytes
                self._changes.make_room_inside(name, too_many, ())
            self._changes.make_room(self._changes.size_bytes() - self._limits.quota_bytes, ())
            return self._counts()

    def verify(self) -> tuple[str, ...]:
        """Read all files; return the ids of those that are damaged, which are then set aside.

        Raises:
            StorageError: The system refused to read one.
        """
        damaged = []
        for entry in self._inventory.entries():
            path = place_of(self._path, entry.row.namespace, entry.key)
            with _storage_errors(f"{path} cannot be read"):
                if not self._is_sound(path):
                    damaged.append(entry.key.hex())
        return tuple(damaged)

    def export(self, session_id: str, target: Path) -> None:
        """Copy a segment's file, after reading all of it; the segments before it are not in it.

        Raises:
            NotFound: There is none of that id.
            StorageError: It is damaged, or the disk refused.
        """
        with _storage_errors(f"{session_id} cannot be copied to {target}"):
            path = self._file_of(session_id)
            if not self._is_sound(path):
                raise StorageError(f"the session {session_id} is damaged")
            file = SegmentFile.open(self._disk, path)
            try:
                _copy_file(self._disk, file, target)
            finally:
                file.close()

    def import_file(self, source: Path) -> Refused | None:
        """Store a copy of an exported file in the namespace that it is of; see `store`.

        It is of use when the segments before it are stored too.
        """
        if not self.is_writable:
            return Refused(RefusalReason.READ_ONLY, "another process has the sessions")
        try:
            file = SegmentFile.open(self._disk, source)
        except SegmentUnusable as error:
            return Refused(RefusalReason.INVALID, error.detail)
        except OSError as error:
            return Refused(RefusalReason.IO_ERROR, str(error))
        try:
            return self._writer.copy(file)
        finally:
            file.close()

    def _open(
        self, keys: PrefixKeys, tokens: tuple[int, ...], identity: Identity, namespace: str
    ) -> SegmentFile | FileMiss:
        """Open the file of a segment and see that it is this segment's."""
        path = place_of(self._path, namespace, keys.key)
        try:
            file = SegmentFile.open(self._disk, path)
        except FileNotFoundError:
            if self.is_writable and self._inventory.entry(keys.key):
                self._changes.forget_missing(path, keys.key)
            return self._inventory.explain(keys, identity, namespace)
        except SegmentUnusable as error:
            self._set_aside(lambda: self._changes.set_aside_unopened(path))
            return FileMiss(error.reason, error.field, error.detail)
        except OSError as error:
            return FileMiss(FileMissReason.IO_ERROR, detail=str(error))
        header, tables = file.header, file.tables
        told = (header.keys, header.identity, tables.namespace, tables.tokens)
        if told != (keys, identity.named, namespace, array("I", tokens)):
            wrong = SegmentUnusable(FileMissReason.DAMAGED, "it is another segment's")
            miss = self._damaged(file, wrong)
            file.close()
            return miss
        return file

    def _damaged(self, file: SegmentFile, error: SegmentUnusable) -> FileMiss:
        self._set_aside(lambda: self._changes.set_aside(file, error.detail))
        return FileMiss(error.reason, error.field, error.detail)

    def _is_sound(self, path: Path) -> bool:
        """Read a whole file, and set it aside if it is damaged; one that is gone is sound."""
        try:
            file = SegmentFile.open(self._disk, path)
        except FileNotFoundError:
            return True
        except SegmentUnusable:
            self._set_aside(lambda: self._changes.set_aside_unopened(path))
            return False
        try:
            file.verify()
        except SegmentUnusable as error:
            self._damaged(file, error)
            return False
        finally:
            file.close()
        return True

    def _file_of(self, session_id: str) -> Path:
        try:
            entry = self._inventory.entry(bytes.fromhex(session_id))
        except ValueError:
            entry = None
        if entry is None:
            raise NotFound(f"there is no session {session_id}")
        return place_of(self._path, entry.row.namespace, entry.key)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock of changes; the system's refusals become `StorageError`."""
        if not self.is_writable:
            raise DataFolderLocked(f"another process is using the sessions in {self._path}")
        with self._changes.lock, _storage_errors("the sessions cannot be changed"):
            yield

    def _set_aside(self, step: Callable[[], None]) -> None:
        """Set a damaged file aside, if this process may and the disk lets it."""
        try:
            if self.is_writable:
                step()
        except OSError as error:
            _log.warning("a damaged session file stays", extra={"reason": str(error)})


def _copy_file(disk: Disk, file: SegmentFile, target: Path) -> None:
    part = PartFile(disk, target, file.header.file_bytes)
    try:
        file.copy(part.write)
        part.flush()
        part.publish()
    except BaseException:
        part.abandon()
        raise


@contextmanager
def _storage_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what}: {error}") from error
