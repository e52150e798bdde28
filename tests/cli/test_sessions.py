"""`ragflash sessions` on a folder without a model."""

from collections.abc import Iterator

import pytest

from ragflash.engine.request import PrefillProgress
from ragflash.errors import EngineError
from ragflash.rag.library import Library, LibraryConfig
from tests.api.fakes import spoken
from tests.rag.conftest import HashEmbedder
from tests.sessions.samples import DOCUMENT, RULES, bytes_of, flip, open_folder, record_of


@pytest.fixture
def ids(data_dir) -> tuple[str, str]:
    """Two files of a prompt: its rules, and a document after them."""
    folder = open_folder(data_dir / "sessions")
    for segments, sources in (((RULES,), ()), ((RULES, DOCUMENT), ("doc_1",))):
        record = record_of(*segments, source_ids=sources, seconds=2.5)
        assert folder.store(record, bytes_of(record.items)) is None
    by_end = {info.end: info.id for info in folder.list()}
    folder.close()
    return by_end[len(RULES)], by_end[len(RULES) + len(DOCUMENT)]


@pytest.fixture
def server(data_dir) -> Iterator[None]:
    """Another owner of the data folder and its sessions."""
    library = Library.open(LibraryConfig(data_dir), HashEmbedder())
    folder = open_folder(data_dir / "sessions")
    yield
    folder.close()
    library.close()


def test_a_folder_without_sessions_has_none(run, run_json):
    assert run("sessions", "list").stdout == "no sessions are stored\n"
    listed = run_json("sessions", "list")
    assert (listed["enabled"], listed["file_bytes"], listed["data"]) == (True, 0, [])
    assert listed["limits"]["quota_bytes"] == 10 << 30
    assert listed["limits"]["daily_write_bytes"] == 100 << 30


def test_limits_are_what_is_set(run_json, monkeypatch):
    for name, value in (("GB", "2"), ("COLLECTION_GB", "0.5"), ("DAILY_WRITE_GB", "0")):
        monkeypatch.setenv(f"RAGFLASH_SESSIONS_{name}", value)
    limits = run_json("sessions", "list")["limits"]
    assert limits.pop("written_today_bytes") == 0
    assert limits == {
        "quota_bytes": 2 << 30,
        "collection_quota_bytes": 1 << 29,
        "daily_write_bytes": None,
    }


def test_files_are_listed_beside_a_server(run, run_json, ids, server):
    listed = {found["id"]: found for found in run_json("sessions", "list")["data"]}
    assert listed.keys() == {*ids}
    rules, document = (listed[id_] for id_ in ids)
    assert (rules["kind"], document["kind"]) == ("prompt", "document")
    assert document["documents"] == [{"id": "doc_1", "name": None}]
    assert (document["tokens"], document["end_tokens"]) == (300, 340)
    assert document["prefill_seconds"] == 2.5
    shown = run("sessions", "list").stdout
    assert ids[1][:12] in shown
    assert "doc_1" in shown


@pytest.mark.parametrize("command", ["pin", "unpin", "delete", "gc", "import"])
def test_a_server_keeps_others_from_changing_them(run, run_json, tmp_path, ids, server, command):
    (tmp_path / "file").write_bytes(b"")
    arguments = {"gc": (), "import": (tmp_path / "file",)}.get(command, (ids[0],))
    assert run("sessions", command, *arguments).exit_code == 4
    assert len(run_json("sessions", "list")["data"]) == 2


def test_files_are_pinned_and_let_go_by_their_first_digits(run_json, ids):
    assert run_json("sessions", "pin", ids[1][:10]) == {"pinned": ids[1]}
    assert [found["id"] for found in run_json("sessions", "list")["data"] if found["pinned"]] == [
        ids[1]
    ]
    assert run_json("sessions", "unpin", ids[1][:10]) == {"unpinned": ids[1]}
    assert not any(found["pinned"] for found in run_json("sessions", "list")["data"])


def test_digits_of_none_or_of_several_are_refused(run, ids):
    assert run("sessions", "pin", "xyz").exit_code == 3
    result = run("sessions", "delete", "")
    assert result.exit_code == 1
    assert "give more digits" in result.stderr


def test_deleting_takes_what_follows(run_json, ids):
    assert run_json("sessions", "delete", ids[0]) == {"deleted": ids[0], "files": 2}
    assert run_json("sessions", "list")["data"] == []


def test_an_exported_file_can_be_taken_in_again(run, run_json, tmp_path, ids):
    target = tmp_path / "document.segment"
    run_json("sessions", "export", ids[1], target)
    run_json("sessions", "delete", ids[1])
    assert run_json("sessions", "import", target)["already_stored"] is False
    assert run_json("sessions", "import", target)["already_stored"] is True
    assert {found["id"] for found in run_json("sessions", "list")["data"]} == {*ids}
    assert run("sessions", "import", tmp_path / "none").exit_code == 3
    flip(target, 100, 1)
    result = run("sessions", "import", target)
    assert result.exit_code == 1
    assert "was not taken in" in result.stderr


def test_damage_is_found_and_told(run, run_json, data_dir, ids):
    assert run_json("sessions", "verify") == {"files": 2, "damaged": []}
    (path,) = (data_dir / "sessions").glob(f"*/{ids[1]}.segment")
    flip(path, path.stat().st_size // 2, 1)
    result = run("sessions", "verify")
    assert result.exit_code == 1
    assert f"{ids[1]}: damaged" in result.stdout
    assert path.exists()


def test_what_is_beyond_the_quota_goes(run_json, ids, monkeypatch):
    assert run_json("sessions", "gc")["files"] == 2
    monkeypatch.setenv("RAGFLASH_SESSIONS_GB", "0")
    assert run_json("sessions", "gc") == {"files": 0, "file_bytes": 0}
    assert run_json("sessions", "list")["enabled"] is False


@pytest.fixture
def reading(engine):
    """An engine that reads what it is given in two steps."""
    engine.script = [PrefillProgress("r", 20, 40), *spoken()]
    return engine


def test_a_document_is_read_ahead(run, run_json, law, reading):
    run("ingest", law)
    read = run_json("sessions", "prefill", "law.txt")
    assert (read["kind"], read["state"], read["done"], read["total"]) == ("prefill", "done", 40, 40)
    (request,) = reading.requests
    assert (request.background, request.max_tokens) == (True, 0)
    assert reading.closed
    shown = run("sessions", "prefill", "law.txt")
    assert "law.txt is read: 40 tokens" in shown.stdout
    assert "law.txt: reading 40 of 40" in shown.stderr


def test_documents_are_read_as_they_are_taken_in(run, run_json, law, reading):
    taken = run_json("ingest", law, "--prefill")
    assert taken["documents"][0]["state"] == "ready"
    assert len(reading.requests) == 1
    run_json("ingest", law)
    assert len(reading.requests) == 1


def test_what_cannot_be_read_is_told(run, law, reading, monkeypatch):
    run("ingest", law)
    assert run("sessions", "prefill", "none.txt").exit_code == 3
    reading.script = [EngineError("the card is gone")]
    failed = run("ingest", law, "--prefill")
    assert failed.exit_code == 1
    assert "the card is gone" in failed.stderr
    monkeypatch.setenv("RAGFLASH_SESSIONS_GB", "0")
    for arguments in (("sessions", "prefill", "law.txt"), ("ingest", law, "--prefill")):
        refused = run(*arguments)
        assert refused.exit_code == 2
        assert "RAGFLASH_SESSIONS_GB" in refused.stderr
