"""The thread that writes, evicts and counts: it outlives what goes wrong, and ends when told."""

import logging
import threading

import pytest

from ragflash.errors import StorageError
from ragflash.kvcache.archive import SegmentCopy
from ragflash.sessions import FolderArchive, RefusalReason
from tests.sessions.samples import (
    DOCUMENT,
    IDENTITY,
    ITEMS,
    LIMITS,
    RULES,
    bytes_of,
    is_stored,
    open_folder,
)


def copy_of(*segments) -> SegmentCopy:
    buffers = tuple(map(memoryview, bytes_of(ITEMS, segments)))
    return SegmentCopy(segments, IDENTITY, "mine", frozenset(), ITEMS, buffers, 1.0)


def save(archive: FolderArchive, *segments) -> None:
    assert archive.save(1, lambda: copy_of(*segments))


def saving_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "ragflash-saves"}


@pytest.mark.parametrize("error", [StorageError("broken"), ValueError("a bug")])
def test_files_are_counted_again_and_again_whatever_happens(path, monkeypatch, caplog, error):
    folder, before = open_folder(path), saving_threads()
    times, is_twice = [], threading.Event()

    def recount():
        times.append(1)
        if len(times) == 1:
            raise error
        is_twice.set()

    monkeypatch.setattr(folder, "recount", recount)
    archive = FolderArchive(folder, recount_every_s=0.01)
    assert is_twice.wait(30)
    save(archive, RULES)
    archive.flush()
    assert is_stored(folder, RULES)
    archive.close()
    folder.close()
    assert saving_threads() <= before
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1


def test_a_file_that_was_removed_behind_our_back_is_not_counted_for_long(path, monkeypatch):
    folder = open_folder(path)
    archive = FolderArchive(folder)
    save(archive, RULES)
    archive.close()
    (file,) = path.glob("*/*.segment")
    file.unlink()
    counted, recount = threading.Event(), folder.recount

    def recounted():
        recount()
        counted.set()

    monkeypatch.setattr(folder, "recount", recounted)
    archive = FolderArchive(folder, recount_every_s=0.01)
    assert counted.wait(30)
    assert folder.counts().size_bytes == 0
    archive.close()
    folder.close()


def test_what_is_refused_is_counted_by_reason(path, monkeypatch):
    folder = open_folder(path, LIMITS.__class__(quota_bytes=1 << 30, daily_write_bytes=10))
    archive = FolderArchive(folder)
    save(archive, RULES)
    archive.flush()
    refused = archive.counts().refused
    assert {*refused, "already_stored"} == {reason.value for reason in RefusalReason}
    assert {reason for reason, count in refused.items() if count} == {"write_budget"}
    monkeypatch.setattr(folder, "store", lambda *_: 1 / 0)
    save(archive, DOCUMENT)
    archive.flush()
    assert archive.counts().refused["internal"] == 1
    archive.close()
    folder.close()
