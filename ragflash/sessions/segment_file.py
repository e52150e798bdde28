"""Reading one session file: validated aside, then block by block into memory of the caller."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ragflash.kvcache.archive import FileMissReason, Landing
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

    def blocks(self, extent: Extent) -> "Iterator[_Block]":
        """Cut an item into what has a checksum each."""
        num_bytes, size = extent.item.num_bytes, self.header.block_bytes
        for start, digest in zip(range(0, num_bytes, size), extent.checksums, strict=True):
            end = min(start + size, num_bytes)
            padding = aligned(num_bytes) - num_bytes if end == num_bytes else 0
            yield _Block(self, extent.offset + start, slice(start, end), padding, digest)

    def read_block(self, block: "_Block", target: memoryview) -> None:
        """Fill memory of a block's size; raises `SegmentUnusable` when its checksum differs."""
        padding = memoryview(bytearray(block.padding))
        _fill(self._disk, self._descriptor, [target, padding], block.offset)
        if checksum(target) != block.digest or any(padding):
            detail = f"the checksum of the block at byte {block.offset} differs"
            raise SegmentUnusable(FileMissReason.DAMAGED, detail)

    def verify(self) -> None:
        """Read the whole payload; raises `SegmentUnusable` for the first block that differs."""
        largest = max((extent.item.num_bytes for extent in self.tables.extents), default=0)
        scratch = memoryview(bytearray(min(largest, self.header.block_bytes)))
        for extent in self.tables.extents:
            for block in self.blocks(extent):
                self.read_block(block, scratch[: block.at.stop - block.at.start])

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
    """Bytes `at` of an item, which lie at an offset of its file."""

    file: SegmentFile
    offset: int
    at: slice
    padding: int
    digest: bytes


class ReadFailed(Exception):
    """Reading a file failed; `cause` is `SegmentUnusable` or `OSError`."""

    def __init__(self, file: SegmentFile, cause: Exception) -> None:
        super().__init__(str(cause))
        self.file = file
        self.cause = cause


def read_items(
    pool: ThreadPoolExecutor, num_readers: int, targets: Iterable[tuple[StoredItem, Landing]]
) -> None:
    """Read items in parallel, block by block.

    Args:
        pool: Has room for `num_readers` tasks.
        num_readers: How many blocks are read at once.
        targets: Items, and where they land. It is drawn from one by one, by one thread at a time.

    Raises:
        ReadFailed: For the first block that could not be read; what landed before is sound.
    """
    work = _Work(targets)
    tasks = [pool.submit(work.run) for _ in range(num_readers)]
    wait(tasks)  # nobody writes to memory of the caller when this returns or raises
    for task in tasks:
        task.result()
    if work.failure is not None:
        raise work.failure


class _Work:
    """Blocks that several threads draw from until one of them fails."""

    def __init__(self, targets: Iterable[tuple[StoredItem, Landing]]) -> None:
        self.failure: ReadFailed | None = None
        self._blocks = _cut(targets)
        self._drawing = threading.Lock()
        self._is_over = False

    def run(self) -> None:
        try:
            while (drawn := self._draw()) is not None:
                self._land(*drawn)
        finally:
            self._is_over = True

    def _draw(self) -> tuple[_Block, Landing] | None:
        with self._drawing:
            return None if self._is_over else next(self._blocks, None)

    def _land(self, block: _Block, landing: Landing) -> None:
        try:
            with landing.piece(block.at) as memory:
                block.file.read_block(block, memory)
        except (SegmentUnusable, OSError) as error:
            self.failure = ReadFailed(block.file, error)
            self._is_over = True


def _cut(targets: Iterable[tuple[StoredItem, Landing]]) -> Iterator[tuple[_Block, Landing]]:
    for stored, landing in targets:
        if landing.num_bytes != stored.item.num_bytes:
            raise ValueError(f"{landing.num_bytes} bytes for {stored.item}")
        for block in stored.file.blocks(stored.extent):
            yield block, landing


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
