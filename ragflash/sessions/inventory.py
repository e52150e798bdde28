"""Which session files there are: read from the folder, kept in memory, cached in the index."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from ragflash.kvcache.archive import FileMiss, FileMissReason
from ragflash.kvcache.identity import Identity, spell
from ragflash.kvcache.segments import segment_key
from ragflash.sessions.disk import Disk
from ragflash.sessions.eviction import Entry, plan_eviction
from ragflash.sessions.format import Header, SegmentUnusable, Tables
from ragflash.sessions.index import EVICTED_KEYS_REMEMBERED, SegmentRow, SessionIndex
from ragflash.sessions.records import PrefixKeys, SessionInfo
from ragflash.sessions.segment_file import SegmentFile

FILE_SUFFIX = ".segment"
PIN_SUFFIX = ".pin"
_DAY_S = 86_400

_log = logging.getLogger(__name__)


def place_of(folder: Path, namespace: str, key: bytes) -> Path:
    """Return where a segment's file is: every namespace has a folder of its own."""
    collection = sha256(namespace.encode()).hexdigest()[:32]
    return folder / collection / (key.hex() + FILE_SUFFIX)


def check_place(folder: Path, file: SegmentFile) -> Path:
    """Return where a file belongs, whatever its name is.

    Raises:
        SegmentUnusable: Its key is not that of its tokens, identity and namespace.
    """
    header, tables = file.header, file.tables
    digest = sha256(spell(header.identity)).hexdigest()
    key = segment_key(header.keys.parent, tables.tokens, digest, tables.namespace)
    if key != header.keys.key:
        raise SegmentUnusable(FileMissReason.DAMAGED, "its key is not that of its content")
    return place_of(folder, tables.namespace, key)


class Inventory:
    """Entries by key. Thread-safe; holds its lock for no file operation but those of the index."""

    def __init__(self, disk: Disk, folder: Path, index: SessionIndex) -> None:
        self._disk = disk
        self._folder = folder
        self._index = index
        self._lock = threading.RLock()
        self._entries: dict[bytes, Entry] = {}
        self._evicted = dict.fromkeys(index.evicted())

    def recount(self) -> list[tuple[Path, SegmentUnusable]]:
        """Look at all files again, and return those that cannot be used.

        Nothing may be added or removed meanwhile.
        """
        with self._lock:
            known = {key: entry.row for key, entry in self._entries.items()}
        known = known or {row.keys.key: row for row in self._index.rows()}
        found: dict[bytes, Entry] = {}
        unusable: list[tuple[Path, SegmentUnusable]] = []
        for path in sorted(self._folder.glob(f"*/*{FILE_SUFFIX}")):
            try:
                entry = self._look_at(path, known)
            except SegmentUnusable as error:
                unusable.append((path, error))
            except OSError as error:
                _log.warning("a session file cannot be looked at", extra={"reason": str(error)})
            else:
                found[entry.key] = entry
        with self._lock:
            self._index.remove(known.keys() - found.keys())
            for key, entry in found.items():
                if known.get(key) != entry.row:
                    self._index.put(entry.row)
            self._entries = found
        return unusable

    def _look_at(self, path: Path, known: dict[bytes, SegmentRow]) -> Entry:
        status = path.stat()
        try:
            key = bytes.fromhex(path.stem)
        except ValueError as error:
            raise SegmentUnusable(FileMissReason.DAMAGED, "its name is no key") from error
        row = known.get(key)
        if (
            row is None
            or (row.size_bytes, row.inode) != (status.st_size, status.st_ino)
            or place_of(self._folder, row.namespace, key) != path
        ):
            file = SegmentFile.open(self._disk, path)
            try:
                if check_place(self._folder, file) != path:
                    raise SegmentUnusable(FileMissReason.DAMAGED, "it lies at another's place")
                row = row_of(file.header, file.tables, status.st_ino)
            finally:
                file.close()
        return Entry(row, status.st_mtime, path.with_suffix(PIN_SUFFIX).exists())

    def entry(self, key: bytes) -> Entry | None:
        """Return a copy of what is known of a file."""
        with self._lock:
            entry = self._entries.get(key)
            return replace(entry) if entry else None

    def entries(self) -> list[Entry]:
        """Return copies of all entries."""
        with self._lock:
            return [replace(entry) for entry in self._entries.values()]

    def infos(self) -> list[SessionInfo]:
        """Return all entries as lists show them, the last used first."""
        entries = sorted(self.entries(), key=lambda entry: -entry.last_used_s)
        return [_info(entry) for entry in entries]

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(self.sizes_bytes().values())

    def sizes_bytes(self) -> Counter[str]:
        """Of all files of each namespace that has any."""
        sizes: Counter[str] = Counter()
        with self._lock:
            for entry in self._entries.values():
                sizes[entry.row.namespace] += entry.row.size_bytes
        return sizes

    def add(self, row: SegmentRow, last_used_s: float) -> None:
        """Add a file that was just written."""
        with self._lock:
            self._entries[row.keys.key] = Entry(row, last_used_s, pinned=False)
            self._evicted.pop(row.keys.key, None)
            self._index.put(row)

    def remove(self, keys: Collection[bytes], *, evicted: bool = False) -> None:
        """Forget files that were removed."""
        with self._lock:
            for key in keys:
                self._entries.pop(key, None)
            self._index.remove(keys)
            if evicted:
                self._evicted |= dict.fromkeys(keys)
                self._index.add_evicted(keys)
                while len(self._evicted) > EVICTED_KEYS_REMEMBERED:
                    del self._evicted[next(iter(self._evicted))]

    def touch(self, keys: Iterable[bytes], now_s: float) -> None:
        """Note that files were used."""
        with self._lock:
            for key in keys:
                if entry := self._entries.get(key):
                    entry.last_used_s = now_s

    def pin(self, key: bytes, *, pinned: bool) -> None:
        """Note whether a file is pinned."""
        with self._lock:
            if entry := self._entries.get(key):
                entry.pinned = pinned

    def following(self, keys: Collection[bytes]) -> list[Entry]:
        """Return entries and all that follow them, the last of a run first."""
        with self._lock:
            found = [self._entries[key] for key in keys if key in self._entries]
            seen = {entry.key for entry in found}
            for parent in found:  # grows meanwhile
                new = [e for e in self._entries.values() if e.parent == parent.key]
                found += [entry for entry in new if entry.key not in seen]
                seen |= {entry.key for entry in new}
            return sorted(found, key=lambda entry: -entry.row.end)

    def ancestors(self, key: bytes) -> set[bytes]:
        """Return a key and those before it."""
        found = set()
        with self._lock:
            while (entry := self._entries.get(key)) is not None:
                found.add(key)
                key = entry.parent
        return found

    def plan_eviction(
        self, num_bytes: float, kept: Collection[bytes], first: str | None
    ) -> Sequence[Entry] | None:
        """See `eviction.plan_eviction`."""
        with self._lock:
            return plan_eviction(self._entries, num_bytes, kept, time.time(), first)

    def plan_eviction_inside(
        self, namespace: str, num_bytes: float, kept: Collection[bytes]
    ) -> Sequence[Entry] | None:
        """See `eviction.plan_eviction`; entries of other namespaces stay."""
        with self._lock:
            own = {key: e for key, e in self._entries.items() if e.row.namespace == namespace}
            return plan_eviction(own, num_bytes, kept, time.time())

    def explain(self, keys: PrefixKeys, identity: Identity, namespace: str) -> FileMiss:
        """Say why there is no file of a key."""
        with self._lock:
            if keys.key in self._evicted:
                return FileMiss(FileMissReason.EVICTED)
            rows = [e.row for e in self._entries.values() if e.row.namespace == namespace]
        for row in sorted(rows, key=lambda row: -row.created_s):
            if row.keys.lineage == keys.lineage and (field := identity.difference(row.identity)):
                return FileMiss(FileMissReason.IDENTITY_DIFFERS, field)
        if any(row.keys.parent == keys.parent for row in rows):
            return FileMiss(FileMissReason.PREFIX_DIFFERS)
        return FileMiss(FileMissReason.NONE_STORED)

    def written_today(self) -> int:
        """Return how many bytes were written today (UTC); what files say if nobody counted."""
        day = int(time.time()) // _DAY_S
        with self._lock:
            counted = self._index.written(day)
            if counted is not None:
                return counted
            rows = (entry.row for entry in self._entries.values())
            return sum(row.size_bytes for row in rows if int(row.created_s) // _DAY_S == day)

    def add_written(self, num_bytes: int) -> None:
        """Count bytes that were written."""
        with self._lock:
            day = int(time.time()) // _DAY_S
            self._index.set_written(day, self.written_today() + num_bytes)


def row_of(header: Header, tables: Tables, inode: int) -> SegmentRow:
    """Return what the index keeps of a file."""
    return SegmentRow(
        header.keys,
        tables.namespace,
        tables.source_ids,
        header.identity,
        header.num_tokens,
        header.start + header.num_tokens,
        header.file_bytes,
        inode,
        header.prefill_seconds,
        header.created_s,
    )


def _info(entry: Entry) -> SessionInfo:
    row = entry.row
    return SessionInfo(
        row.keys.key.hex(),
        row.namespace,
        row.source_ids,
        row.num_tokens,
        row.end,
        row.size_bytes,
        row.prefill_seconds,
        row.created_s,
        entry.last_used_s,
        entry.pinned,
    )
