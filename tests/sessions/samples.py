"""Records and bytes for tests of session files; torch-free, since killed children use it too."""

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ragflash.kvcache.allocator import PageForm
from ragflash.kvcache.archive import Landing, MemoryLanding
from ragflash.sessions import (
    FileHit,
    FileMiss,
    Identity,
    PageItem,
    PartItem,
    Refused,
    SegmentRecord,
    SessionFolder,
    SessionLimits,
    SnapshotItem,
    StoredItem,
)
from ragflash.sessions.records import Item

# A kill leaves the page cache alone, so that a folder in memory tests the same and is faster.
SHARED_MEMORY = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
IDENTITY = Identity(
    weights="sha256:1111",
    architecture="qwen35",
    rope="base=10000000 dim=64 scaling=none",
    arithmetic="cpu float32 r1",
    chunk_plan="512",
    key_format="tq4",
    value_format="tq3_0",
    rotation="wht 128 r1",
    codebook="r1",
    key_offsets="sha256:2222",
    page_tokens=256,
    grid_tokens=2048,
    layer_plan="gdn*3 attention(4x256) x 16",
    tokenizer="sha256:3333",
    template="sha256:4444",
    rules="sha256:5555",
    drafter="sha256:6666",
    mtp="sha256:7777",
)
LIMITS = SessionLimits(quota_bytes=1 << 30, min_free_bytes=0)
RULES = tuple(range(100, 140))
DOCUMENT = tuple(range(5000, 5300))
TURN = tuple(range(9000, 9050))
ITEMS: tuple[Item, ...] = (
    PageItem(PageForm.EXACT, 0, 256, 6000),
    PageItem(PageForm.PACKED, 1, 256, 4096),
    PageItem(PageForm.EXACT, 1, 84, 6000),
    SnapshotItem(340, 0, 1000),
    SnapshotItem(340, 1, 9),
    PartItem("drafter", 5000),
    PartItem("lookup", 1),
)


def bytes_of(items: Sequence[Item], seed: object = 0) -> list[bytes]:
    chance = random.Random(str(seed))
    return [chance.randbytes(item.num_bytes) for item in items]


def record_of(
    *segments: tuple[int, ...],
    identity: Identity = IDENTITY,
    namespace: str = "mine",
    source_ids: Sequence[str] = (),
    items: Sequence[Item] = ITEMS,
    seconds: float = 1.0,
) -> SegmentRecord:
    return SegmentRecord(segments, identity, namespace, tuple(source_ids), tuple(items), seconds)


def open_folder(path: Path, limits: SessionLimits = LIMITS, **options) -> SessionFolder:
    return SessionFolder.open(path, limits, **options)


def store(folder: SessionFolder, *segments: tuple[int, ...], **fields) -> Refused | None:
    """Store the last segment with bytes that follow from its tokens."""
    record = record_of(*segments, **fields)
    return folder.store(record, bytes_of(record.items, segments))


def find(
    folder: SessionFolder,
    *segments: tuple[int, ...],
    identity: Identity = IDENTITY,
    namespace: str = "mine",
) -> FileHit | FileMiss:
    return folder.find(segments, identity=identity, namespace=namespace)


def read(folder: SessionFolder, stored: Iterable[StoredItem]) -> list[bytes] | FileMiss:
    """Return the bytes of items, or why they cannot be read."""
    items = list(stored)
    buffers = [bytearray(item.item.num_bytes) for item in items]
    landings = (MemoryLanding(memoryview(data)) for data in buffers)
    miss = folder.read(zip(items, landings, strict=True))
    return miss or [bytes(data) for data in buffers]


class CopiedLanding(Landing):
    """Keeps a copy of each piece that counts."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.landed: list[tuple[slice, bytes]] = []

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @contextmanager
    def piece(self, at: slice) -> Iterator[memoryview]:
        memory = bytearray(at.stop - at.start)
        yield memoryview(memory)
        self.landed.append((at, bytes(memory)))


def last_file(hit: FileHit) -> list[StoredItem]:
    file = hit.files[-1]
    return [StoredItem(file, extent) for extent in file.tables.extents]


def fetch(folder: SessionFolder, *segments: tuple[int, ...], **options) -> list[bytes] | FileMiss:
    """Find a whole prompt and read its last segment, or say why not."""
    hit = find(folder, *segments, **options)
    if isinstance(hit, FileMiss):
        return hit
    with hit:
        return hit.miss or read(folder, last_file(hit))


def is_stored(folder: SessionFolder, *segments: tuple[int, ...], **options) -> bool:
    """Whether the last segment is there, whole and as it was given to `store`."""
    found = fetch(folder, *segments, **options)
    return found == bytes_of(ITEMS, segments)


def files_of(path: Path) -> list[Path]:
    return sorted(path.glob("*/*.segment"))


def flip(path: Path, at: int, bit: int) -> None:
    """Turn one bit of a file over."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
