import os
import subprocess
import sys

import numpy as np
import pytest

from ragflash.errors import DataFolderLocked, DocumentTooLarge, StorageError
from ragflash.rag.files import FileStore, FolderLock
from ragflash_ingest.document import BoxTable, Document, DocumentPage, Section
from tests.processes import environment

DOCUMENT = Document(
    text="Héading\nbody 漢字\npage two",
    pages=(DocumentPage(1, "iii", 0, 15, 595.0, 842.0), DocumentPage(2, None, 16, 24)),
    sections=(Section("Héading", 1, 0),),
    media_type="application/pdf",
    encoding=None,
    warnings=("guessed",),
    parser="pdf 1",
    boxes=BoxTable.rounded(np.arange(96, dtype=np.float32).reshape(24, 4), (0, 16)),
    furniture=((0, 7),),
    title="Title",
)


@pytest.fixture
def files(tmp_path) -> FileStore:
    return FileStore(tmp_path)


def keep(files: FileStore, data: bytes) -> str:
    staged = files.stage(data, 1 << 22)
    files.keep(staged)
    return staged.sha256


def test_stores_bytes_under_their_hash(files, tmp_path):
    source = tmp_path / "x"
    source.write_bytes(b"abc" * 1_000_000)
    staged = files.stage(source, 1 << 22)
    files.keep(staged)
    assert staged.size_bytes == 3_000_000
    assert keep(files, source.read_bytes()) == staged.sha256
    assert files.blob_path(staged.sha256).read_bytes() == source.read_bytes()
    assert files.digests() == {staged.sha256}


def test_counts_bytes_and_leaves_nothing_of_what_is_too_large(files, tmp_path):
    with pytest.raises(DocumentTooLarge, match="more than 10 bytes"):
        files.stage(b"x" * 11, 10)
    assert list((tmp_path / "incoming").iterdir()) == []


def test_gives_a_document_back_as_it_was(files):
    digest = keep(files, b"x")
    files.write_document(digest, DOCUMENT)
    read = files.read_document(digest, "pdf 1")
    assert np.array_equal(read.boxes.boxes, DOCUMENT.boxes.boxes)
    assert read.boxes.page_starts == DOCUMENT.boxes.page_starts
    for name in ("text", "pages", "sections", "media_type", "warnings", "furniture", "title"):
        assert getattr(read, name) == getattr(DOCUMENT, name)


def test_keeps_a_document_in_memory_until_it_is_dropped(files):
    digest = keep(files, b"x")
    files.write_document(digest, DOCUMENT)
    assert files.read_document(digest, "pdf 1") is files.read_document(digest, "pdf 1")
    files.drop(digest)
    with pytest.raises(StorageError):
        files.read_document(digest, "pdf 1")


def test_keeps_parser_versions_apart(files):
    digest = keep(files, b"x")
    files.write_document(digest, DOCUMENT)
    with pytest.raises(StorageError, match="cannot be read"):
        files.read_document(digest, "pdf 2")


def test_names_a_damaged_document(files, tmp_path):
    digest = keep(files, b"x")
    files.write_document(digest, DOCUMENT)
    (stored,) = tmp_path.glob("parsed/*/*/*/document.json")
    stored.write_text('{"text": "x"}')
    with pytest.raises(StorageError, match="damaged"):
        files.read_document(digest, "pdf 1")


def test_drops_everything_of_an_original(files, tmp_path):
    digest = keep(files, b"x")
    files.write_document(digest, DOCUMENT)
    files.drop(digest)
    assert files.digests() == set()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_clears_what_a_crash_left_half_written(files, tmp_path):
    staged = files.stage(b"x", 10)
    again = FileStore(tmp_path)
    assert again.left_overs() == [staged.path]
    again.remove_left_overs()
    assert list((tmp_path / "incoming").iterdir()) == []


def test_a_source_that_cannot_be_read_is_a_storage_error(files, tmp_path):
    with pytest.raises(StorageError, match="cannot be stored"):
        files.stage(tmp_path / "absent", 10)


def test_folder_is_for_its_owner_only(tmp_path):
    lock = FolderLock.acquire(tmp_path / "data")
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    lock.release()


def test_second_owner_is_told_who_has_the_folder(tmp_path):
    lock = FolderLock.acquire(tmp_path)
    with pytest.raises(DataFolderLocked, match=rf"process {os.getpid()} is using"):
        FolderLock.acquire(tmp_path)
    lock.release()
    FolderLock.acquire(tmp_path).release()


def test_lock_of_a_dead_process_is_no_lock(tmp_path):
    code = "\n".join(
        [
            "import os, pathlib",
            "from ragflash.rag.files import FolderLock",
            f"lock = FolderLock.acquire(pathlib.Path({str(tmp_path)!r}))",
            "os._exit(9)",
        ]
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment(), check=False)
    assert result.returncode == 9
    FolderLock.acquire(tmp_path).release()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_a_storage_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="cannot be used"):
        FolderLock.acquire(tmp_path / "data")
    tmp_path.chmod(0o700)


def test_a_file_in_the_folder_s_place_is_a_storage_error(tmp_path):
    (tmp_path / "data").write_text("x")
    with pytest.raises(StorageError, match="cannot be used"):
        FolderLock.acquire(tmp_path / "data")
