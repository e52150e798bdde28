"""Deleting a document removes every byte of its sessions; files travel between folders."""

import pytest

from ragflash.errors import NotFound, StorageError
from ragflash.kvcache.archive import MemoryLanding
from ragflash.sessions import FileMissReason, RefusalReason, Refused, SnapshotItem
from ragflash.sessions import inventory as inventory_module
from tests.sessions.samples import (
    DOCUMENT,
    RULES,
    TURN,
    files_of,
    find,
    flip,
    is_stored,
    open_folder,
    record_of,
    store,
)

CANARY = b"CANARY-7731-of-the-document"
OTHER = b"CANARY-2290-of-another-one"


def store_mark(folder, *segments, mark: bytes, source_ids=(), namespace="mine"):
    record = record_of(
        *segments,
        items=[SnapshotItem(40, 0, len(mark))],
        source_ids=source_ids,
        namespace=namespace,
    )
    return folder.store(record, [mark])


def files_with(path, mark: bytes) -> list:
    return [file for file in path.rglob("*") if file.is_file() and mark in file.read_bytes()]


def test_all_that_holds_or_follows_a_document_goes_and_nothing_else(folder, path):
    store_mark(folder, RULES, mark=OTHER)
    store_mark(folder, RULES, DOCUMENT, mark=CANARY, source_ids=["doc_a"])
    store_mark(folder, RULES, DOCUMENT, TURN, mark=CANARY)
    store_mark(folder, RULES, TURN, mark=OTHER, source_ids=["doc_b"])
    store_mark(folder, DOCUMENT, mark=CANARY, source_ids=["doc_b", "doc_a"], namespace="bundle")
    folder.pin(folder.list()[0].id)
    assert len(files_with(path, CANARY)) == 3
    assert files_with(path, b"doc_a") != []
    assert folder.delete_source("doc_a") == 3
    assert files_with(path, CANARY) == []
    assert files_with(path, b"doc_a") == []
    assert list(path.rglob("*.pin")) == []
    assert len(files_with(path, OTHER)) == 2
    assert find(folder, DOCUMENT, namespace="bundle").reason is FileMissReason.NONE_STORED
    assert folder.delete_source("doc_a") == 0


def test_it_is_gone_for_a_scan_too_and_from_what_was_set_aside(path):
    folder = open_folder(path)
    store_mark(folder, RULES, mark=CANARY, source_ids=["doc"])
    store_mark(folder, TURN, mark=CANARY, source_ids=["doc"])
    flip(files_of(path)[0], 3, 0)
    folder.verify()
    assert len(files_with(path, CANARY)) == 2
    folder.close()
    for name in path.glob("index.sqlite*"):
        name.unlink()
    folder = open_folder(path)
    assert folder.delete_source("doc") == 1
    assert files_with(path, CANARY) == []
    assert folder.list() == []
    folder.close()


def test_what_is_being_written_of_a_deleted_document_is_not_published(folder, path):
    store_mark(folder, RULES, mark=OTHER)

    def buffers():
        yield CANARY[:5]
        assert folder.delete_source("doc") == 0
        yield CANARY[5:]

    record = record_of(
        RULES, DOCUMENT, items=[SnapshotItem(40, 0, len(CANARY))], source_ids=["doc"]
    )
    assert folder.store(record, buffers()) == Refused(RefusalReason.SOURCE_DELETED)
    assert files_with(path, CANARY) == []
    assert folder.store(record, [CANARY]) == Refused(RefusalReason.SOURCE_DELETED)
    assert len(files_of(path)) == 1


def test_deleting_a_session_takes_what_follows_it(folder):
    store(folder, RULES)
    store(folder, RULES, DOCUMENT)
    store(folder, RULES, DOCUMENT, TURN)
    store(folder, TURN)
    ids = {info.end: info.id for info in folder.list()}
    assert folder.delete(ids[len(RULES) + len(DOCUMENT)]) == 2
    assert is_stored(folder, RULES)
    assert is_stored(folder, TURN)
    with pytest.raises(NotFound):
        folder.delete(ids[len(RULES) + len(DOCUMENT)])


def test_an_exported_session_can_be_imported_elsewhere(folder, path, tmp_path):
    store(folder, RULES, source_ids=["doc"])
    store(folder, RULES, DOCUMENT)
    ids = {info.end: info.id for info in folder.list()}
    exported = {end: tmp_path / f"{end}.bin" for end in ids}
    for end, target in exported.items():
        folder.export(ids[end], target)
    other = open_folder(tmp_path / "other")
    assert other.import_file(exported[340]) is None  # an end without its beginning
    assert find(other, RULES, DOCUMENT).reason is FileMissReason.NONE_STORED
    assert other.import_file(exported[40]) is None
    assert other.import_file(exported[40]) == Refused(RefusalReason.ALREADY_STORED)
    assert is_stored(other, RULES, DOCUMENT)
    assert other.list()[0].source_ids == ("doc",)
    assert other.delete_source("doc") == 2
    other.close()
    with pytest.raises(NotFound):
        folder.export("00" * 32, tmp_path / "none")


def test_what_is_no_sound_file_is_neither_exported_nor_imported(folder, path, tmp_path):
    store(folder, RULES)
    (file,) = files_of(path)
    session_id = folder.list()[0].id
    copy = tmp_path / "copy"
    folder.export(session_id, copy)
    flip(copy, 9000, 1)
    refused = folder.import_file(copy)
    assert refused.reason is RefusalReason.INVALID
    assert folder.import_file(tmp_path / "none").reason is RefusalReason.IO_ERROR
    copy.write_bytes(b"\0" * 10_000)
    assert folder.import_file(copy).reason is RefusalReason.INVALID
    flip(file, 9000, 1)
    with pytest.raises(StorageError, match="damaged"):
        folder.export(session_id, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_file_whose_key_is_not_of_its_content_is_not_imported(path, tmp_path, monkeypatch):
    folder = open_folder(path)
    monkeypatch.setattr("ragflash.sessions.records.segment_key", lambda *_: b"k" * 32)
    monkeypatch.setattr(inventory_module, "segment_key", lambda *_: b"k" * 32)
    store(folder, RULES)
    folder.export(folder.list()[0].id, tmp_path / "copy")
    monkeypatch.undo()
    other = open_folder(tmp_path / "other")
    refused = other.import_file(tmp_path / "copy")
    assert refused == Refused(RefusalReason.INVALID, "its key is not that of its content")
    other.close()
    folder.close()


def test_two_documents_with_the_same_beginning_do_not_mix(folder):
    shared = tuple(range(300))
    marks = {(*shared, 1): b"MARK-A", (*shared, 2): b"MARK-B"}
    for tokens, mark in marks.items():
        store_mark(folder, tokens, mark=mark)
    for tokens, mark in [*marks.items(), *reversed(marks.items())]:
        with find(folder, tokens) as hit:
            (snapshot,) = hit.snapshots()[40]
            data = bytearray(len(mark))
            assert folder.read([(snapshot, MemoryLanding(memoryview(data)))]) is None
            assert bytes(data) == mark
    assert find(folder, shared).reason is FileMissReason.PREFIX_DIFFERS
