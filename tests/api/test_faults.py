"""What a client is told when a part of the machine refuses, and what goes on meanwhile."""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ragflash.errors import ModelMissing, VectorStoreUnavailable
from ragflash.rag import database, ingest
from ragflash.rag.disk import Disk
from tests.api.fakes import World
from tests.api.real_world import real_world
from tests.rag.conftest import TextParser

FULL = OSError(errno.ENOSPC, "No space left on device")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")
BROKEN = OSError(errno.EIO, "Input/output error")
DOWN = VectorStoreUnavailable("the Qdrant server at http://qdrant:6333 could not search: timed out")
NO_MODEL = ModelMissing("the embedding model is gone: see RAGFLASH_EMBED_MODEL")


@pytest.fixture
def real(tmp_path, monkeypatch) -> Iterator[World]:
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr(ingest, "RETRY_PAUSES_S", (3600.0,))
    with real_world(tmp_path / "data", TextParser()) as world:
        yield world


@contextmanager
def refusing(error: Exception, owner: object, *names: str) -> Iterator[None]:
    """Have every call of some methods raise."""

    def method(*args, **options):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(owner, name, method)
        yield


def upload(world: World, text: str, **params: object):
    files = {"file": ("a.txt", text.encode())}
    return world.send("POST", "/v1/documents", files=files, params={"wait": 30} | params)


def search(world: World, query: str):
    return world.send("POST", "/v1/search", json={"query": query})


def found(world: World, query: str) -> list[str]:
    return [hit["document"] for hit in search(world, query).json()["data"]]


def assert_problem(reply, status: int, code: str, *words: str, retryable: bool) -> None:
    body = reply.json()
    assert (reply.status_code, body["code"], body["retryable"]) == (status, code, retryable)
    assert reply.headers["content-type"] == "application/problem+json"
    assert all(word in body["detail"] for word in words), body["detail"]
    assert ("retry-after" in reply.headers) is retryable


@pytest.mark.parametrize("error", [FULL, READ_ONLY, BROKEN], ids=["full", "read-only", "broken"])
def test_a_disk_that_refuses_an_upload_is_told_and_what_is_stored_is_served(
    real: World, error
) -> None:
    kept = upload(real, "kept words").json()["document"]["id"]
    with refusing(error, Disk, "write"):
        reply = upload(real, "refused words")
        assert_problem(reply, 500, "storage_error", error.strerror, retryable=False)
        assert found(real, "words") == [kept]
        assert real.send("GET", "/v1/documents").json()["last_id"] == kept
        assert real.send("GET", f"/v1/documents/{kept}/content").content == b"kept words"
    assert upload(real, "refused words").json()["document"]["state"] == "ready"


def test_a_locked_database_is_told_and_reading_goes_on(real: World, tmp_path) -> None:
    kept = upload(real, "kept words").json()["document"]["id"]
    other = sqlite3.connect(tmp_path / "data" / "library.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    reply = upload(real, "refused words")
    assert_problem(reply, 500, "storage_error", "database is locked", retryable=False)
    deleted = real.send("DELETE", f"/v1/documents/{kept}")
    assert_problem(deleted, 500, "storage_error", "database is locked", retryable=False)
    assert found(real, "words") == [kept]
    other.execute("ROLLBACK")
    other.close()
    assert real.send("DELETE", f"/v1/documents/{kept}").status_code == 204


def test_work_that_rests_says_why_and_until_when_and_goes_on_when_it_is_sent_again(
    real: World,
) -> None:
    with refusing(DOWN, real.services.library._eraser._index, "upsert"):
        body = upload(real, "some words", wait=0.5).json()
    job, path = body["job"], f"/v1/documents/{body['document']['id']}"
    assert (job["state"], job["code"]) == ("queued", "store_unavailable")
    assert "http://qdrant:6333" in job["detail"]
    assert job["retry_at_ms"] > job["created_ms"] + 1_800_000
    document = real.send("GET", path).json()
    assert (document["state"], document["reason"]) == ("embedding", "store_unavailable")
    again = upload(real, "some words")
    assert (again.status_code, again.json()["job"]["id"]) == (200, job["id"])
    assert again.json()["job"]["state"] == "done"
    assert real.send("GET", path).json()["reason"] is None


def test_a_store_that_is_away_is_told_by_search_and_everything_else_goes_on(real: World) -> None:
    kept = upload(real, "kept words").json()["document"]["id"]
    index = real.services.library._eraser._index
    with refusing(DOWN, index, "query_dense", "query_sparse", "delete_document"):
        reply = search(real, "words")
        assert_problem(reply, 503, "store_unavailable", "http://qdrant:6333", retryable=True)
        assert real.send("GET", f"/v1/documents/{kept}/text").json()["text"] == "kept words"
        reply = real.send("DELETE", f"/v1/documents/{kept}")
        assert_problem(reply, 503, "store_unavailable", "http://qdrant:6333", retryable=True)
        assert real.send("GET", f"/v1/documents/{kept}").status_code == 404
    assert found(real, "words") == []
    assert real.send("DELETE", f"/v1/documents/{kept}").status_code == 204
    assert real.send("DELETE", f"/v1/documents/{kept}").status_code == 404


def test_an_embedding_model_that_is_gone_is_told_by_its_name(real: World) -> None:
    embedder = real.services.library._embedder
    with refusing(NO_MODEL, embedder, "encode_query", "encode_documents"):
        reply = search(real, "words")
        assert_problem(reply, 503, "model_missing", "RAGFLASH_EMBED_MODEL", retryable=False)
        body = upload(real, "some words").json()
        assert (body["job"]["state"], body["job"]["code"]) == ("failed", "model_missing")
        assert "RAGFLASH_EMBED_MODEL" in body["job"]["detail"]
        assert body["document"]["reason"] == "model_missing"
    assert upload(real, "some words").json()["document"]["state"] == "ready"
