import json

from ragflash.engine.cache import CacheTier
from tests.api.fakes import World, events_of


def test_sessions_are_listed_with_the_names_of_their_documents(world: World) -> None:
    document = world.add_text()
    world.sessions.add(())
    world.sessions.add((document,))
    world.sessions.add((document, "doc_gone"))
    listed = world.send("GET", "/v1/sessions").json()
    assert (listed["enabled"], listed["file_bytes"]) == (True, 3 * 8192)
    assert [found["kind"] for found in listed["data"]] == ["prompt", "document", "bundle"]
    assert listed["data"][2]["documents"] == [
        {"id": document, "name": "law.txt"},
        {"id": "doc_gone", "name": None},
    ]
    assert listed["collections"] == [{"collections": ["default"], "file_bytes": 3 * 8192}]
    assert listed["limits"] == {
        "quota_bytes": 1 << 20,
        "collection_quota_bytes": None,
        "daily_write_bytes": 1_000_000,
        "written_today_bytes": 5,
    }
    shown = listed["data"][1]
    assert (shown["tokens"], shown["end_tokens"], shown["prefill_seconds"]) == (30, 40, 1.5)
    assert (shown["created_ms"], shown["last_used_ms"]) == (100_000, 200_250)


def test_sessions_say_what_they_take_of_each_tier(world: World) -> None:
    first, second = world.sessions.add(()), world.sessions.add(("doc_1",))
    world.engine.in_memory = {second: 4096, "of nobody's file": 1}
    listed = world.send("GET", "/v1/sessions").json()
    sizes = {each["id"]: (each["file_bytes"], each["device_bytes"]) for each in listed["data"]}
    assert sizes == {first: (8192, 0), second: (8192, 4096)}
    assert (listed["file_bytes"], listed["device_bytes"]) == (16384, 4096)
    assert world.send("POST", f"/v1/sessions/{second}/pin").json()["device_bytes"] == 4096


def test_files_are_listed_after_the_engine_has_stopped(world: World) -> None:
    world.sessions.add(())
    world.engine.is_alive = False
    assert world.send("GET", "/v1/sessions").json()["data"][0]["device_bytes"] == 0


def test_what_other_collections_have_a_part_in_is_not_there(world: World) -> None:
    hidden = world.sessions.add(("doc_1",), namespace="default\x1fother")
    assert world.send("GET", "/v1/sessions").json()["data"] == []
    for method, path in (("POST", "/pin"), ("DELETE", "/pin"), ("DELETE", "")):
        reply = world.send(method, f"/v1/sessions/{hidden}{path}")
        assert (reply.status_code, reply.json()["code"]) == (404, "not_found")
    assert hidden in world.sessions.infos


def test_a_session_is_pinned_unpinned_and_deleted(world: World) -> None:
    id_ = world.sessions.add(())
    assert world.send("POST", f"/v1/sessions/{id_}/pin").json()["pinned"] is True
    assert world.send("DELETE", f"/v1/sessions/{id_}/pin").json()["pinned"] is False
    assert world.send("DELETE", f"/v1/sessions/{id_}").status_code == 204
    assert world.send("DELETE", f"/v1/sessions/{id_}").status_code == 404


def test_a_document_is_read_before_anybody_asks_by_a_job(world: World) -> None:
    document = world.add_text()
    reply = world.send("POST", f"/v1/documents/{document}/prefill")
    assert reply.status_code == 202
    job = reply.json()
    assert (job["kind"], job["document"], job["state"]) == ("prefill", document, "queued")
    again = world.send("POST", f"/v1/documents/{document}/prefill").json()
    assert again["id"] == job["id"]
    events = events_of(world.send("GET", f"/v1/jobs/{job['id']}/events"))
    assert [json.loads(data)["done"] for _, data in events] == [1, 2, 3]
    cancelled = world.send("POST", f"/v1/jobs/{job['id']}/cancel").json()
    assert cancelled["kind"] == "prefill"


def test_a_document_can_be_read_as_soon_as_it_is_there(world: World) -> None:
    body = {"text": "Records are kept.", "name": "law.txt"}
    taken = world.send("POST", "/v1/documents?prefill=true", json=body).json()
    assert (taken["job"]["kind"], taken["prefill"]["kind"]) == ("ingest", "prefill")
    said = world.send("POST", "/v1/documents", json=body | {"text": "y", "prefill": True}).json()
    assert said["prefill"]["document"] == said["document"]["id"]
    assert world.send("POST", "/v1/documents", json=body | {"text": "x"}).json()["prefill"] is None


def test_an_unknown_document_cannot_be_read(world: World) -> None:
    reply = world.send("POST", "/v1/documents/doc_9/prefill")
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")


def test_without_sessions_there_are_none_and_the_rest_says_why() -> None:
    world = World(keeps_sessions=False)
    document = world.add_text()
    listed = world.send("GET", "/v1/sessions").json()
    assert (listed["enabled"], listed["limits"], listed["data"]) == (False, None, [])
    for method, path in (
        ("POST", "/v1/sessions/00/pin"),
        ("DELETE", "/v1/sessions/00/pin"),
        ("DELETE", "/v1/sessions/00"),
        ("POST", f"/v1/documents/{document}/prefill"),
        ("POST", "/v1/documents?prefill=true"),
    ):
        body = {"json": {"text": "More."}} if path.startswith("/v1/documents?") else {}
        reply = world.send(method, path, **body)
        assert reply.status_code == 409
        assert "RAGFLASH_SESSIONS_GB" in reply.json()["detail"]
    assert len(world.library.jobs) == len(world.library.records) == 1
    world.library.close()


def test_while_the_model_loads_it_is_not_known_whether_there_are_any() -> None:
    bare = World(loaded=False)
    for method, path in (("GET", "/v1/sessions"), ("POST", "/v1/sessions/00/pin")):
        reply = bare.send(method, path)
        assert (reply.status_code, reply.json()["code"]) == (503, "not_ready")
    bare.library.close()


def test_replies_say_where_the_prompt_came_from(world: World) -> None:
    asked = world.send("POST", "/v1/ask", json={"question": "How long?"}).json()
    assert (asked["cache_tier"], asked["miss_reason"], asked["miss_field"]) == ("none", None, None)
    assert asked["timings"]["restore_ms"] == 0
    body = {"model": "ragflash", "messages": [{"role": "user", "content": "Hello"}]}
    chat = world.send("POST", "/v1/chat/completions", json=body).json()
    assert CacheTier(chat["cache_tier"]) is CacheTier.NONE
    assert {"miss_reason", "miss_field"} <= chat.keys()
    streamed = world.send("POST", "/v1/chat/completions", json=body | {"stream": True}).text
    assert streamed.count('"cache_tier":"none"') == 1
