"""Whatever refuses is told by its right name, loses nothing, and stops no other document."""

import errno
import sqlite3
import threading
from collections.abc import Callable

import pytest

from ragflash.errors import ModelMissing, NotFound, StorageError, VectorStoreUnavailable
from ragflash.rag import database, ingest, job_worker
from ragflash.rag.disk import Disk
from ragflash.rag.library import Library, LibraryConfig
from ragflash.rag.records import DocumentState, DuplicatePolicy, JobState, Scope
from ragflash_ingest.document import FailureReason, ParseError

MINE = Scope(frozenset({"mine"}))
FULL = OSError(errno.ENOSPC, "No space left on device")
BROKEN = OSError(errno.EIO, "Input/output error")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")
DOWN = VectorStoreUnavailable("the vector store does not answer")
NO_MODEL = ModelMissing("there is no embedding model")


@pytest.fixture
def refuse(monkeypatch) -> Callable[..., None]:
    """Makes one call of a method raise: the `at`-th from now on; the next ones are as before."""

    def install(owner: object, name: str, error: Exception, at: int = 1) -> None:
        whole, calls = getattr(owner, name), []

        def method(*args, **options):
            calls.append(None)
            if len(calls) == at:
                raise error
            return whole(*args, **options)

        monkeypatch.setattr(owner, name, method)

    return install


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(job_worker, "_RETRY_S", 0.01)
    monkeypatch.setattr(ingest, "RETRY_PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_S", 0.01)


def index_of(library: Library):
    return library._eraser._index


def part_of(library: Library, name: str) -> object:
    return {
        "disk": Disk,
        "index": index_of(library),
        "embedder": library._embedder,
    }[name]


def assert_in_line(library: Library, tmp_path) -> None:
    embedder = library._embedder
    library.close()
    found = Library.reconcile(LibraryConfig(tmp_path / "data"), embedder, dry_run=True)
    assert found.is_clean, found


def refuse_work(library, parser, refuse, part: str, method: str, at: int, error) -> tuple:
    """Add two documents, and have the work on the first one meet a fault."""
    parser.gate.clear()
    if part == "parser":
        refuse(parser, method, error, at)
    first = library.add(MINE, "mine", "a.txt", b"first words")
    second = library.add(MINE, "mine", "b.txt", b"second words")
    if part != "parser":  # what uploads need too is refused once they are there
        refuse(part_of(library, part), method, error, at)
    parser.gate.set()
    return first, second


@pytest.mark.parametrize(
    ("part", "method", "at", "error", "code"),
    [
        ("disk", "make_folder", 1, FULL, "storage_error"),
        ("disk", "write", 1, FULL, "storage_error"),
        ("disk", "write", 1, BROKEN, "storage_error"),
        ("disk", "move", 1, READ_ONLY, "storage_error"),
        ("index", "count", 1, DOWN, "store_unavailable"),
        ("index", "count", 2, DOWN, "store_unavailable"),
        ("index", "upsert", 1, DOWN, "store_unavailable"),
        ("index", "flush", 1, DOWN, "store_unavailable"),
        ("parser", "parse", 1, BROKEN, "storage_error"),
    ],
)
def test_a_fault_that_passes_puts_one_document_off_and_loses_nothing(
    library, parser, refuse, tmp_path, monkeypatch, part, method, at, error, code
):
    monkeypatch.setattr(ingest, "RETRY_PAUSES_S", (3600.0,))
    first, second = refuse_work(library, parser, refuse, part, method, at, error)
    assert library.wait(MINE, second.job.id, 30).state is JobState.DONE
    job = library.job(MINE, first.job.id)
    assert (job.state, job.code) == (JobState.QUEUED, code)
    assert str(error) in job.detail
    assert job.retry_at_ms > job.created_ms + 1_800_000
    document = library.get(MINE, first.document.id)
    assert document.state in {DocumentState.PARSING, DocumentState.EMBEDDING}
    assert document.reason == code
    assert library.content_path(MINE, document.id).read_bytes() == b"first words"
    assert {hit.chunk.document_id for hit in library.search(MINE, "words")} == {second.document.id}

    library.add(MINE, "mine", "a.txt", b"first words")  # sending it again tries at once
    job = library.wait(MINE, first.job.id, 30)
    assert (job.state, job.code, job.detail, job.retry_at_ms) == (JobState.DONE, None, None, None)
    assert library.get(MINE, document.id).reason is None
    assert index_of(library).count("mine", document.id) == 1
    assert_in_line(library, tmp_path)


@pytest.mark.parametrize(
    ("part", "method", "error", "code", "reason"),
    [
        ("embedder", "encode_documents", NO_MODEL, "model_missing", "model_missing"),
        ("embedder", "encode_documents", MemoryError(), "internal_error", "internal_error"),
        ("parser", "parse", MemoryError(), "internal_error", "internal_error"),
        (
            *("parser", "parse"),
            ParseError(FailureReason.OUT_OF_MEMORY, "the file needs more memory than is allowed"),
            *("document_unreadable", "out_of_memory"),
        ),
    ],
)
def test_a_fault_that_stays_fails_one_document_by_its_name(
    library, parser, refuse, tmp_path, part, method, error, code, reason
):
    first, second = refuse_work(library, parser, refuse, part, method, 1, error)
    job = library.wait(MINE, first.job.id, 30)
    assert (job.state, job.code) == (JobState.FAILED, code)
    assert getattr(error, "detail", str(error)) in job.detail or code == "internal_error"
    assert library.get(MINE, first.document.id).reason == reason
    assert library.content_path(MINE, first.document.id).read_bytes() == b"first words"
    assert library.wait(MINE, second.job.id, 30).state is JobState.DONE

    again = library.add(MINE, "mine", "a.txt", b"first words")
    assert library.wait(MINE, again.job.id, 30).state is JobState.DONE
    assert index_of(library).count("mine", again.document.id) == 1
    assert_in_line(library, tmp_path)


@pytest.mark.parametrize("error", [FULL, BROKEN, READ_ONLY], ids=["full", "broken", "read-only"])
@pytest.mark.parametrize("method", ["write", "make_folder", "move"])
def test_a_disk_that_refuses_an_upload_keeps_nothing_of_it(
    library, add, refuse, tmp_path, method, error
):
    kept = add("kept words")
    refuse(Disk, method, error)
    with pytest.raises(StorageError, match=error.strerror):
        library.add(MINE, "mine", "a.txt", b"refused words")
    assert [document.id for document in library.list(MINE).items] == [kept]
    assert library._files.left_overs() == []
    assert library.get(MINE, add("refused words")).state is DocumentState.READY
    assert_in_line(library, tmp_path)


def test_a_disk_that_is_full_in_the_middle_of_an_upload_keeps_no_part(
    library, monkeypatch, tmp_path
):
    whole = Disk.write

    def write(disk, path, blocks):
        def until_full():
            yield from blocks
            raise FULL

        whole(disk, path, until_full())

    monkeypatch.setattr(Disk, "write", write)
    with pytest.raises(StorageError, match="No space left"):
        library.add(MINE, "mine", "a.txt", b"words")
    assert library._files.left_overs() == []
    assert_in_line(library, tmp_path)


@pytest.mark.parametrize("method", ["make_folder", "read"])
def test_a_folder_that_cannot_be_used_is_told_and_given_back(open_library, refuse, method):
    refuse(Disk, method, READ_ONLY)
    if method == "make_folder":
        with pytest.raises(StorageError, match=r"data folder .* cannot be used.*Read-only"):
            open_library()
    library = open_library()
    result = library.add(MINE, "mine", "a.txt", b"words")
    library.wait(MINE, result.job.id, 30)
    if method == "read":
        with pytest.raises(StorageError, match=r"cannot be read.*Read-only"):
            library.document(MINE, result.document.id)
    assert library.document(MINE, result.document.id).text == "words"


@pytest.mark.parametrize(
    ("part", "method", "error"),
    [
        ("disk", "remove", BROKEN),
        ("disk", "remove_folder", BROKEN),
        ("index", "delete_document", DOWN),
    ],
)
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_deletion_that_is_refused_hides_and_is_finished_by_the_next_one_or_the_next_start(
    open_library, library, add, refuse, tmp_path, part, method, error, by_hand
):
    doomed, kept = add("doomed words"), add("kept words")
    refuse(part_of(library, part), method, error)
    with pytest.raises((StorageError, VectorStoreUnavailable)):
        library.delete(MINE, doomed)
    with pytest.raises(NotFound):
        library.get(MINE, doomed)
    assert {hit.chunk.document_id for hit in library.search(MINE, "words")} == {kept}
    if by_hand:
        library.delete(MINE, doomed)
        with pytest.raises(NotFound):
            library.delete(MINE, doomed)
    library.close()
    again = open_library()
    assert again._corpus.ids() == {kept}
    assert index_of(again).documents() == {("mine", kept)}
    assert_in_line(again, tmp_path)


def test_a_deletion_that_was_refused_is_finished_by_the_next_job(library, add, refuse, tmp_path):
    doomed = add("doomed words")
    refuse(index_of(library), "delete_document", DOWN)
    with pytest.raises(VectorStoreUnavailable):
        library.delete(MINE, doomed)
    later = library.add(MINE, "mine", "b.txt", b"later words")
    library.wait(MINE, later.job.id, 30)
    library._worker.leave(later.document.id)
    assert library._corpus.ids() == {later.document.id}
    assert index_of(library).documents() == {("mine", later.document.id)}
    assert_in_line(library, tmp_path)


def test_a_replaced_document_that_cannot_be_erased_does_not_harm_the_new_one(
    open_library, library, add, refuse, tmp_path
):
    add("same words")
    refuse(index_of(library), "delete_document", DOWN)
    new = add("same words", on_duplicate=DuplicatePolicy.REPLACE)
    assert library.get(MINE, new).state is DocumentState.READY
    assert {hit.chunk.document_id for hit in library.search(MINE, "same")} == {new}
    library.close()
    again = open_library()
    assert again._corpus.ids() == {new}
    assert_in_line(again, tmp_path)


def test_points_that_cannot_be_removed_after_a_fault_go_at_the_next_start(
    open_library, library, refuse, monkeypatch
):
    monkeypatch.setattr(ingest, "RETRY_PAUSES_S", ())
    refuse(index_of(library), "flush", DOWN)
    refuse(index_of(library), "delete_document", DOWN)
    result = library.add(MINE, "mine", "a.txt", b"some words")
    assert library.wait(MINE, result.job.id, 30).code == "store_unavailable"
    assert library.search(MINE, "words") == []
    library.close()
    assert index_of(open_library()).documents() == set()


def test_a_locked_database_is_told_and_work_goes_on_when_it_is_free(open_library, parser, tmp_path):
    library = open_library()
    parser.gate.clear()
    running = library.add(MINE, "mine", "a.txt", b"first words")
    assert parser.entered.wait(30)
    other = sqlite3.connect(tmp_path / "data" / "library.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match="database is locked"):
        library.add(MINE, "mine", "b.txt", b"second words")
    parser.gate.set()
    other.execute("ROLLBACK")
    other.close()
    assert library.wait(MINE, running.job.id, 30).state.is_final
    second = library.add(MINE, "mine", "b.txt", b"second words")
    assert library.wait(MINE, second.job.id, 30).state is JobState.DONE
    assert_in_line(library, tmp_path)


@pytest.mark.parametrize("pragma", ["max_page_count = 1", "query_only = ON"])
def test_a_database_that_takes_no_writes_is_told_and_nothing_is_lost(
    library, add, tmp_path, pragma
):
    kept = add("kept words")
    undo = "max_page_count = 1000000" if "page" in pragma else "query_only = OFF"
    library._database.rows(f"PRAGMA {pragma}")
    big = ("Words that fill pages. " * 500).encode()
    with pytest.raises(StorageError, match=r"full|readonly"):
        for number in range(200):
            library.add(MINE, "mine", f"{number}.txt", big + str(number).encode())
    assert library.search(MINE, "kept")[0].chunk.document_id == kept
    library._database.rows(f"PRAGMA {undo}")
    for document in library.list(MINE, limit=300).items:
        assert library.wait(MINE, library._jobs.of_document(document.id).id, 60).state.is_final
    assert library.health().worker_alive
    assert library.get(MINE, add("later words")).state is DocumentState.READY
    assert_in_line(library, tmp_path)


@pytest.mark.parametrize("method", ["claim", "move", "advance"])
def test_a_job_that_cannot_be_begun_or_ended_is_tried_again(library, refuse, method):
    refuse(library._jobs, method, StorageError("the library's database cannot be written"))
    result = library.add(MINE, "mine", "a.txt", b"some words")
    job = library.wait(MINE, result.job.id, 30)
    assert job.state is JobState.DONE
    assert library.health().worker_alive


def test_a_slow_disk_holds_up_nobody_else(library, add, monkeypatch):
    kept = add("kept words")
    entered, go = threading.Event(), threading.Event()
    whole = Disk.write

    def write(disk, path, blocks):
        entered.set()
        assert go.wait(30)
        whole(disk, path, blocks)

    monkeypatch.setattr(Disk, "write", write)
    added = []
    upload = threading.Thread(
        target=lambda: added.append(library.add(MINE, "mine", "b.txt", b"slow words"))
    )
    upload.start()
    assert entered.wait(30)
    assert [hit.chunk.document_id for hit in library.search(MINE, "words")] == [kept]
    assert library.health().documents == {"ready": 1}
    go.set()
    upload.join(30)
    assert library.wait(MINE, added[0].job.id, 30).state is JobState.DONE
