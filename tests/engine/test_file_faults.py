"""A disk that fails in whichever way, while segments are read or written, costs time and no answer.

Each reply is compared with a computed one, rows are counted, and the reason is named.
"""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ragflash.engine.cache import CacheMiss, CacheTier
from ragflash.engine.request import Finished
from ragflash.sessions import FolderArchive, RefusalReason
from ragflash.sessions.disk import Disk
from tests.engine.harness import ToyEngine, toy_engine
from tests.engine.test_file_tier import (
    CLASSES,
    IDENTITY,
    RULES,
    TOKENIZER,
    answer,
    asked,
    engine_of,
    open_archive,
)
from tests.sessions.samples import files_of
from tests.sessions.test_faults import OPERATIONS, FaultyDisk

LENGTH = 700
WHOLE = len(RULES.text) + LENGTH
ERRORS = {
    errno.ENOSPC: RefusalReason.DISK_FULL,
    errno.EROFS: RefusalReason.READ_ONLY,
    errno.EIO: RefusalReason.IO_ERROR,
}
READING = {"open", "read"}
WRITING = OPERATIONS - READING


def error_of(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class BrokenDisk(Disk):
    """Refuses some operations for as long as it is told to."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.number = errno.EIO

    def __getattribute__(self, name: str):
        if name in OPERATIONS and name in self.refused:
            raise error_of(self.number)
        return super().__getattribute__(name)


class ShortDisk(Disk):
    """Gives a few bytes a read, and none at all from a certain read on."""

    def __init__(self, most: int, num_reads: int | None = None) -> None:
        self.most = most
        self.num_left = num_reads
        self.num_reads = 0

    def read(self, descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        self.num_reads += 1
        if self.num_left is not None:
            self.num_left -= 1
            if self.num_left < 0:
                return 0
        return super().read(descriptor, [into[0][: self.most]], offset)


@pytest.fixture(scope="module")
def cold() -> Callable[[str], Finished]:
    answers: dict[str, Finished] = {}

    def computed(name: str) -> Finished:
        if name not in answers:
            with engine_of(name) as engine:
                answers[name] = answer(engine, asked(LENGTH, cache=False))
        return answers[name]

    return computed


@contextmanager
def engine_over(name: str, path: Path, disk: Disk) -> Iterator[tuple[ToyEngine, FolderArchive]]:
    make, options = CLASSES[name]
    options = {"num_pages": 128, **options, "identity": IDENTITY}
    with (
        open_archive(path, disk=disk) as archive,
        toy_engine(make(), TOKENIZER, archive=archive, **options) as engine,
    ):
        yield engine, archive
        assert engine.client.is_alive
        engine.assert_pages_are_accounted_for()


def stored(name: str, path: Path, cold: Callable[[str], Finished]) -> None:
    with engine_of(name, path) as engine:
        assert answer(engine, asked(LENGTH)).token_ids == cold(name).token_ids


@pytest.mark.parametrize("name", CLASSES)
def test_a_save_may_fail_at_any_operation(name, tmp_path, cold):
    """What was computed is answered, from memory too, and the next document is saved."""
    disk = FaultyDisk()
    with engine_over(name, tmp_path, disk) as (engine, archive):
        disk.calls = {}
        answer(engine, asked(LENGTH, namespace="whole"))
        archive.flush()
        counts = {op: count for op, count in disk.calls.items() if op in WRITING}
        assert {"make_folder", "create", "write", "flush", "move", "flush_folder"} <= {*counts}
        for operation, count in counts.items():
            for at in range(1, count + 1):
                number, reason = [*ERRORS.items()][at % len(ERRORS)]
                namespace, before = f"{operation} {at}", archive.counts()
                disk.refuse(operation, error_of(number), at)
                first = answer(engine, asked(LENGTH, namespace=namespace))
                archive.flush()
                assert disk.fault is None, namespace
                assert (first.tier, first.token_ids) == (CacheTier.NONE, cold(name).token_ids)
                after = archive.counts()
                assert after.refused[reason] == before.refused[reason] + 1, namespace
                again = answer(engine, asked(LENGTH, namespace=namespace))
                assert (again.tier, again.usage.cached_tokens) == (CacheTier.DEVICE, WHOLE)
                engine.store.drop_all()
                later = answer(engine, asked(LENGTH, namespace=namespace))
                assert later.token_ids == cold(name).token_ids
                assert later.usage.cached_tokens < WHOLE, "its file was not written"
                assert later.miss_reason is CacheMiss.NONE_STORED
        assert list(tmp_path.glob("*/*.part")) == []
        answer(engine, asked(LENGTH, namespace="next"))
        archive.flush()
        engine.store.drop_all()
        assert answer(engine, asked(LENGTH, namespace="next")).usage.cached_tokens == WHOLE


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("operation", sorted(READING))
def test_a_restore_may_fail_at_any_operation(name, operation, tmp_path, cold):
    stored(name, tmp_path, cold)
    disk = FaultyDisk()
    with engine_over(name, tmp_path, disk) as (engine, _):
        disk.calls = {}
        assert answer(engine, asked(LENGTH)).tier is CacheTier.FILE
        for at in range(1, disk.calls[operation] + 1):
            engine.store.drop_all()
            disk.refuse(operation, error_of(errno.EIO), at)
            missed = answer(engine, asked(LENGTH))
            assert (disk.fault, missed.token_ids) == (None, cold(name).token_ids)
            assert missed.usage.cached_tokens < WHOLE
            assert missed.miss_reason is CacheMiss.IO_ERROR
        engine.store.drop_all()
        assert answer(engine, asked(LENGTH)).usage.cached_tokens == WHOLE
    assert len(files_of(tmp_path)) == 2, "a file that could not be read stays"


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("most", [100, 4096])
def test_short_reads_are_gone_on_with(name, most, tmp_path, cold):
    stored(name, tmp_path, cold)
    disk = ShortDisk(most)
    with engine_over(name, tmp_path, disk) as (engine, _):
        warm = answer(engine, asked(LENGTH))
        assert (warm.tier, warm.token_ids) == (CacheTier.FILE, cold(name).token_ids)
        assert warm.usage.cached_tokens == WHOLE
        assert disk.num_reads > 4


@pytest.mark.parametrize("name", CLASSES)
def test_a_file_that_ends_while_it_is_restored_is_damaged_and_written_again(name, tmp_path, cold):
    stored(name, tmp_path, cold)
    counted = ShortDisk(1 << 20)
    with engine_over(name, tmp_path, counted) as (engine, _):
        assert answer(engine, asked(LENGTH)).tier is CacheTier.FILE
    for num_reads in range(counted.num_reads):
        disk = ShortDisk(1 << 20, num_reads)
        with engine_over(name, tmp_path, disk) as (engine, archive):
            missed = answer(engine, asked(LENGTH))
            assert missed.token_ids == cold(name).token_ids
            assert missed.usage.cached_tokens < WHOLE
            assert missed.miss_reason is CacheMiss.DAMAGED
            disk.num_left = None
            archive.flush()
        with engine_of(name, tmp_path) as engine:
            answer(engine, asked(LENGTH))
        with engine_of(name, tmp_path) as engine:
            assert answer(engine, asked(LENGTH)).usage.cached_tokens == WHOLE


@pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])
def test_a_disk_that_takes_no_writes_is_read_meanwhile(number, tmp_path, cold):
    disk = BrokenDisk()
    disk.number = number
    stored("packed", tmp_path, cold)
    with engine_over("packed", tmp_path, disk) as (engine, archive):
        disk.refused = WRITING - {"free_bytes"}
        for at in range(3):
            new = answer(engine, asked(LENGTH, namespace=f"new {at}"))
            assert (new.tier, new.token_ids) == (CacheTier.NONE, cold("packed").token_ids)
            engine.store.drop_all()
            warm = answer(engine, asked(LENGTH))
            assert (warm.tier, warm.token_ids) == (CacheTier.FILE, cold("packed").token_ids)
        archive.flush()
        counts = archive.counts()
        assert (counts.saved, counts.queued_bytes) == (0, 0)
        assert counts.refused[ERRORS[number]] >= 3
        disk.refused = set()
        answer(engine, asked(LENGTH, namespace="mended"))
        archive.flush()
        assert archive.counts().saved == 2


def test_a_disk_that_is_gone_costs_what_was_stored_until_it_is_back(tmp_path, cold):
    disk = BrokenDisk()
    stored("packed", tmp_path, cold)
    with engine_over("packed", tmp_path, disk) as (engine, _):
        disk.refused = {*OPERATIONS}
        for _ in range(3):
            missed = answer(engine, asked(LENGTH))
            assert (missed.tier, missed.token_ids) == (CacheTier.NONE, cold("packed").token_ids)
            assert missed.miss_reason is CacheMiss.IO_ERROR
            engine.store.drop_all()
        disk.refused = set()
        assert answer(engine, asked(LENGTH)).tier is CacheTier.FILE


def test_a_folder_of_a_read_only_file_system_is_read_and_nothing_is_queued(
    tmp_path, cold, monkeypatch
):
    stored("packed", tmp_path, cold)
    whole = os.open

    def refuse(name, flags, *mode, **options):
        if flags & os.O_CREAT and str(name).startswith(str(tmp_path)):
            raise error_of(errno.EROFS)
        return whole(name, flags, *mode, **options)

    monkeypatch.setattr(os, "open", refuse)
    with engine_over("packed", tmp_path, Disk()) as (engine, archive):
        warm = answer(engine, asked(LENGTH))
        assert (warm.tier, warm.token_ids) == (CacheTier.FILE, cold("packed").token_ids)
        new = answer(engine, asked(LENGTH, namespace="new"))
        assert (new.tier, new.token_ids) == (CacheTier.NONE, cold("packed").token_ids)
        archive.flush()
        counts = archive.counts()
        assert (counts.saved, counts.dropped, sum(counts.refused.values())) == (0, 0, 0)
