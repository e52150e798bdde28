"""Reading one session file: validated aside, then block by block into buffers of the caller."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ragflash.kvcache.archive import FileMissReason
from ragflash.sessions.disk import Disk
from ragflash.sessions.format import (
    FOOTER_BYTES,
    HEADER_BYTES,
    Extent,
    Header,
    SegmentUnusable,
    Tables,
    aligned,
    check_footer,
    checksum,
    decode_header,
    decode_tables,
)
from ragflash.sessions.records import (
    Item,
)

_IO_BYTES = 1 << 20


class SegmentFile:
    """An open file whose header, tables and footer are sound; its payload is checked when read.

    It can be read to the end even if the file is removed meanwhile. Thread-safe but for `close`.

    Attributes:
        path: Where it was opened.
        header: Its first 4 KiB.
        tables: Its tables.
    """

    def __init__(
        self, disk: Disk, descriptor: int, path: Path, header: Header, tables: Tables
    ) -> None:
        self.path = path
        self.header = header
        self.tables = tables
        self._disk = disk
        self._descriptor = descriptor

    @classmethod
    def open(cls, disk: Disk, path: Path) -> Self:
        """Open and validate a file.

        Raises:
            SegmentUnusable: It is damaged, incomplete, or of another version.
            OSError: The system refused.
        """
        descriptor = disk.open(path)
        try:
            size = os.fstat(descriptor).st_size
            raw = _read(disk, descriptor, 0, min(size, HEADER_BYTES))
            header = decode_header(raw, size)
            tables_end = header.payload_offset
            tables = decode_tables(
                header, _read(disk, descriptor, HEADER_BYTES, tables_end - HEADER_BYTES)
            )
            footer = _read(disk, descriptor, size - FOOTER_BYTES, FOOTER_BYTES)
            check_footer(footer, raw, size)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(disk, descriptor, path, header, tables)

    def close(self) -> None:
        """Close the file; nothing may be reading it."""
        os.close(self._descriptor)

    def blocks(
        self, extent: Extent, buffer_of: Callable[[slice], memoryview]
    ) -> "Iterator[_Block]":
        """Cut an item into what has a checksum each; `buffer_of` gives room for such a piece."""
        num_bytes, size = extent.item.num_bytes, self.header.block_bytes
        for start, digest in zip(range(0, num_bytes, size), extent.checksums, strict=True):
            end = min(start + size, num_bytes)
            padding = aligned(num_bytes) - num_bytes if end == num_bytes else 0
            target = buffer_of(slice(start, end))
            yield _Block(self, extent.offset + start, target, padding, digest)

    def read_block(self, block: "_Block") -> None:
        """Fill a block's buffer; raises `SegmentUnusable` when its checksum differs."""
        padding = memoryview(bytearray(block.padding))
        _fill(self._disk, self._descriptor, [block.target, padding], block.offset)
        if checksum(block.target) != block.digest or any(padding):
            detail = f"the checksum of the block at byte {block.offset} differs"
            raise SegmentUnusable(FileMissReason.DAMAGED, detail)

    def verify(self) -> None:
        """Read the whole payload; raises `SegmentUnusable` for the first block that differs."""
        largest = max((extent.item.num_bytes for extent in self.tables.extents), default=0)
        scratch = memoryview(bytearray(min(largest, self.header.block_bytes)))
        for extent in self.tables.extents:
            for block in self.blocks(extent, lambda at: scratch[: at.stop - at.start]):
                self.read_block(block)

    def copy(self, write: Callable[[bytes, int], None]) -> None:
        """Hand over all bytes of the file with their offsets."""
        size = self.header.file_bytes
        for offset in range(0, size, _IO_BYTES):
            num_bytes = min(_IO_BYTES, size - offset)
            write(_read(self._disk, self._descriptor, offset, num_bytes), offset)

    def is_at(self, path: Path) -> bool:
        """Whether the file of that name is this one."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat())
        except FileNotFoundError:
            return False


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item of an open file, to be read."""

    file: SegmentFile
    extent: Extent

    @property
    def item(self) -> Item:
        """What it is."""
        return self.extent.item


@dataclass(frozen=True, slots=True)
class _Block:
    file: SegmentFile
    offset: int
    target: memoryview
    padding: int
    digest: bytes


class ReadFailed(Exception):
    """Reading a file failed; `cause` is `SegmentUnusable` or `OSError`."""

    def __init__(self, file: SegmentFile, cause: Exception) -> None:
        super().__init__(str(cause))
        self.file = file
        self.cause = cause


def read_items(
    pool: ThreadPoolExecutor,
    num_readers: int,
    targets: Iterable[tuple[StoredItem, memoryview]],
    landed: Callable[[StoredItem], None],
) -> None:
    """Read items in parallel, block by block.

    Args:
        pool: Has room for `num_readers` tasks.
        num_readers: How many blocks are read at once.
        targets: Items with buffers of their size. It is drawn from one by one, so it may wait
            until `landed` has given a buffer back.
        landed: Called from a reading thread when all of an item is there and verified.

    Raises:
        ReadFailed: For the first block that could not be read; what has landed is sound.
    """
    work = _Work(targets, landed)
    tasks = [pool.submit(work.run) for _ in range(num_readers)]
    wait(tasks)  # nobody writes into the buffers when this returns or raises
    for task in tasks:
        task.result()
    if work.failure is not None:
        raise work.failure


class _Work:
    """Blocks that several threads draw from until one of them fails."""

    def __init__(
        self,
        targets: Iterable[tuple[StoredItem, memoryview]],
        landed: Callable[[StoredItem], None],
    ) -> None:
        self.failure: ReadFailed | None = None
        self._blocks = self._cut(targets)
        self._drawing = threading.Lock()
        self._counting = threading.Lock()
        self._landed = landed
        self._missing: dict[int, int] = {}
        self._is_over = False

    def run(self) -> None:
        try:
            while (drawn := self._draw()) is not None:
                self._land(*drawn)
        finally:
            self._is_over = True

    def _draw(self) -> tuple[int, StoredItem, _Block] | None:
        with self._drawing:
            return None if self._is_over else next(self._blocks, None)

    def _land(self, number: int, stored: StoredItem, block: _Block) -> None:
        try:
            block.file.read_block(block)
        except (SegmentUnusable, OSError) as error:
            self.failure = ReadFailed(block.file, error)
            self._is_over = True
            return
        with self._counting:
            self._missing[number] -= 1
            is_last = self._missing[number] == 0
        if is_last:
            self._landed(stored)

    def _cut(
        self, targets: Iterable[tuple[StoredItem, memoryview]]
    ) -> Iterator[tuple[int, StoredItem, _Block]]:
        for number, (stored, buffer) in enumerate(targets):
            if buffer.nbytes != stored.item.num_bytes:
                raise ValueError(f"{buffer.nbytes} bytes for {stored.item}")
            with self._counting:
                self._missing[number] = len(stored.extent.checksums)
            for block in stored.file.blocks(stored.extent, buffer.cast("B").__getitem__):
                yield number, stored, block


def _read(disk: Disk, descriptor: int, offset: int, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _fill(disk, descriptor, [memoryview(data)], offset)
    return bytes(data)


def _fill(disk: Disk, descriptor: int, into: list[memoryview], offset: int) -> None:
    """Read until buffers are full; the system may give less at a time."""
    left = [buffer for buffer in into if buffer.nbytes]
    while left:
        count = disk.read(descriptor, left, offset)
        if count == 0:
            raise SegmentUnusable(FileMissReason.DAMAGED, f"it ends at byte {offset}")
        offset += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            left[0] = left[0][count:]
