import sqlite3
import threading

import pytest

from ragflash.errors import NotFound, VectorStoreUnavailable
from ragflash.rag.records import DocumentState, DuplicatePolicy, JobState, Scope

MINE = Scope(frozenset({"mine"}))
MARKER = "Zqxjkvbw7731"
TEXT = f"The secret word of this document is {MARKER}, and it is long. " * 40


def files_with(folder, marker: str) -> list[str]:
    needles = [marker.encode(), marker.lower().encode()]
    return [
        str(path)
        for path in folder.rglob("*")
        if path.is_file() and any(needle in path.read_bytes() for needle in needles)
    ]


def points(library) -> int:
    return len(library._eraser._index.documents())


def test_nothing_of_a_deleted_document_is_left(open_library, tmp_path):
    dropped: list[str] = []
    library = open_library(on_drop=dropped.append)
    result = library.add(MINE, "mine", f"{MARKER}.txt", TEXT.encode())
    library.wait(MINE, result.job.id, 30)
    document_id = result.document.id
    again = library.add(MINE, "mine", f"{MARKER}-copy.txt", TEXT.encode())
    assert again.deduplicated
    library.document(MINE, document_id)
    assert library.search(MINE, MARKER)
    assert files_with(tmp_path, MARKER)

    library.delete(MINE, document_id)

    assert library.search(MINE, MARKER) == []
    for read in (library.get, library.document, library.chunks, library.content_path):
        with pytest.raises(NotFound):
            read(MINE, document_id)
    with pytest.raises(NotFound):
        library.job(MINE, result.job.id)
    assert library.list(MINE).items == ()
    assert dropped == [document_id]
    assert points(library) == 0
    assert files_with(tmp_path, MARKER) == []
    library.close()
    database = sqlite3.connect(tmp_path / "data" / "library.sqlite")
    for table in ("documents", "aliases", "chunks", "terms", "jobs"):
        assert database.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    database.close()
    assert files_with(tmp_path, MARKER) == []


def test_other_documents_stay(library, add):
    doomed, kept = add("a doomed warranty"), add("a kept warranty")
    library.delete(MINE, doomed)
    assert [hit.chunk.document_id for hit in library.search(MINE, "warranty")] == [kept]
    assert library.document(MINE, kept).text == "a kept warranty"


def test_bytes_that_another_document_shares_stay(library, add):
    first = add("same words")
    second = add("same words", on_duplicate=DuplicatePolicy.KEEP)
    library.delete(MINE, first)
    assert library.content_path(MINE, second).read_bytes() == b"same words"
    assert library.document(MINE, second).text == "same words"
    library.delete(MINE, second)
    assert library._files.digests() == set()


def test_a_failed_document_can_be_deleted(library, add, parser):
    parser.fault = RuntimeError("bug")
    document_id = add("words")
    assert library.get(MINE, document_id).state is DocumentState.FAILED
    library.delete(MINE, document_id)
    assert library.list(MINE).items == ()


def test_a_waiting_document_can_be_deleted(library, parser):
    parser.gate.clear()
    running = library.add(MINE, "mine", "a.txt", b"one")
    waiting = library.add(MINE, "mine", "b.txt", b"two")
    library.delete(MINE, waiting.document.id)
    parser.gate.set()
    assert library.wait(MINE, running.job.id, 30).state is JobState.DONE
    assert parser.parsed == ["a.txt"]


def test_a_document_that_is_being_parsed_can_be_deleted(library, parser):
    parser.gate.clear()
    result = library.add(MINE, "mine", "a.txt", b"one")
    assert parser.entered.wait(30)
    library.delete(MINE, result.document.id)
    assert library.list(MINE).items == ()
    assert library._files.digests() == set()


def test_a_document_that_is_being_embedded_can_be_deleted(library, embedder):
    entered, go = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        go.wait(30)

    embedder.before_batch = hold
    result = library.add(MINE, "mine", "a.txt", TEXT.encode())
    assert entered.wait(30)
    deleting = threading.Thread(target=library.delete, args=(MINE, result.document.id))
    deleting.start()
    go.set()
    deleting.join(30)
    assert not deleting.is_alive()
    assert points(library) == 0
    assert library.search(MINE, MARKER) == []


def test_a_deletion_that_the_store_refuses_hides_at_once_and_ends_at_the_next_start(
    open_library, library, add, monkeypatch
):
    document_id = add(TEXT)

    def refuse(collection_id: str, document_id: str) -> None:
        raise VectorStoreUnavailable("down")

    monkeypatch.setattr(library._eraser._index, "delete_document", refuse)
    with pytest.raises(VectorStoreUnavailable):
        library.delete(MINE, document_id)
    assert library.search(MINE, MARKER) == []
    with pytest.raises(NotFound):
        library.get(MINE, document_id)
    library.close()

    again = open_library()
    assert points(again) == 0
    assert again._corpus.ids() == set()
    assert again._files.digests() == set()


def test_a_cache_that_fails_to_drop_is_told_again(open_library):
    calls: list[str] = []

    def fail_once(source_id: str) -> None:
        calls.append(source_id)
        if len(calls) == 1:
            raise VectorStoreUnavailable("down")

    library = open_library(on_drop=fail_once)
    result = library.add(MINE, "mine", "a.txt", b"words")
    library.wait(MINE, result.job.id, 30)
    with pytest.raises(VectorStoreUnavailable):
        library.delete(MINE, result.document.id)
    library.close()
    open_library(on_drop=fail_once)
    assert calls == [result.document.id] * 2


def test_what_no_document_owns_is_swept_at_the_start(open_library, library, add, tmp_path):
    kept = add("kept words")
    orphan = add("orphan words")
    library._database.execute("DELETE FROM documents WHERE id = ?", orphan)
    library.close()
    again = open_library()
    assert again._eraser._index.documents() == {("mine", kept)}
    assert len(again._files.digests()) == 1
    assert [hit.chunk.document_id for hit in again.search(MINE, "words")] == [kept]


def test_deleting_twice_is_not_found(library, add):
    document_id = add("words")
    library.delete(MINE, document_id)
    with pytest.raises(NotFound):
        library.delete(MINE, document_id)
