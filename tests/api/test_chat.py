import json

import pytest

from ragflash.engine.constraint import Grammar
from ragflash.engine.request import (
    Delta,
    DraftMode,
    Failed,
    FinishReason,
    SamplingParams,
    SegmentKind,
)
from ragflash.errors import ContextTooLong, EngineDead, EngineOverloaded, InputError
from tests.api.fakes import World, events_of, finished, spoken

HELLO = [{"role": "user", "content": "Hello"}]


def chat(world: World, **body: object):
    payload = {"model": "ragflash", "messages": HELLO} | body
    return world.send("POST", "/v1/chat/completions", json=payload)


def chunks(reply) -> list[dict]:
    return [json.loads(data) for _, data in events_of(reply) if data != "[DONE]"]


def sent_text(reply) -> str:
    return "".join(
        choice["delta"].get("content", "") for chunk in chunks(reply) for choice in chunk["choices"]
    )


def test_plain_reply(world: World) -> None:
    body = chat(world).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Seven years.",
        "refusal": None,
    }
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": 4,
        "total_tokens": 44,
        "prompt_tokens_details": {"cached_tokens": 10},
    }
    assert body["timings"]["predicted_per_second"] == 100.0
    assert body["timings"]["drafts"][0] == {"source": "lookup", "drafted": 2, "accepted": 2}
    assert body["timings"]["draft_idle"] == {"no_gain": 1}
    assert body["engine"]["kv_format"] == "q8_0"
    assert body["engine"]["template"] == "model file"


def test_stream_has_role_text_reason_usage_and_done(world: World) -> None:
    reply = chat(world, stream=True)
    parts = chunks(reply)
    assert [part["choices"][0]["delta"] for part in parts] == [
        {"role": "assistant", "content": ""},
        {"content": "Seven"},
        {"content": " years."},
        {},
    ]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None, None, "stop"]
    assert len({part["id"] for part in parts}) == 1
    assert parts[-1]["usage"]["total_tokens"] == 44
    assert events_of(reply)[-1] == (None, "[DONE]")


def test_usage_comes_once_and_apart_when_asked_for(world: World) -> None:
    parts = chunks(chat(world, stream=True, stream_options={"include_usage": True}))
    assert [bool(part.get("usage")) for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["choices"] == []
    assert parts[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "pieces", [["Done ✅", " 🧾"], ["a\nb", "\r\n\n", "data: x\u2028\x85", "\0"]]
)
def test_deltas_join_to_the_exact_text(world: World, pieces: list[str]) -> None:
    world.engine.script = spoken(*pieces)
    reply = chat(world, stream=True)
    assert sent_text(reply) == "".join(pieces)
    assert "\ufffd" not in reply.text


def test_length_is_told_from_stop(world: World) -> None:
    world.engine.script = [Delta("r", "Sev"), finished("Sev", FinishReason.LENGTH)]
    assert chat(world).json()["choices"][0]["finish_reason"] == "length"
    assert chunks(chat(world, stream=True))[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "ending",
    [
        [Failed("r", EngineDead("the worker has ended"))],
        [EngineDead("the worker has ended")],
    ],
    ids=["event", "raised"],
)
def test_failure_after_the_first_byte_ends_the_stream_with_an_error(world: World, ending) -> None:
    world.engine.script = [Delta("r", "Sev"), *ending]
    reply = chat(world, stream=True)
    assert reply.status_code == 200
    name, last = events_of(reply)[-1]
    assert name is None
    assert json.loads(last)["error"]["code"] == "engine_dead"
    assert "[DONE]" not in reply.text


def test_an_engine_that_ends_without_a_result_is_an_error(world: World) -> None:
    world.engine.script = [Delta("r", "Sev")]
    assert json.loads(events_of(chat(world, stream=True))[-1][1])["error"]["code"] == "engine_error"
    assert chat(world).status_code == 500


@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_byte_is_a_status(world: World, stream: bool) -> None:
    world.engine.script = [EngineOverloaded("the queue is full")]
    reply = chat(world, stream=stream)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "2")
    assert reply.json()["error"]["type"] == "rate_limit_error"
    too_long = ContextTooLong("too long", prompt_tokens=9000, limit_tokens=2048)
    world.engine.script = [Failed("r", too_long)]
    reply = chat(world, stream=stream)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 2048 tokens" in reply.json()["error"]["message"]


def test_dead_engine_is_refused_before_it_is_asked(world: World) -> None:
    world.engine.is_alive = False
    assert chat(world).status_code == 503
    assert world.engine.requests == []


def test_options_reach_the_engine(world: World) -> None:
    chat(
        world,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        seed=7,
        stop="\n",
        max_tokens=32_000,
        logit_bias={"7": -100, "3": 1.5},
        logprobs=True,
        top_logprobs=4,
    )
    request = world.engine.requests[0]
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        seed=7,
        logit_bias=((3, 1.5), (7, -100)),
    )
    assert (request.logprobs, request.top_logprobs) == (True, 4)
    assert (request.stop, request.max_tokens) == (("\n",), 32_000)
    chat(world, max_completion_tokens=5, stop=["a", "b"])
    assert (world.engine.requests[1].stop, world.engine.requests[1].max_tokens) == (("a", "b"), 5)
    assert world.engine.requests[1].sampling == SamplingParams()
    assert world.engine.requests[0].id != world.engine.requests[1].id


def test_conversations_of_real_clients_are_accepted(world: World) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "environment"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "refusal": None, "audio": None},
        {"role": "system", "content": "9 tokens left"},
        {"role": "user", "content": "last", "name": "ann"},
    ]
    reply = chat(world, messages=messages, tools=[], tool_choice="auto", parallel_tool_calls=True)
    assert reply.status_code == 200
    sent = world.engine.requests[0].messages
    assert [message.role for message in sent] == [
        "system",
        "system",
        "user",
        "user",
        "assistant",
        "system",
        "user",
    ]
    assert [message.segments[0].text for message in sent[3:5]] == ["one two", ""]
    assert [message.segments[0].kind for message in sent] == [
        SegmentKind.RULES,
        SegmentKind.RULES,
        *[SegmentKind.CONVERSATION] * 4,
        SegmentKind.QUESTION,
    ]


REFUSED = {
    "nine choices": {"n": 9},
    "no choice": {"n": 0},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    "tool result": {"messages": [*HELLO, {"role": "tool", "content": "x", "tool_call_id": "1"}]},
    "no messages": {"messages": []},
    "no user": {"messages": [{"role": "system", "content": "x"}]},
    "unknown role": {"messages": [{"role": "wizard", "content": "x"}]},
    "unknown form": {"response_format": {"type": "yaml"}},
    "form without its schema": {"response_format": {"type": "json_schema"}},
    "schema that is none": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "y"}}
    },
    "alternatives without log-probabilities": {"top_logprobs": 3},
    "too many alternatives": {"logprobs": True, "top_logprobs": 21},
    "bias out of range": {"logit_bias": {"5": 101}},
    "bias of no token": {"logit_bias": {"five": 1}},
    "negative temperature": {"temperature": -1},
    "zero top_p": {"top_p": 0},
    "zero tokens": {"max_tokens": 0},
    "empty stop": {"stop": ""},
    "wrong type": {"messages": "hello"},
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_refused_by_name(world: World, body, stream: bool) -> None:
    reply = chat(world, stream=stream, **body)
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert reply.json()["error"]["message"]
    assert world.engine.started == 0


SCHEMA = {"type": "object", "properties": {"covered": {"enum": ["yes", "no"]}}}
FORMS = {
    "any": (None, None),
    "text": ({"type": "text"}, None),
    "object": ({"type": "json_object"}, {"type": "object"}),
    "schema": (
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
        SCHEMA,
    ),
}


@pytest.mark.parametrize(("form", "schema"), FORMS.values(), ids=FORMS)
def test_the_wanted_form_becomes_a_grammar(world: World, form, schema) -> None:
    assert chat(world, response_format=form).status_code == 200
    (request,) = world.engine.requests
    if schema is None:
        assert request.constraint is None
    else:
        assert isinstance(request.constraint, Grammar)
        assert request.constraint.dialect == "json_schema"
        assert json.loads(request.constraint.text) == schema


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_honoured_is_refused_with_the_reason(
    world: World, stream: bool
) -> None:
    world.engine.script = [InputError("the JSON schema cannot be honoured: Invalid type: objekt")]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}
    reply = chat(world, stream=stream, response_format=form)
    assert reply.status_code == 400
    assert "objekt" in reply.json()["error"]["message"]


def test_models_are_listed_and_found(world: World) -> None:
    listed = world.send("GET", "/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["ragflash"]
    assert world.send("GET", "/v1/models/ragflash").json() == listed[0]
    for reply in (world.send("GET", "/v1/models/gpt/9"), chat(world, model="gpt-9")):
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "model_not_found"


def test_choices_of_a_stream_are_told_apart(world: World) -> None:
    parts = chunks(chat(world, stream=True, n=3))
    for index in range(3):
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        assert [choice["delta"] for choice in own] == [
            {"role": "assistant", "content": ""},
            {"content": "Seven"},
            {"content": " years."},
            {},
        ]
        assert own[-1]["finish_reason"] == "stop"
    assert [bool(part.get("usage")) for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["usage"]["completion_tokens"] == 12
    assert parts[-1]["usage"]["prompt_tokens"] == 40


def test_choices_have_ids_and_seeds_of_their_own(world: World) -> None:
    chat(world, n=3, seed=5)
    first, *others = world.engine.requests
    assert first.sampling.seed == 5
    assert len({request.id for request in world.engine.requests}) == 3
    assert len({request.sampling.seed for request in world.engine.requests}) == 3
    chat(world, n=3, seed=5)
    assert [request.sampling for request in world.engine.requests[3:]] == [
        request.sampling for request in (first, *others)
    ]


def test_a_failing_choice_ends_all(world: World) -> None:
    world.engine.script = [Delta("r", "Sev"), Failed("r", EngineDead("the worker has ended"))]
    reply = chat(world, n=2)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead")
    world.engine.script = [EngineOverloaded("the queue is full")]
    assert chat(world, n=2).status_code == 429
    assert world.engine.running == 0


def test_what_the_template_is_told_reaches_the_engine(world: World) -> None:
    told = {"enable_thinking": True, "reasoning_effort": "low"}
    chat(world, chat_template_kwargs=told)
    chat(world)
    assert [request.variables for request in world.engine.requests] == [tuple(told.items()), ()]


def test_a_client_chooses_who_drafts(world: World) -> None:
    chat(world)
    chat(world, draft="lookup", draft_tokens=5)
    chosen = [(request.draft, request.draft_tokens) for request in world.engine.requests]
    assert chosen == [(DraftMode.AUTO, None), (DraftMode.LOOKUP, 5)]


@pytest.mark.parametrize("wrong", [{"draft": "guess"}, {"draft_tokens": 0}, {"draft_tokens": 32}])
def test_drafts_that_nobody_knows_are_refused(world: World, wrong) -> None:
    reply = chat(world, **wrong)
    assert reply.status_code == 400
    assert next(iter(wrong)) in reply.json()["error"]["message"]
    assert world.engine.requests == []
