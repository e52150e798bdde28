"""Cache files are whole or absent."""

import logging
import os
from pathlib import Path

import pytest

from ragflash.errors import StorageError
from ragflash.gguf.disk_cache import read_checked, write_checked


@pytest.mark.parametrize("payload", [b"", b"one\ntwo\n", bytes(range(256))])
def test_what_was_written_is_read(tmp_path: Path, payload: bytes) -> None:
    path = tmp_path / "new" / "folder" / "entry"
    write_checked(path, payload)
    assert read_checked(path) == payload
    assert list(path.parent.iterdir()) == [path]


def test_nothing_is_read_where_nothing_is(tmp_path: Path) -> None:
    assert read_checked(tmp_path / "absent") is None


@pytest.mark.parametrize("cut", [0, 10, 64, 65, 68])
def test_a_damaged_file_is_reported_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    path = tmp_path / "entry"
    write_checked(path, b"payload")
    path.write_bytes(path.read_bytes()[:cut])
    with caplog.at_level(logging.WARNING):
        assert read_checked(path) is None
    assert str(path) in caplog.text


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "entry"
    write_checked(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="No space left"):
        write_checked(path, b"new")
    assert read_checked(path) == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        write_checked(tmp_path / "file" / "entry", b"payload")
    with pytest.raises(StorageError):
        read_checked(tmp_path / "file" / "entry")
