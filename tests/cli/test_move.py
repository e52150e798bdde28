import pytest

from tests.rag.conftest import qdrant, qdrant_server

__all__ = ["qdrant", "qdrant_server"]


@pytest.fixture
def server(monkeypatch, qdrant):
    monkeypatch.setenv("RAGFLASH_QDRANT_URL", qdrant.url)
    return qdrant


def test_vectors_are_moved_and_moved_back(run, run_json, law, monkeypatch, qdrant):
    run("ingest", law)
    monkeypatch.setenv("RAGFLASH_QDRANT_URL", qdrant.url)
    refused = run("search", "keeper")
    assert refused.exit_code == 1
    assert "run `ragflash move-store`" in refused.stderr
    moved = run("move-store")
    assert moved.exit_code == 0, moved.output
    assert f" vectors of 1 documents are in {qdrant.url} now" in moved.stdout
    assert "law.txt, page" in run("search", "keeper").stdout
    assert run_json("move-store")["was_there"]
    back = run_json("move-store", "--back")
    assert (back["store"], back["documents"], back["copied_documents"]) == ("embedded", 1, 1)
    monkeypatch.delenv("RAGFLASH_QDRANT_URL")
    assert "law.txt, page" in run("search", "keeper").stdout


def test_a_move_needs_a_server(run):
    result = run("move-store")
    assert result.exit_code == 2
    assert "set RAGFLASH_QDRANT_URL" in result.stderr


def test_the_key_is_sent(run, law, monkeypatch, server):
    server.api_key = "the-right-key"
    refused = run("ingest", law)
    assert refused.exit_code == 1
    assert "RAGFLASH_QDRANT_API_KEY" in refused.stderr
    monkeypatch.setenv("RAGFLASH_QDRANT_API_KEY", "the-right-key")
    assert run("ingest", law).exit_code == 0


@pytest.mark.parametrize("url", ["qdrant:6333", "ftp://qdrant", "http://user:pw@qdrant:6333"])
def test_an_address_that_makes_no_sense_is_named(run, monkeypatch, url):
    monkeypatch.setenv("RAGFLASH_QDRANT_URL", url)
    result = run("documents", "list")
    assert result.exit_code == 2
    assert "RAGFLASH_QDRANT_URL" in result.stderr
