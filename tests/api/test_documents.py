import hashlib
import json
from dataclasses import replace

import pytest

from ragflash.rag.records import DocumentState
from tests.api.fakes import CONFIG, TEXT, World, events_of


def upload(world: World, content: bytes, name: str = "law.txt", **params: object):
    return world.send("POST", "/v1/documents", files={"file": (name, content)}, params=params)


def test_file_is_accepted_at_once_with_a_job(world: World) -> None:
    reply = upload(world, TEXT.encode())
    assert reply.status_code == 202
    body = reply.json()
    assert body["document"]["state"] == "queued"
    assert body["document"]["sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert body["job"]["document"] == body["document"]["id"]
    assert body["deduplicated"] is False
    assert reply.headers["location"] == f"/v1/documents/{body['document']['id']}"


def test_text_is_accepted_as_json(world: World) -> None:
    reply = world.send("POST", "/v1/documents", json={"text": "Grüße", "name": "a.md"})
    assert reply.status_code == 202
    assert reply.json()["document"]["size_bytes"] == len("Grüße".encode())
    assert reply.json()["document"]["name"] == "a.md"


def test_waiting_answers_when_the_job_has_ended(world: World) -> None:
    body = upload(world, b"x", wait=30).json()
    assert body["job"]["state"] == "done"
    assert body["document"]["state"] == "ready"


def test_same_bytes_are_not_stored_twice_unless_asked(world: World) -> None:
    first = upload(world, b"x").json()
    again = upload(world, b"x", "other.txt")
    assert again.status_code == 200
    assert again.json()["deduplicated"] is True
    assert again.json()["document"]["id"] == first["document"]["id"]
    assert upload(world, b"x", on_duplicate="keep").status_code == 202


@pytest.mark.parametrize("framed", [False, True], ids=["announced", "chunked"])
def test_too_large_is_refused_before_it_is_stored(world: World, framed: bool) -> None:
    content = b"x" * (CONFIG.max_upload_bytes + 100_000)
    if framed:

        async def parts():
            for start in range(0, len(content), 10_000):
                yield content[start : start + 10_000]

        reply = world.send(
            "POST",
            "/v1/documents",
            content=parts(),
            headers={"content-type": "application/json"},
        )
    else:
        reply = upload(world, content)
    assert reply.status_code == 413
    assert reply.json()["code"] == "document_too_large"
    assert str(CONFIG.max_upload_bytes) in reply.json()["detail"]
    assert not world.library.records


def test_size_limit_is_exact(world: World) -> None:
    limit = CONFIG.max_upload_bytes
    assert upload(world, b"x" * limit).status_code == 202
    assert upload(world, b"y" * (limit + 1)).status_code == 413
    text = {"text": "ä" * limit, "name": "a.txt"}
    assert world.send("POST", "/v1/documents", json=text).status_code == 413


def test_listing_is_paged(world: World) -> None:
    ids = [world.add_text(text) for text in ("a", "b", "c")]
    first = world.send("GET", "/v1/documents", params={"limit": 2}).json()
    assert [entry["id"] for entry in first["data"]] == ids[:2]
    assert (first["has_more"], first["first_id"], first["last_id"]) == (True, ids[0], ids[1])
    rest = world.send("GET", "/v1/documents", params={"after": first["last_id"]}).json()
    assert [entry["id"] for entry in rest["data"]] == ids[2:]
    assert rest["has_more"] is False


def test_empty_listing_has_no_ids(world: World) -> None:
    body = world.send("GET", "/v1/documents").json()
    assert body == {
        "object": "list",
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }


def test_deleted_is_gone(world: World) -> None:
    document_id = world.add_text()
    reply = world.send("DELETE", f"/v1/documents/{document_id}")
    assert (reply.status_code, reply.content) == (204, b"")
    assert world.send("GET", f"/v1/documents/{document_id}").status_code == 404
    assert world.send("DELETE", f"/v1/documents/{document_id}").status_code == 404


def test_content_has_an_etag_and_takes_ranges(world: World) -> None:
    path = f"/v1/documents/{world.add_text()}/content"
    whole = world.send("GET", path)
    assert whole.content == TEXT.encode()
    assert whole.headers["etag"] == f'"{hashlib.sha256(TEXT.encode()).hexdigest()}"'
    part = world.send("GET", path, headers={"range": "bytes=4-9"})
    assert (part.status_code, part.content) == (206, TEXT.encode()[4:10])
    assert part.headers["content-range"] == f"bytes 4-9/{len(TEXT)}"
    known = world.send("GET", path, headers={"if-none-match": whole.headers["etag"]})
    assert (known.status_code, known.content) == (304, b"")


def test_content_never_runs_as_a_page(world: World) -> None:
    document_id = world.add_text("<script>alert(1)</script>", 'x".html')
    headers = world.send("GET", f"/v1/documents/{document_id}/content").headers
    assert headers["content-disposition"].startswith("attachment")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"] == "sandbox"


def test_text_is_given_by_page(world: World) -> None:
    document_id = world.add_text("one\ntwo")
    path = f"/v1/documents/{document_id}/text"
    assert world.send("GET", path).json()["text"] == "one\ntwo"
    page = world.send("GET", path, params={"page": 2}).json()
    assert (page["text"], page["start"], page["end"], page["label"]) == ("two", 4, 7, "ii")
    missing = world.send("GET", path, params={"page": 3})
    assert missing.status_code == 404
    assert "2 pages" in missing.json()["detail"]


def test_job_is_followed_to_its_end(world: World) -> None:
    job = upload(world, b"x").json()["job"]
    reply = world.send("GET", f"/v1/jobs/{job['id']}/events")
    states = [(name, json.loads(data)["state"]) for name, data in events_of(reply)]
    assert states == [("job", "running"), ("job", "done")]
    assert world.send("GET", f"/v1/jobs/{job['id']}").json()["done"] == 2


def test_job_is_cancelled(world: World) -> None:
    job = upload(world, b"x").json()["job"]
    reply = world.send("POST", f"/v1/jobs/{job['id']}/cancel")
    assert reply.json()["state"] == "cancelled"


def test_document_is_followed_to_its_end(world: World) -> None:
    document_id = world.add_text()
    record = world.library.records[document_id]
    failed = replace(record, state=DocumentState.FAILED, reason="encrypted")
    world.library.records[document_id] = failed
    events = events_of(world.send("GET", f"/v1/documents/{document_id}/events"))
    assert [name for name, _ in events] == ["document"]
    assert json.loads(events[0][1])["reason"] == "encrypted"


@pytest.mark.parametrize("path", ["/v1/documents/doc_9/events", "/v1/jobs/job_9/events"])
def test_stream_of_something_unknown_is_a_plain_404(world: World, path: str) -> None:
    reply = world.send("GET", path)
    assert reply.status_code == 404
    assert reply.headers["content-type"] == "application/problem+json"
