import sqlite3

import pytest

from ragflash.errors import NotFound, StorageError
from ragflash.rag.corpus import NEXT_STATES, Corpus
from ragflash.rag.database import Database
from ragflash.rag.migrations import MIGRATIONS
from ragflash.rag.records import DocumentRecord, DocumentState, Scope
from ragflash_ingest.document import Chunk

MINE = Scope(frozenset({"mine"}))


@pytest.fixture
def database(tmp_path):
    opened = Database.open(tmp_path / "library.sqlite")
    yield opened
    opened.close()


@pytest.fixture
def corpus(database) -> Corpus:
    corpus = Corpus(database)
    corpus.add_collection("mine", "model", 0)
    return corpus


def record(id_: str, state: DocumentState = DocumentState.QUEUED, name: str = "a.txt"):
    return DocumentRecord(
        id_, "mine", name, state, "text/plain", 1, f"sha-{id_}", "p", 1, 0, 0, 0, 0, None, ("w",)
    )


def passage(index: int, text: str = "text") -> Chunk:
    return Chunk(index, 0, len(text), text, 1, 1, None)


def test_migrations_are_applied_once_and_keep_what_is_stored(tmp_path, database, corpus):
    corpus.add(record("d"))
    database.close()
    again = Database.open(tmp_path / "library.sqlite")
    assert Corpus(again).get(MINE, "d") == record("d")
    rows = again.rows("SELECT name FROM _sqlite_migrations ORDER BY id")
    again.close()
    assert [row["name"] for row in rows] == [migration.name for migration in MIGRATIONS._migrations]


@pytest.mark.parametrize("start", list(DocumentState))
@pytest.mark.parametrize("end", list(DocumentState))
def test_states_move_only_along_the_table(corpus, start, end):
    corpus.add(record("d", start))
    assert corpus.move("d", end) == (end in NEXT_STATES[start])
    found = corpus.find("d")
    assert found is not None
    assert found.state == (end if end in NEXT_STATES[start] else start)


def test_a_document_that_is_being_deleted_is_not_there(corpus):
    corpus.add(record("d", DocumentState.DELETING))
    with pytest.raises(NotFound, match="there is no document 'd'"):
        corpus.get(MINE, "d")
    assert corpus.page(MINE, limit=10) == []
    assert [tombstone.id for tombstone in corpus.tombstones()] == ["d"]


def test_pages_are_newest_first_and_stable(corpus):
    for number in range(5):
        corpus.add(record(f"d{number}"))
    first = corpus.page(MINE, limit=2)
    corpus.add(record("later"))
    rest = corpus.page(MINE, limit=9, after=first[-1].id)
    assert [r.id for r in first + rest] == ["d4", "d3", "d2", "d1", "d0"]


def test_pages_filter_by_state_and_by_any_name(corpus):
    corpus.add(record("d", DocumentState.FAILED, "Report.pdf"))
    corpus.add(record("e", name="other.txt"))
    corpus.add_alias(record("e", name="other.txt"), "copy of the ÜBERREPORT.txt")
    found = corpus.page(MINE, limit=9, name_contains="report")
    assert [r.id for r in corpus.page(MINE, limit=9, name_contains="über")] == ["e"]
    assert {r.id for r in found} == {"d", "e"}
    assert [r.id for r in corpus.page(MINE, limit=9, state=DocumentState.FAILED)] == ["d"]
    assert corpus.page(MINE, limit=9, name_contains="100%") == []


def test_passages_are_replaced_as_a_whole_and_counted(corpus):
    corpus.add(record("d", DocumentState.EMBEDDING))
    corpus.put_chunks(record("d"), [passage(0), passage(1)], {7: 2})
    corpus.put_chunks(record("d"), [passage(0, "new")], {7: 1, 8: 1})
    assert [chunk.text for chunk in corpus.chunks("d")] == ["new"]
    assert corpus.frequencies({7, 8, 9}, MINE) == {7: 1, 8: 1}
    assert corpus.total_chunks(MINE) == 1


def test_only_passages_of_searchable_documents_are_found(corpus):
    corpus.add(record("d", DocumentState.EMBEDDING))
    corpus.put_chunks(record("d"), [passage(0)], {})
    assert corpus.find_chunks(MINE, [("d", 0)]) == {}
    assert corpus.unsearchable(MINE) == {"d"}
    corpus.move("d", DocumentState.PARTIAL)
    assert list(corpus.find_chunks(MINE, [("d", 0), ("d", 1)])) == [("d", 0)]
    assert corpus.unsearchable(MINE) == frozenset()


def test_nothing_of_a_transaction_that_fails_stays(database, corpus):
    with pytest.raises(RuntimeError), database.transaction():
        corpus.add(record("d"))
        raise RuntimeError
    assert corpus.ids() == set()


def test_refusals_of_the_database_are_storage_errors(database, corpus):
    corpus.add(record("d"))
    with pytest.raises(StorageError, match="UNIQUE"):
        corpus.add(record("d"))
    with pytest.raises(StorageError, match="FOREIGN KEY"), database.transaction():
        database.execute("UPDATE documents SET collection_id = 'none'")


def test_a_file_that_is_no_database_is_a_storage_error(tmp_path):
    (tmp_path / "x").write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(StorageError, match="cannot be used"):
        Database.open(tmp_path / "x")


def test_a_full_disk_is_a_storage_error_and_nothing_is_half_stored(database, corpus):
    corpus.add(record("d", DocumentState.EMBEDDING))
    (pages,) = database.rows("PRAGMA page_count")
    database.rows(f"PRAGMA max_page_count = {pages[0] + 2}")
    with pytest.raises(StorageError, match="full"):
        corpus.put_chunks(record("d"), [passage(n, "long " * 900) for n in range(9)], {})
    assert corpus.chunks("d") == []


def test_another_writer_s_lock_is_a_storage_error(tmp_path, database, corpus):
    other = sqlite3.connect(tmp_path / "library.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    database.rows("PRAGMA busy_timeout = 1")
    with pytest.raises(StorageError, match="locked"):
        corpus.add(record("d"))
    other.close()
