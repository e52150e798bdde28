"""Who works on a job, for how long, and how often."""

import sqlite3
import threading

import pytest
from sqlite_utils import Database as MigratedDatabase

from ragflash.rag import jobs
from ragflash.rag.corpus import Corpus
from ragflash.rag.database import Database
from ragflash.rag.files import StagedBlob
from ragflash.rag.job_worker import JobControl
from ragflash.rag.jobs import MAX_ATTEMPTS, JobInterrupted, JobTable
from ragflash.rag.library import _new_record
from ragflash.rag.migrations import MIGRATIONS
from ragflash.rag.records import DocumentState, DuplicatePolicy, JobKind, JobState, Scope

MINE = Scope(frozenset({"mine"}))


@pytest.fixture
def database(tmp_path):
    opened = Database.open(tmp_path / "library.sqlite")
    yield opened
    opened.close()


@pytest.fixture
def table(database, tmp_path) -> JobTable:
    """A table with one job that waits."""
    corpus = Corpus(database)
    corpus.add_collection("mine", "x", 0)
    document = _new_record("mine", "a.txt", StagedBlob(tmp_path, "ab", 1))
    corpus.add(document)
    table = JobTable(database)
    table.add(document, 0)
    return table


def test_a_job_has_one_claimant(table):
    assert table.claim("one", JobKind.INGEST).job.state is JobState.RUNNING
    assert table.claim("two", JobKind.INGEST) is None
    assert table.claim("one", JobKind.INGEST) is not None


def test_a_lease_that_ran_out_is_free(table, monkeypatch):
    first = table.claim("one", JobKind.INGEST)
    now_ms = jobs.now_ms()
    monkeypatch.setattr(jobs, "now_ms", lambda: now_ms + jobs.LEASE_MS + 1)
    assert table.renew(first)
    assert table.claim("two", JobKind.INGEST) is None
    monkeypatch.setattr(jobs, "now_ms", lambda: now_ms + 3 * jobs.LEASE_MS)
    assert table.claim("two", JobKind.INGEST).attempts == 2
    assert not table.renew(first)


def test_a_claimant_that_lost_its_lease_stops_before_it_writes(table, monkeypatch):
    control = JobControl(table.claim("one", JobKind.INGEST), table, threading.Event())
    control.hold()
    table.take_over("two", JobKind.INGEST)
    table.claim("two", JobKind.INGEST)
    with pytest.raises(JobInterrupted):
        control.hold()


def test_what_dead_owners_held_is_free_at_once(table):
    table.claim("dead", JobKind.INGEST)
    table.take_over("two", JobKind.INGEST)
    assert table.claim("two", JobKind.INGEST).attempts == 2


def test_only_a_step_forward_gives_new_attempts(table):
    table.claim("one", JobKind.INGEST)
    second = table.claim("one", JobKind.INGEST)
    assert second.attempts == 2
    table.advance(second, 1)
    third = table.claim("one", JobKind.INGEST)
    assert third.attempts == 2
    table.advance(third, 1)
    assert table.claim("one", JobKind.INGEST).attempts == 3


def test_a_job_given_back_counts_as_not_begun(table):
    table.release(table.claim("one", JobKind.INGEST))
    assert table.claim("two", JobKind.INGEST).attempts == 1


def test_closing_again_and_again_is_no_crash(open_library, parser):
    parser.gate.clear()
    first = open_library()
    result = first.add(MINE, "mine", "a.txt", b"some words")
    for _ in range(MAX_ATTEMPTS + 1):
        assert parser.entered.wait(30)
        first.close()
        parser.entered.clear()
        first = open_library()
    parser.gate.set()
    assert first.wait(MINE, result.job.id, 30).state is JobState.DONE


def test_a_cancel_outlives_a_restart(open_library, parser):
    parser.gate.clear()
    first = open_library()
    result = first.add(MINE, "mine", "a.txt", b"some words")
    assert parser.entered.wait(30)
    first._jobs.ask_to_cancel(result.job.id)
    first.close()
    parser.gate.set()
    again = open_library()
    assert again.wait(MINE, result.job.id, 30).state is JobState.CANCELLED
    assert again.get(MINE, result.document.id).reason == "cancelled"
    assert parser.parsed == []


def test_bytes_whose_work_is_being_cancelled_are_worked_on_anew(library, embedder):
    entered, go = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        go.wait(30)

    embedder.before_batch = hold
    first = library.add(MINE, "mine", "a.txt", b"some words")
    assert entered.wait(30)
    library.cancel(MINE, first.job.id)
    second = library.add(MINE, "mine", "a.txt", b"some words")
    go.set()
    assert not second.deduplicated
    assert library.wait(MINE, second.job.id, 30).state is JobState.DONE
    assert library.get(MINE, first.document.id).state is DocumentState.FAILED


def test_bytes_that_are_on_their_way_are_not_worked_on_again(library, parser):
    parser.gate.clear()
    first = library.add(MINE, "mine", "a.txt", b"words")
    again = library.add(MINE, "mine", "a.txt", b"words", DuplicatePolicy.REPLACE)
    assert again.deduplicated
    assert again.job.id == first.job.id
    parser.gate.set()
    library.wait(MINE, first.job.id, 30)
    assert parser.parsed == ["a.txt"]


def test_jobs_of_an_earlier_release_go_on(open_library, tmp_path, parser):
    parser.gate.clear()
    library = open_library()
    result = library.add(MINE, "mine", "a.txt", b"some words")
    assert parser.entered.wait(30)
    library.close()
    connection = sqlite3.connect(tmp_path / "data" / "library.sqlite")
    leases = ("owner", "lease_until_ms", "attempts", "mark", "cancelling")
    for column in (*leases, "faults", "retry_at_ms", "kind"):
        connection.execute(f"ALTER TABLE jobs DROP COLUMN {column}")
    connection.execute("DELETE FROM _sqlite_migrations WHERE name >= '0004'")
    connection.commit()
    pending = MIGRATIONS.pending(MigratedDatabase(connection, execute_plugins=False))
    assert {migration.name for migration in pending} >= {"0004_job_leases", "0005_job_retries"}
    connection.close()
    parser.gate.set()
    assert open_library().wait(MINE, result.job.id, 30).state is JobState.DONE
