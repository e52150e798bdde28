"""Writing one session file: all of it under another name first, so that no reader sees a part."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import xxhash

from ragflash.sessions import format as layout
from ragflash.sessions.disk import Buffer, Disk
from ragflash.sessions.records import Item


class PartFile:
    """A file being written; it is there and lasting when `publish` has returned.

    Args:
        disk: Where to.
        target: The name it will get.
        num_bytes: Its length; the room is taken at once.

    Raises:
        OSError: The system refused; nothing is left.
    """

    def __init__(self, disk: Disk, target: Path, num_bytes: int) -> None:
        self._disk = disk
        self._target = target
        self._path = target.with_name(target.name + PART_SUFFIX)
        disk.make_folder(target.parent)
        try:
            self._descriptor = disk.create(self._path, num_bytes)
        except OSError:
            self._remove()
            raise
        self._is_open = True

    def write(self, data: Buffer, offset: int) -> None:
        """Put bytes at an offset."""
        self._disk.write(self._descriptor, data, offset)

    def flush(self) -> None:
        """Make lasting what was written; nothing can be written afterwards."""
        self._disk.flush(self._descriptor)
        self._close()

    def publish(self) -> None:
        """Give the flushed file its name, and make that lasting."""
        self._disk.move(self._path, self._target)
        self._path = self._target
        self._disk.flush_folder(self._target.parent)

    def abandon(self) -> None:
        """Remove whatever there is, after a failure of whichever step."""
        self._close()
        self._remove()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._disk.remove(self._path)


PART_SUFFIX = ".part"


def write_items(
    part: PartFile, items: Sequence[Item], payload_offset: int, buffers: Iterable[Buffer]
) -> tuple[list[int], list[tuple[bytes, ...]]]:
    """Write the bytes of items one after the other.

    Args:
        part: Has the room.
        items: What they are.
        payload_offset: Where the first one goes.
        buffers: All bytes of all items in order; an item may come in several buffers, and none
            holds bytes of two.

    Returns:
        Offset and checksums of each item.

    Raises:
        ValueError: Buffers and items do not match.
        OSError: The system refused.
    """
    offsets, _ = layout.item_offsets(payload_offset, items)
    chunks = (memoryview(buffer).cast("B") for buffer in buffers)
    digests = [
        _write_item(part, item.num_bytes, offset, chunks)
        for item, offset in zip(items, offsets, strict=True)
    ]
    if next(chunks, None) is not None:
        raise ValueError("there are more bytes than items")
    return offsets, digests


def _write_item(
    part: PartFile, num_bytes: int, offset: int, chunks: Iterator[memoryview]
) -> tuple[bytes, ...]:
    digests: list[bytes] = []
    hasher, done = xxhash.xxh3_128(), 0
    while done < num_bytes:
        chunk = next(chunks, memoryview(b""))
        if not 0 < chunk.nbytes <= num_bytes - done:
            raise ValueError(f"a buffer of {chunk.nbytes} bytes, {num_bytes - done} are to come")
        part.write(chunk, offset + done)
        while chunk:
            piece = chunk[: layout.BLOCK_BYTES - done % layout.BLOCK_BYTES]
            hasher.update(piece)
            done += piece.nbytes
            chunk = chunk[piece.nbytes :]
            if done % layout.BLOCK_BYTES == 0 or done == num_bytes:
                digests.append(hasher.digest())
                hasher.reset()
    return tuple(digests)
