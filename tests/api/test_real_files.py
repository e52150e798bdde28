"""Files as people send them, through HTTP, the pool of parser processes and the library."""

import json
from collections.abc import Iterator

import pytest

from tests.api.fakes import World, events_of
from tests.api.real_world import real_world
from tests.ingest.office_files import make_ole, zip_of
from tests.ingest.pdf_files import IMAGE, make_pdf, text_page

PAGE = text_page(["Records are kept for seven years."])
GOOD = make_pdf([PAGE])
UNREADABLE = {
    "locked.pdf": (make_pdf([PAGE], passwords=("u", "o")), "encrypted"),
    "locked.xlsx": (make_ole("EncryptedPackage"), "encrypted"),
    "scan.pdf": (make_pdf([IMAGE]), "no_text"),
    "cut.pdf": (GOOD[:200], "corrupt"),
    "blank.txt": (b" \n\t\n ", "empty"),
    "many.zip": (zip_of({"a.pdf": GOOD, "b.zip": zip_of({"c.pdf": GOOD})}), "unsupported_type"),
    "program.pdf": (b"\x7fELF" + bytes(200), "unsupported_type"),
}


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[World]:
    with real_world(tmp_path_factory.mktemp("library") / "data", parser=None) as world:
        yield world


@pytest.fixture(autouse=True)
def emptied(real: World) -> Iterator[None]:
    """Whatever a test leaves, in whatever state, can be deleted."""
    yield
    for entry in real.send("GET", "/v1/documents", params={"limit": 100}).json()["data"]:
        assert real.send("DELETE", f"/v1/documents/{entry['id']}").status_code == 204
    assert real.send("GET", "/v1/documents").json()["data"] == []


def upload(world: World, name: str, content: bytes, media_type: str | None = None):
    files = {"file": (name, content, media_type) if media_type else (name, content)}
    return world.send("POST", "/v1/documents", files=files, params={"wait": 60})


def test_files_that_cannot_be_read_say_why_and_harm_no_other(real: World) -> None:
    reasons = {}
    for name, (content, _) in UNREADABLE.items():
        reply = upload(real, name, content)
        assert reply.status_code == 202, reply.text
        document, job = reply.json()["document"], reply.json()["job"]
        assert (document["state"], job["state"], document["chunks"]) == ("failed", "failed", 0)
        assert len(job["detail"]) > 10
        for internal in ("Traceback", "/blobs/", "pypdfium", "Error("):
            assert internal not in reply.text
        reasons[name] = document["reason"]
    assert reasons == {name: reason for name, (_, reason) in UNREADABLE.items()}
    assert upload(real, "good.pdf", GOOD).json()["document"]["state"] == "ready"
    listed = real.send("GET", "/v1/documents", params={"limit": 100}).json()["data"]
    assert {entry["name"] for entry in listed} == {"good.pdf", *UNREADABLE}
    found = real.send("POST", "/v1/search", json={"query": "records kept"}).json()["data"]
    assert [hit["document_name"] for hit in found] == ["good.pdf"]


def test_an_empty_file_is_refused_at_once_and_stored_nowhere(real: World) -> None:
    reply = upload(real, "empty.txt", b"")
    assert (reply.status_code, reply.json()["code"]) == (422, "document_unreadable")
    assert reply.json()["reason"] == "empty"
    assert reply.json()["detail"] == "empty.txt is empty"
    assert real.send("GET", "/v1/documents").json()["data"] == []


@pytest.mark.parametrize("media_type", ["application/octet-stream", "application/pdf", "text/csv"])
def test_content_decides_what_a_file_is_and_its_encoding_is_told(real: World, media_type) -> None:
    text = "Das Gerät läuft über 3 Jahre – “sehr” gut für Müller."
    reply = upload(real, "notes.txt", text.encode("cp1252"), media_type)
    document = reply.json()["document"]
    assert (document["state"], document["media_type"]) == ("ready", "text/plain")
    assert any("windows-1252" in w or "cp1252" in w for w in document["warnings"]), document
    shown = real.send("GET", f"/v1/documents/{document['id']}/text").json()
    assert shown["text"] == text


def test_pages_and_passages_are_counted_while_a_file_is_read(real: World) -> None:
    book = make_pdf([text_page([f"Page {n} says a lot of subject{n}."] * 4) for n in range(15)])
    reply = real.send("POST", "/v1/documents", files={"file": ("book.pdf", book)}).json()
    events = events_of(real.send("GET", f"/v1/jobs/{reply['job']['id']}/events"))
    jobs = [json.loads(data) for name, data in events if name == "job"]
    assert jobs[-1]["state"] == "done"
    assert jobs[-1]["done"] == jobs[-1]["total"] > 1
    document = real.send("GET", f"/v1/documents/{reply['document']['id']}").json()
    assert (document["pages"], document["chunks"]) == (15, jobs[-1]["total"])
    totals = {(job["stage"], job["total"]) for job in jobs if job["total"]}
    assert totals <= {("parsing", 15), ("embedding", document["chunks"])}
