import json
from dataclasses import replace

import pytest

from ragflash.engine.request import DraftMode
from ragflash.errors import EngineDead, EngineOverloaded, InputError
from ragflash.rag.records import AskMode, AskRequest, AskStatus
from tests.api.fakes import CONFIG, World, events_of, unfolding

QUESTION = {"question": "How long are records kept?"}


def ask(world: World, **more: object):
    return world.send("POST", "/v1/ask", json=QUESTION | more)


def test_answer_has_quotes_usage_timings_and_engine(world: World) -> None:
    body = ask(world).json()
    assert body["answer"] == "Seven years. [1]"
    citation = body["citations"][0]
    assert citation["quote"] == "Records are kept for seven years."
    assert (citation["page"], citation["start"], citation["end"]) == (1, 0, 33)
    assert citation["boxes"] == [{"page": 1, "x0": 72.0, "y0": 72.0, "x1": 300.0, "y1": 84.0}]
    assert body["usage"] == {"prompt_tokens": 40, "completion_tokens": 4, "cached_tokens": 10}
    expected = {"prompt_n": 30, "cache_n": 10, "draft_n_accepted": 2, "predicted_per_second": 100.0}
    assert body["timings"].items() >= expected.items()
    assert body["timings"]["drafts"] == [
        {"source": "lookup", "drafted": 2, "accepted": 2},
        {"source": "lookup_output", "drafted": 1, "accepted": 0},
    ]
    assert body["timings"]["draft_idle"] == {"no_gain": 1}
    assert body["engine"]["weights"] == "Q4_1"
    assert (body["engine"]["lossless"], body["engine"]["lossy"]) == (True, True)


def test_options_reach_the_answerer(world: World) -> None:
    document_id = world.add_text()
    numbers = {"max_quotes": 2, "max_tokens": 9, "draft_tokens": 7}
    ask(world, documents=[document_id], mode="full", use_engine=False, draft="tree", **numbers)
    assert world.answerer.requests == [
        AskRequest(
            question=QUESTION["question"],
            document_ids=(document_id,),
            mode=AskMode.FULL,
            max_quotes=2,
            max_tokens=9,
            use_engine=False,
            draft=DraftMode.TREE,
            draft_tokens=7,
        )
    ]


@pytest.mark.parametrize("wrong", [{"draft": "guess"}, {"draft_tokens": 0}, {"draft_tokens": 32}])
def test_drafts_that_nobody_knows_are_refused(world: World, wrong) -> None:
    reply = ask(world, **wrong)
    assert reply.status_code == 422
    assert next(iter(wrong)) in reply.text
    assert world.answerer.requests == []


def test_drafts_that_the_engine_cannot_make_are_the_requests_fault(world: World) -> None:
    world.answerer.script = [InputError("this engine does not draft: draft tree cannot be had")]
    reply = ask(world, draft="tree")
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_request")
    assert "does not draft" in reply.json()["detail"]


def test_stream_ends_with_the_object_of_the_plain_reply(world: World) -> None:
    plain = ask(world).json()
    reply = ask(world, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["x-accel-buffering"] == "no"
    events = events_of(reply)
    assert [name for name, _ in events] == [
        "status",
        "sources",
        "status",
        "citation",
        "delta",
        "delta",
        "answer",
    ]
    assert json.loads(events[-1][1]) == plain
    deltas = [json.loads(data)["text"] for name, data in events if name == "delta"]
    assert "".join(deltas) == plain["answer"]
    assert json.loads(events[3][1]) == plain["citations"][0]


def test_error_before_the_first_event_is_a_status(world: World) -> None:
    world.answerer.script = [EngineOverloaded("32 requests are waiting")]
    reply = ask(world, stream=True)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "2")
    assert reply.json()["code"] == "overloaded"


def test_error_after_the_first_byte_is_the_last_event(world: World) -> None:
    world.answerer.script = [AskStatus("retrieving"), EngineDead("the worker has ended")]
    reply = ask(world, stream=True)
    assert reply.status_code == 200
    name, data = events_of(reply)[-1]
    problem = json.loads(data)
    assert (name, problem["code"], problem["status"]) == ("error", "engine_dead", 503)
    assert problem["request_id"] == reply.headers["x-request-id"]


def test_bug_after_the_first_byte_is_an_error_event_without_details(world: World) -> None:
    world.answerer.script = [AskStatus("retrieving"), KeyError("secret")]
    name, data = events_of(ask(world, stream=True))[-1]
    assert (name, json.loads(data)["code"]) == ("error", "internal_error")
    assert "secret" not in data


def test_silence_is_filled_with_status_events() -> None:
    world = World(replace(CONFIG, heartbeat_s=0.01))
    world.answerer.script = [AskStatus("reading", 1, 9), 0.035, *unfolding()]
    events = events_of(ask(world, stream=True))
    beats = [data for name, data in events[1:] if name == "status" and '"done":1' in data]
    assert len(beats) >= 2
    assert events[-1][0] == "answer"
    world.library.close()


def test_search_returns_offsets_and_scores(world: World) -> None:
    reply = world.send("POST", "/v1/search", json={"query": "records", "limit": 1})
    found = reply.json()["data"]
    assert len(found) == 1
    assert found[0]["text"][found[0]["start"] : found[0]["end"]] == found[0]["text"]
    assert found[0]["sparse_score"] == 4.2
