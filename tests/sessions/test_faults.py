"""A disk or an index that refuses costs a session at most; whoever asks is told why."""

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from ragflash.errors import StorageError
from ragflash.sessions import FileMissReason, RefusalReason, Refused
from ragflash.sessions.disk import Disk
from tests.sessions.samples import (
    DOCUMENT,
    RULES,
    TURN,
    fetch,
    files_of,
    find,
    is_stored,
    last_file,
    open_folder,
    read,
    store,
)

FULL = OSError(errno.ENOSPC, "No space left on device")
BROKEN = OSError(errno.EIO, "Input/output error")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")
OPERATIONS = {name for name in vars(Disk) if not name.startswith("_")} - {"touch"}


class FaultyDisk(Disk):
    """Refuses an operation when it is called for the n-th time from now on; then works again."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.fault: tuple[str, int, OSError] | None = None

    def refuse(self, name: str, error: OSError, at: int = 1) -> None:
        self.calls = {}
        self.fault = (name, at, error)

    def __getattribute__(self, name: str):
        whole = super().__getattribute__(name)
        if name not in OPERATIONS:
            return whole

        def operation(*arguments):
            self.calls[name] = self.calls.get(name, 0) + 1
            if self.fault and self.fault[:2] == (name, self.calls[name]):
                error, self.fault = self.fault[2], None
                raise error
            return whole(*arguments)

        return operation


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def folder(path, disk):
    folder = open_folder(path, disk=disk, num_readers=1)
    assert store(folder, TURN) is None
    yield folder
    folder.close()


def calls_of_a_store(folder, disk) -> dict[str, int]:
    disk.calls = {}
    assert store(folder, DOCUMENT) is None
    return dict(disk.calls)


def is_clean(path: Path) -> bool:
    return len(files_of(path)) == 2 and list(path.glob("*/*.part")) == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FULL, RefusalReason.DISK_FULL),
        (READ_ONLY, RefusalReason.READ_ONLY),
        (BROKEN, RefusalReason.IO_ERROR),
    ],
    ids=["full", "read-only", "broken"],
)
def test_a_refusal_at_any_point_of_a_store_leaves_nothing_and_the_next_one_works(
    folder, disk, path, error, reason
):
    for name, count in calls_of_a_store(folder, disk).items():
        for at in range(1, count + 1):
            disk.refuse(name, error, at)
            refused = store(folder, RULES)
            assert refused == Refused(reason, str(error)), (name, at)
            assert is_clean(path), (name, at)
            assert find(folder, RULES).reason is not FileMissReason.DAMAGED
            assert is_stored(folder, TURN)
    assert disk.fault is None
    assert store(folder, RULES) is None
    assert is_stored(folder, RULES)


def test_room_is_not_lost_by_stores_that_fail(folder, disk):
    before = folder.counts().size_bytes
    for _ in range(5):
        disk.refuse("flush", FULL)
        assert isinstance(store(folder, RULES), Refused)
    assert folder.counts().size_bytes == before
    assert folder._writer.targets() == set()


@pytest.mark.parametrize("name", ["open", "read"])
def test_what_cannot_be_read_is_a_miss_and_stays(folder, disk, path, name):
    disk.calls = {}
    assert is_stored(folder, TURN)
    for at in range(1, disk.calls[name] + 1):
        disk.refuse(name, BROKEN, at)
        found = fetch(folder, TURN)
        assert (found.reason, found.detail) == (FileMissReason.IO_ERROR, str(BROKEN)), at
        assert is_stored(folder, TURN)
    assert folder.counts().num_set_aside == 0


@pytest.mark.parametrize("most", [1, 7, 1000, 4096])
def test_reads_that_give_less_are_gone_on_with(path, most):
    class ShortDisk(Disk):
        def read(self, descriptor, into, offset):
            return super().read(descriptor, [into[0][:most]], offset)

    folder = open_folder(path, disk=ShortDisk())
    store(folder, RULES)
    assert is_stored(folder, RULES)
    folder.close()


def test_a_file_that_gets_shorter_while_it_is_read_is_damaged(folder, path):
    with find(folder, TURN) as hit:
        os.truncate(hit.files[0].path, 9000)
        miss = read(folder, last_file(hit))
        assert miss.reason is FileMissReason.DAMAGED
        assert "ends at byte 9000" in miss.detail


@pytest.mark.parametrize("name", ["make_folder", "move", "flush_folder"])
def test_a_damaged_file_that_cannot_be_set_aside_is_a_miss(folder, disk, path, name):
    (file,) = files_of(path)
    os.truncate(file, 10)
    disk.refuse(name, READ_ONLY)
    assert find(folder, TURN).reason is FileMissReason.DAMAGED
    assert disk.fault is None
    assert find(folder, TURN).reason in {FileMissReason.DAMAGED, FileMissReason.NONE_STORED}
    assert store(folder, TURN) is None
    assert is_stored(folder, TURN)


@pytest.mark.parametrize("name", ["remove", "flush_folder"])
def test_a_deletion_that_is_refused_is_told_and_can_be_tried_again(folder, disk, path, name):
    store(folder, RULES, source_ids=["doc"])
    store(folder, RULES, DOCUMENT)
    disk.refuse(name, BROKEN)
    with pytest.raises(StorageError, match="Input/output error"):
        folder.delete_source("doc")
    disk.calls = {}
    folder.delete_source("doc")
    assert disk.calls["flush_folder"] > 0  # it is lasting now, whatever was refused
    assert len(files_of(path)) == 1
    assert is_stored(folder, TURN)


def test_eviction_that_is_refused_stores_nothing(folder, disk, path):
    size = folder.list()[0].size_bytes
    folder._writer._limits = type(folder._limits)(quota_bytes=size + 100, min_free_bytes=0)
    disk.refuse("remove", BROKEN)
    assert store(folder, RULES) == Refused(RefusalReason.IO_ERROR, str(BROKEN))
    assert is_stored(folder, TURN)
    assert store(folder, RULES) is None
    assert len(files_of(path)) == 1


def test_an_index_that_fails_is_done_without(folder, path):
    folder._index._connection.execute("DROP TABLE segments")
    folder._index._connection.execute("DROP TABLE written")
    assert store(folder, RULES, source_ids=["doc"]) is None
    assert is_stored(folder, RULES)
    assert is_stored(folder, TURN)
    assert folder.delete_source("doc") == 1
    assert folder.gc().num_segments == 1


def test_a_locked_index_is_waited_for_briefly_and_then_done_without(path):
    folder = open_folder(path)
    other = sqlite3.connect(path / "index.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    folder._index._connection.execute("PRAGMA busy_timeout = 10")
    assert store(folder, RULES) is None
    assert is_stored(folder, RULES)
    other.execute("ROLLBACK")
    other.close()
    folder.close()
    folder = open_folder(path)
    assert len(folder.list()) == 1
    folder.close()


def test_a_file_system_that_takes_no_writes_is_read(path, monkeypatch):
    folder = open_folder(path)
    store(folder, RULES)
    folder.close()
    whole = os.open

    def refuse(name, flags, *mode, **options):
        if flags & os.O_CREAT:
            raise READ_ONLY
        return whole(name, flags, *mode, **options)

    monkeypatch.setattr(os, "open", refuse)
    folder = open_folder(path)
    assert not folder.is_writable
    assert is_stored(folder, RULES)
    assert store(folder, TURN).reason is RefusalReason.READ_ONLY
    folder.close()


def test_a_folder_that_cannot_be_used_is_told(path, disk):
    disk.refuse("make_folder", READ_ONLY)
    with pytest.raises(StorageError, match=r"sessions in .* cannot be used.*Read-only"):
        open_folder(path, disk=disk)
    folder = open_folder(path, disk=disk)
    assert folder.is_writable
    folder.close()


def test_leavings_that_cannot_be_removed_keep_nobody_from_starting(path, disk):
    folder = open_folder(path)
    store(folder, RULES)
    folder.close()
    left = files_of(path)[0].with_suffix(".part")
    left.write_bytes(b"half")
    disk.refuse("remove", BROKEN)
    folder = open_folder(path, disk=disk)
    assert left.exists()
    assert is_stored(folder, RULES)
    folder.gc()
    assert not left.exists()
    folder.close()
