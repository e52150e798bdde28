import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ragflash.errors import (
    Conflict,
    DataFolderLocked,
    DocumentTooLarge,
    IndexMismatch,
    NotFound,
    StorageError,
    UnsafeName,
)
from ragflash.rag.embed import packaged_embedder
from ragflash.rag.library import Library, LibraryConfig
from ragflash.rag.records import DocumentState, DuplicatePolicy, JobState, Scope
from tests.processes import environment

MINE = Scope(frozenset({"mine"}))
TWO = Scope(frozenset({"mine", "theirs"}))


def test_keeps_documents_over_a_restart(open_library, library, add):
    document_id = add("The warranty lasts two years.")
    before = library.get(MINE, document_id)
    library.close()
    again = open_library()
    assert again.get(MINE, document_id) == before
    assert again.document(MINE, document_id).text == "The warranty lasts two years."
    assert [hit.chunk.document_id for hit in again.search(MINE, "warranty")] == [document_id]


def test_gives_the_original_bytes_back(library, add, tmp_path):
    document_id = add("words")
    path = library.content_path(MINE, document_id)
    assert path.read_bytes() == b"words"
    assert path.is_relative_to(tmp_path / "data")


def test_takes_a_file_by_its_path(library, tmp_path):
    (tmp_path / "source").write_bytes(b"from a file")
    result = library.add(MINE, "mine", "a.txt", tmp_path / "source")
    assert library.wait(MINE, result.job.id, 30).state is JobState.DONE
    assert (tmp_path / "source").exists()
    assert library.document(MINE, result.document.id).text == "from a file"


def test_text_before_parsing_is_a_conflict(library, parser):
    parser.gate.clear()
    result = library.add(MINE, "mine", "a.txt", b"words")
    assert library.chunks(MINE, result.document.id) == []
    with pytest.raises(Conflict, match="there is no text yet"):
        library.document(MINE, result.document.id)


def test_lists_newest_first_in_pages(library, add):
    ids = [add(f"text {n}", f"{n}.txt") for n in range(3)]
    page = library.list(MINE, limit=2)
    assert [item.id for item in page.items] == [ids[2], ids[1]]
    assert page.has_more
    rest = library.list(MINE, limit=2, after=page.items[-1].id)
    assert [item.id for item in rest.items] == [ids[0]]
    assert not rest.has_more
    assert [item.id for item in library.list(MINE, name_contains="1.TXT").items] == [ids[1]]
    assert library.list(MINE, state=DocumentState.FAILED).items == ()


@pytest.mark.parametrize("name", ["../x.txt", "..\\x.txt", "/etc/x.txt", "C:\\x.txt", "ｘ／ｙ.txt"])
def test_a_name_is_a_label_and_no_path(library, add, name, tmp_path):
    before = set(tmp_path.rglob("*"))
    document_id = add("words", name)
    assert set(library.get(MINE, document_id).name).isdisjoint("/\\／")
    written = set(tmp_path.rglob("*")) - before
    assert all(path.is_relative_to(tmp_path / "data") for path in written)
    assert not [path for path in written if path.name.endswith(".txt")]


@pytest.mark.parametrize("name", ["", "..", "x.txt\0.pdf", "a" * 300, "exe\u202etxt"])
def test_a_name_that_cannot_be_shown_is_refused(library, name):
    with pytest.raises(UnsafeName):
        library.add(MINE, "mine", name, b"words")
    assert library.list(MINE).items == ()


def test_two_files_of_one_name_stay_two_documents(library, add):
    first, second = add("one report", "report.pdf"), add("two report", "report.pdf")
    assert first != second
    assert {hit.chunk.document_id for hit in library.search(MINE, "report")} == {first, second}


def test_too_many_bytes_are_refused(open_library):
    library = open_library(max_bytes=10)
    with pytest.raises(DocumentTooLarge):
        library.add(MINE, "mine", "a.txt", b"x" * 11)
    assert library.list(MINE).items == ()


def test_a_source_that_cannot_be_read_is_a_storage_error(library, tmp_path):
    with pytest.raises(StorageError):
        library.add(MINE, "mine", "a.txt", tmp_path / "absent")


def test_the_same_bytes_are_worked_on_once(library, parser):
    parser.gate.clear()
    results = []
    threads = [
        threading.Thread(
            target=lambda n=n: results.append(library.add(MINE, "mine", f"{n}.txt", b"same"))
        )
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    parser.gate.set()
    assert len({result.document.id for result in results}) == 1
    assert len({result.job.id for result in results}) == 1
    assert [result.deduplicated for result in results].count(False) == 1
    library.wait(MINE, results[0].job.id, 30)
    assert len(parser.parsed) == 1


def test_the_same_bytes_under_another_name_are_found_by_both(library, add):
    document_id = add("same", "one.txt")
    again = library.add(MINE, "mine", "two.txt", b"same")
    assert again.deduplicated
    assert again.document.id == document_id
    assert [item.id for item in library.list(MINE, name_contains="two").items] == [document_id]


def test_keep_keeps_both(library, add):
    first = add("same words")
    second = add("same words", on_duplicate=DuplicatePolicy.KEEP)
    assert {hit.chunk.document_id for hit in library.search(MINE, "same")} == {first, second}


def test_replace_swaps_when_the_new_one_is_searchable(library, add, parser):
    old = add("same words")
    parser.gate.clear()
    new = library.add(MINE, "mine", "b.txt", b"same words", on_duplicate=DuplicatePolicy.REPLACE)
    assert {hit.chunk.document_id for hit in library.search(MINE, "same")} == {old}
    parser.gate.set()
    library.wait(MINE, new.job.id, 30)
    assert {hit.chunk.document_id for hit in library.search(MINE, "same")} == {new.document.id}
    with pytest.raises(NotFound):
        library.get(MINE, old)
    assert library.content_path(MINE, new.document.id).read_bytes() == b"same words"


def test_replace_that_fails_keeps_the_old_one(library, add, parser):
    old = add("same words")
    parser.fault = RuntimeError("bug")
    new = add("same words", on_duplicate=DuplicatePolicy.REPLACE)
    assert library.get(MINE, new).state is DocumentState.FAILED
    assert {hit.chunk.document_id for hit in library.search(MINE, "same")} == {old}


def test_bytes_that_failed_are_tried_again(library, add, parser):
    parser.fault = RuntimeError("bug")
    failed = add("same words")
    parser.fault = None
    again = add("same words")
    assert library.get(MINE, again).state is DocumentState.READY
    assert [item.id for item in library.list(MINE).items] == [again]
    with pytest.raises(NotFound):
        library.get(MINE, failed)


def test_collections_do_not_share_duplicates(library, add):
    add("same words")
    other = library.add(TWO, "theirs", "a.txt", b"same words")
    assert not other.deduplicated


def test_the_folder_has_one_owner(open_library, library, tmp_path):
    with pytest.raises(DataFolderLocked, match=str(os.getpid())):
        open_library()
    code = "\n".join(
        [
            "import pathlib, sys",
            "from ragflash.errors import DataFolderLocked",
            "from ragflash.rag.files import FolderLock",
            "try:",
            f"    FolderLock.acquire(pathlib.Path({str(tmp_path / 'data')!r}))",
            "except DataFolderLocked as error:",
            "    sys.exit(str(error))",
        ]
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), check=False, capture_output=True, text=True
    )
    assert f"process {os.getpid()} is using" in result.stderr


def test_another_embedding_model_is_refused_with_both_names(open_library, library, add, embedder):
    add("words")
    library.close()
    other = type(embedder)(dim=32, name="other")
    with pytest.raises(IndexMismatch, match=r"hash dim=64.*other dim=32.*ragflash reindex"):
        open_library(embedder=other)
    open_library()


def test_an_empty_library_takes_another_embedding_model(open_library, library, add, embedder):
    library.delete(MINE, add("words"))
    library.close()
    again = open_library(embedder=type(embedder)(dim=32, name="other"))
    result = again.add(MINE, "mine", "a.txt", b"words")
    assert again.wait(MINE, result.job.id, 30).state is JobState.DONE


def test_a_failed_start_gives_the_folder_back(open_library, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "library.sqlite").write_bytes(b"not a database, but long enough" * 100)
    with pytest.raises(StorageError):
        open_library()
    (data / "library.sqlite").unlink()
    open_library()


def test_health_counts(library, add, parser):
    add("words")
    health = library.health()
    assert health.documents == {"ready": 1}
    assert (health.chunks, health.open_jobs, health.worker_alive) == (1, 0, True)
    assert health.free_bytes > 0


def test_a_real_file_through_real_parts(tmp_path: Path):
    """The pool of parser processes, the packaged model and the store, on a page of HTML."""
    page = (
        b"<html><body><h1>Terms</h1><p>The warranty lasts two years.</p>"
        b"<h1>Pets</h1><p>Cats sleep most of the day.</p></body></html>"
    )
    library = Library.open(LibraryConfig(tmp_path / "data"), packaged_embedder())
    try:
        result = library.add(MINE, "mine", "terms.html", page)
        job = library.wait(MINE, result.job.id, 120)
        assert job.state is JobState.DONE, job
        hits = library.search(MINE, "How long is the guarantee?")
        assert "two years" in hits[0].chunk.text
        assert library.get(MINE, result.document.id).media_type == "text/html"
        rows = library.embed_texts(["guarantee", "warranty", "cats"])
        assert rows[0] @ rows[1] > rows[0] @ rows[2]
    finally:
        library.close()
