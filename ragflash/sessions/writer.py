"""Storing segments: room first, then the file, then its name, then its row."""

import errno
import math
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ragflash.kvcache.segments import ROOT_KEY
from ragflash.sessions import format as layout
from ragflash.sessions.changes import Changes
from ragflash.sessions.disk import Buffer, Disk
from ragflash.sessions.format import Extent, Header, SegmentUnusable, Tables
from ragflash.sessions.inventory import Inventory, check_place, place_of, row_of
from ragflash.sessions.part_file import PartFile, write_items
from ragflash.sessions.records import (
    ORIGIN_COLUMNS,
    PrefixKeys,
    RefusalReason,
    Refused,
    SegmentRecord,
    prefix_keys,
)
from ragflash.sessions.segment_file import SegmentFile

_DELETED_IDS_REMEMBERED = 4096
_OS_REASONS = {
    errno.ENOSPC: RefusalReason.DISK_FULL,
    errno.EDQUOT: RefusalReason.DISK_FULL,
    errno.EROFS: RefusalReason.READ_ONLY,
    errno.EACCES: RefusalReason.READ_ONLY,
    errno.EPERM: RefusalReason.READ_ONLY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What session files may take.

    Attributes:
        quota_bytes: Of all files together, those set aside included.
        collection_quota_bytes: Of those of one namespace.
        min_free_bytes: What is left free on the file system.
        daily_write_bytes: Written a day (UTC) at most.
        min_prefill_seconds: Segments that were computed faster are not stored.
    """

    quota_bytes: int
    collection_quota_bytes: float = math.inf
    min_free_bytes: int = 1 << 30
    daily_write_bytes: float = math.inf
    min_prefill_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """A file that is being written and that nobody finds yet."""

    keys: PrefixKeys
    namespace: str
    target: Path
    num_bytes: int
    source_ids: tuple[str, ...]


class SegmentWriter:
    """Writes files. Thread-safe; several may be written at once, and found meanwhile others."""

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        inventory: Inventory,
        changes: Changes,
        limits: SessionLimits,
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._inventory = inventory
        self._changes = changes
        self._limits = limits
        self._writes: list[_Write] = []
        self._deleted_ids: dict[str, None] = {}

    def store(self, record: SegmentRecord, buffers: Iterable[Buffer]) -> Refused | None:
        """Write a segment; see `SessionFolder.store`."""
        try:
            return self._store(record, buffers)
        except OSError as error:
            return _refusal_of(error)

    def copy(self, file: SegmentFile) -> Refused | None:
        """Write a copy of a file from elsewhere, after reading all of it."""
        try:
            return self._copy(file)
        except OSError as error:
            return _refusal_of(error)
        except SegmentUnusable as error:
            return Refused(RefusalReason.INVALID, error.detail)

    def forget_source(self, source_id: str) -> None:
        """See to it that nothing with text of a document is published any more."""
        with self._changes.lock:
            self._deleted_ids[source_id] = None
            if len(self._deleted_ids) > _DELETED_IDS_REMEMBERED:
                del self._deleted_ids[next(iter(self._deleted_ids))]

    def targets(self) -> set[Path]:
        """Return the names of the files that are being written."""
        with self._changes.lock:
            return {write.target for write in self._writes}

    def _store(self, record: SegmentRecord, buffers: Iterable[Buffer]) -> Refused | None:
        if record.prefill_seconds < self._limits.min_prefill_seconds:
            return Refused(RefusalReason.NOT_WORTH_IT)
        keys = prefix_keys(record.segments, record.identity, record.namespace)[-1]
        with self._changes.lock:  # the segment before it stays until this one is under way
            parent = self._inventory.entry(keys.parent)
            if parent is None and keys.parent != ROOT_KEY:
                return Refused(RefusalReason.PARENT_NOT_STORED)
            inherited = parent.row.source_ids if parent else ()
            source_ids = tuple(dict.fromkeys((*record.source_ids, *inherited)))
            header = _plan(record, keys, source_ids)
            target = place_of(self._folder, record.namespace, keys.key)
            write = _Write(keys, record.namespace, target, header.file_bytes, source_ids)
            if refused := self._reserve(write):
                return refused
        return self._carry_out(write, lambda part: _fill(part, record, header, source_ids, buffers))

    def _copy(self, file: SegmentFile) -> Refused | None:
        target = check_place(self._folder, file)
        file.verify()
        header, tables = file.header, file.tables

        def fill(part: PartFile) -> tuple[Header, Tables]:
            file.copy(part.write)
            return header, tables

        write = _Write(header.keys, tables.namespace, target, header.file_bytes, tables.source_ids)
        return self._reserve(write) or self._carry_out(write, fill)

    def _carry_out(
        self, write: _Write, fill: Callable[[PartFile], tuple[Header, Tables]]
    ) -> Refused | None:
        """Write what room is reserved for; whatever fails, nothing of it is left."""
        part: PartFile | None = None
        is_done = False
        try:
            part = PartFile(self._disk, write.target, write.num_bytes)
            header, tables = fill(part)
            part.flush()
            with self._changes.lock:
                if self._is_deleted(write):
                    return Refused(RefusalReason.SOURCE_DELETED)
                part.publish()
                self._disk.touch(write.target, time.time())
                status = write.target.stat()
                is_done = True
                self._inventory.add(row_of(header, tables, status.st_ino), status.st_mtime)
        finally:
            if part and not is_done:
                part.abandon()
            with self._changes.lock:
                self._writes = [other for other in self._writes if other is not write]
        return None

    def _reserve(self, write: _Write) -> Refused | None:
        """Note what is to be written, if there is room or room can be made."""
        with self._changes.lock:
            if self._is_deleted(write):
                return Refused(RefusalReason.SOURCE_DELETED)
            if self._inventory.entry(write.keys.key) or write.keys.key in self._keys():
                return Refused(RefusalReason.ALREADY_STORED)
            if self._inventory.written_today() + write.num_bytes > self._limits.daily_write_bytes:
                return Refused(RefusalReason.WRITE_BUDGET)
            if reason := self._make_room(write):
                return Refused(reason)
            self._inventory.add_written(write.num_bytes)
            self._writes.append(write)
        return None

    def _make_room(self, write: _Write) -> RefusalReason | None:
        """Keep all limits with the file written, or say which one that cannot be."""
        limits, changes, name = self._limits, self._changes, write.namespace
        kept = self._inventory.ancestors(write.keys.parent)
        for other in self._writes:
            kept |= self._inventory.ancestors(other.keys.parent)
        reserved = [*self._writes, write]
        own_bytes = self._inventory.sizes_bytes()[name]
        own_bytes += sum(each.num_bytes for each in reserved if each.namespace == name)
        if not changes.make_room_inside(name, own_bytes - limits.collection_quota_bytes, kept):
            return RefusalReason.COLLECTION_QUOTA
        used_bytes = changes.size_bytes() + sum(each.num_bytes for each in reserved)
        if not changes.make_room(used_bytes - limits.quota_bytes, kept, name):
            return RefusalReason.QUOTA
        free_bytes = self._disk.free_bytes(self._folder) - limits.min_free_bytes
        if not changes.make_room(write.num_bytes - free_bytes, kept, name):
            return RefusalReason.DISK_FULL
        return None

    def _is_deleted(self, write: _Write) -> bool:
        return not self._deleted_ids.keys().isdisjoint(write.source_ids)

    def _keys(self) -> set[bytes]:
        return {write.keys.key for write in self._writes}


def _refusal_of(error: OSError) -> Refused:
    reason = _OS_REASONS.get(error.errno or 0, RefusalReason.IO_ERROR)
    return Refused(reason, str(error))


def _plan(record: SegmentRecord, keys: PrefixKeys, source_ids: tuple[str, ...]) -> Header:
    """Return the header of a file, but for the checksum of its tables."""
    header = Header(
        keys,
        record.identity.named,
        record.start,
        len(record.segments[-1]),
        len(record.items),
        layout.num_blocks(record.items, layout.BLOCK_BYTES),
        ORIGIN_COLUMNS if record.origins else 0,
        len(layout.spell_meta(record.namespace, source_ids)),
        record.prefill_seconds,
        time.time(),
        tables_checksum=b"",
        file_bytes=0,
        block_bytes=layout.BLOCK_BYTES,
    )
    _, file_bytes = layout.item_offsets(header.payload_offset, record.items)
    return replace(header, file_bytes=file_bytes)


def _fill(
    part: PartFile,
    record: SegmentRecord,
    header: Header,
    source_ids: tuple[str, ...],
    buffers: Iterable[Buffer],
) -> tuple[Header, Tables]:
    """Write payload, tables, header and footer."""
    offsets, digests = write_items(part, record.items, header.payload_offset, buffers)
    extents = (
        Extent(item, offset, layout.part_identity(item, record.identity), own)
        for item, offset, own in zip(record.items, offsets, digests, strict=True)
    )
    tokens = array("I", record.segments[-1])
    tables = Tables(tokens, record.origins, tuple(extents), record.namespace, source_ids)
    raw_tables = layout.encode_tables(tables)
    header = replace(header, tables_checksum=layout.checksum(raw_tables))
    raw_header = layout.encode_header(header)
    part.write(raw_tables, layout.HEADER_BYTES)
    part.write(raw_header, 0)
    footer = layout.encode_footer(raw_header, header.file_bytes)
    part.write(footer, header.file_bytes - layout.FOOTER_BYTES)
    return header, tables
