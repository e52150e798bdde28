"""The routes over the real library, with a parser and an embedder that need no model."""

import json
from collections.abc import Iterator

import pytest

from ragflash.rag.records import DEFAULT_COLLECTION, Scope
from ragflash_ingest.document import FailureReason, ParseError
from tests.api.fakes import World, events_of
from tests.api.real_world import real_world
from tests.rag.conftest import TextParser

PAGES = "Records are kept for seven years.\fThey are then destroyed by the keeper."


@pytest.fixture
def parser() -> TextParser:
    return TextParser()


@pytest.fixture
def real(tmp_path, parser: TextParser) -> Iterator[World]:
    with real_world(tmp_path / "data", parser, max_upload_bytes=10_000) as world:
        yield world


def upload(world: World, name: str = "law.txt", content: bytes = PAGES.encode(), **params: object):
    files = {"file": (name, content)}
    return world.send("POST", "/v1/documents", files=files, params={"wait": 30} | params)


def test_a_document_goes_in_is_found_and_goes_out(real: World) -> None:
    document = upload(real).json()["document"]
    assert (document["state"], document["pages"], document["name"]) == ("ready", 2, "law.txt")
    path = f"/v1/documents/{document['id']}"
    assert real.send("GET", f"{path}/content").content == PAGES.encode()
    page = real.send("GET", f"{path}/text", params={"page": 2}).json()
    assert page["text"] == PAGES.partition("\f")[2]
    query = {"query": "destroyed keeper", "documents": [document["id"]]}
    hits = real.send("POST", "/v1/search", json=query).json()["data"]
    assert hits[0]["document"] == document["id"]
    whole = real.send("GET", f"{path}/text").json()["text"]
    assert whole[hits[0]["start"] : hits[0]["end"]] == hits[0]["text"]
    assert real.send("DELETE", path).status_code == 204
    assert real.send("GET", path).status_code == 404
    assert real.send("POST", "/v1/search", json=query).status_code == 404
    everywhere = {"query": "destroyed keeper"}
    assert real.send("POST", "/v1/search", json=everywhere).json()["data"] == []


def test_progress_is_followed_by_job_and_by_document(real: World) -> None:
    body = upload(real, wait=0).json()
    jobs = events_of(real.send("GET", f"/v1/jobs/{body['job']['id']}/events"))
    assert json.loads(jobs[-1][1])["state"] == "done"
    states = events_of(real.send("GET", f"/v1/documents/{body['document']['id']}/events"))
    assert json.loads(states[-1][1])["state"] == "ready"


@pytest.mark.parametrize("reason", ["encrypted", "no_text", "empty", "corrupt", "too_slow"])
def test_nothing_to_read_is_never_ready(real: World, parser: TextParser, reason: str) -> None:
    parser.fault = ParseError(FailureReason(reason), "Nothing can be read in it.")
    body = upload(real).json()
    assert (body["document"]["state"], body["document"]["reason"]) == ("failed", reason)
    assert body["job"]["state"] == "failed"
    assert "Nothing can be read in it." in body["job"]["detail"]
    text = real.send("GET", f"/v1/documents/{body['document']['id']}/text")
    assert (text.status_code, text.json()["code"]) == (409, "conflict")


def test_a_page_that_is_missing_is_told(real: World) -> None:
    document = upload(real, content=b"one page of text\funreadable\fanother page").json()[
        "document"
    ]
    assert document["state"] == "partial"
    assert any("2" in warning for warning in document["warnings"])


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../x.txt", "x.txt"),
        ("..\\x.txt", "x.txt"),
        ("/etc/x.txt", "x.txt"),
        ("C:\\x.txt", "x.txt"),
        ("a/../../x.txt", "x.txt"),
        ("ｘ／ｙ.txt", "ｙ.txt"),
        (".bashrc", "bashrc"),
        ("x.txt\0.pdf", None),
        ("x" * 300, None),
        ("", None),
    ],
)
def test_names_are_labels_only(real: World, tmp_path, name: str, shown: str | None) -> None:
    body = {"text": f"The text of {shown}.", "name": name}
    reply = real.send("POST", "/v1/documents", json=body)
    if shown is None:
        assert (reply.status_code, reply.json()["code"]) == (400, "unsafe_name")
    else:
        assert reply.json()["document"]["name"] == shown
    assert {path.name for path in tmp_path.iterdir()} == {"data"}


def test_two_reports_of_one_name_stay_two(real: World) -> None:
    first = upload(real, "report.pdf", b"The first report.").json()["document"]
    second = upload(real, "report.pdf", b"The second report.").json()["document"]
    assert first["id"] != second["id"]
    assert first["name"] == second["name"] == "report.pdf"


def test_what_another_collection_holds_is_not_there(real: World) -> None:
    library = real.services.library
    other = Scope(frozenset({"other"}))
    hidden = library.add(other, "other", "secret.txt", b"Nobody sees this.").document.id
    assert library.get(other, hidden).collection_id != DEFAULT_COLLECTION
    unknown = real.send("GET", "/v1/documents/doc_none").json()
    for path in (f"/v1/documents/{hidden}", f"/v1/documents/{hidden}/text"):
        reply = real.send("GET", path)
        assert reply.status_code == 404
        expected = unknown["detail"].replace("doc_none", hidden)
        assert reply.json()["detail"] == expected
    assert real.send("GET", "/v1/documents").json()["data"] == []


def test_metrics_count_what_the_library_holds(real: World) -> None:
    upload(real)
    shown = real.send("GET", "/metrics").text
    assert 'ragflash_documents{state="ready"} 1.0' in shown
    assert 'ragflash_jobs{state="done"} 1.0' in shown
