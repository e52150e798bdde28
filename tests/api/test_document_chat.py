"""`ragflash/doc:{id}` over a real library and a whole engine around a toy model."""

import json
from collections.abc import Iterator

import pytest

from ragflash.gguf.chat_template import ChatTemplate
from ragflash.gguf.template_builtin import BUILTIN_TEMPLATES
from ragflash.rag.conversation import Conversations
from tests.api.fake_library import TEXT
from tests.api.fakes import World, events_of
from tests.api.real_world import real_world
from tests.engine.harness import ToyEngine, toy_engine
from tests.engine.toys import ToyModel, byte_tokenizer, random_logits
from tests.rag.conftest import TextParser

LAW = " ".join(f"Article {number}: {TEXT}" for number in range(20))
HELLO = {"role": "user", "content": "Hello"}
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def engine() -> Iterator[ToyEngine]:
    tokenizer = byte_tokenizer()
    logits = random_logits(tokenizer.vocab_size, looks_back=8, never=[*range(32)])
    model = ToyModel(logits, vocab_size=tokenizer.vocab_size, context_tokens=4096)
    with toy_engine(model, tokenizer, template=ChatTemplate(BUILTIN_TEMPLATES["chatml"])) as made:
        yield made


@pytest.fixture(scope="module")
def served(tmp_path_factory, engine: ToyEngine) -> Iterator[World]:
    with real_world(tmp_path_factory.mktemp("data"), TextParser()) as world:
        library = world.services.library
        world.services.provide_conversations(Conversations(library, engine.client))
        world.services.provide_engine(engine.client, world.answerer)
        yield world


@pytest.fixture(scope="module")
def law(served: World) -> str:
    reply = served.send("POST", "/v1/documents?wait=60", json={"text": LAW, "name": "law.txt"})
    assert reply.json()["document"]["state"] == "ready"
    return f"ragflash/doc:{reply.json()['document']['id']}"


def chat(world: World, model: str, *messages: dict, **body: object):
    payload = {"model": model, "messages": messages, "max_tokens": 4} | body
    return world.send("POST", "/v1/chat/completions", json=payload)


def test_models_are_listed_for_documents_that_are_ready(served: World, law: str) -> None:
    failed = served.send("POST", "/v1/documents?wait=60", json={"text": " ", "name": "no.txt"})
    assert failed.json()["document"]["state"] == "failed"
    listed = served.send("GET", "/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["ragflash", law]
    assert served.send("GET", f"/v1/models/{law}").json() == listed[1]
    assert listed[1]["created"] > 0
    for name in (f"ragflash/doc:{failed.json()['document']['id']}", "ragflash/doc:doc_9"):
        reply = served.send("GET", f"/v1/models/{name}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_clients_with_other_instructions_and_tools_share_a_document(
    served: World, engine: ToyEngine, law: str, is_streamed: bool
) -> None:
    chat(served, law, {"role": "system", "content": "Be brief."}, HELLO)
    before = engine.runner.num_rows
    instructions = {"role": "developer", "content": f"Be kind. {is_streamed}"}
    reply = chat(served, law, instructions, HELLO, tools=[SEARCH], stream=is_streamed)
    assert reply.status_code == 200, reply.text
    body = reply.json() if not is_streamed else json.loads(events_of(reply)[-2][1])
    assert body["model"] == law
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert len(LAW) <= cached < body["usage"]["prompt_tokens"]
    num_computed = body["usage"]["prompt_tokens"] - cached
    assert engine.runner.num_rows - before == num_computed + 3, "but for the token sampled last"
    assert body["cache_tier"] == "device"


def test_a_conversation_goes_on(served: World, law: str) -> None:
    turns = [{"role": "user", "content": "one?"}]
    cached = []
    for number in range(3):
        body = chat(served, law, *turns).json()
        cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
        turns.append({"role": "assistant", "content": body["choices"][0]["message"]["content"]})
        turns.append({"role": "user", "content": f"and {number}?"})
    assert cached[2] > cached[1] >= len(LAW)


def test_the_plain_model_knows_no_document(served: World, law: str) -> None:
    body = chat(served, "ragflash", HELLO).json()
    assert body["usage"]["prompt_tokens"] < len(LAW)
    assert body["model"] == "ragflash"


@pytest.mark.parametrize("name", ["ragflash/doc:doc_9", "ragflash/doc:", "ragflash/docs", "gpt"])
def test_an_unknown_model_is_not_found(served: World, name: str) -> None:
    for options in ({}, {"stream": True}):
        reply = chat(served, name, HELLO, **options)
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "model_not_found"
        assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_document_that_does_not_fit_is_told_as_clients_expect(served: World) -> None:
    text = "long " * 1500
    reply = served.send("POST", "/v1/documents?wait=60", json={"text": text, "name": "long.txt"})
    name = f"ragflash/doc:{reply.json()['document']['id']}"
    reply = chat(served, name, HELLO)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "search"}}},
        {"functions": [{"name": "search"}]},
        {"tools": ["\ud800"]},
        {"tools": {"name": "search"}},
        {"messages": [HELLO, {"role": "tool", "content": "found"}]},
        {"messages": [{"role": "system", "content": "alone"}]},
    ],
)
def test_what_cannot_be_honoured_is_refused(served: World, law: str, body: dict) -> None:
    payload = json.dumps({"model": law, "messages": [HELLO], "tools": [SEARCH]} | body)
    headers = {"content-type": "application/json"}
    reply = served.send("POST", "/v1/chat/completions", content=payload, headers=headers)
    assert reply.status_code == 400, reply.text


@pytest.mark.parametrize("depth", [100, 900, 5000])
def test_deep_tools_break_nothing(served: World, law: str, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    messages = json.dumps([HELLO])
    payload = f'{{"model":"{law}","messages":{messages},"max_tokens":1,"tools":[{nested}]}}'
    headers = {"content-type": "application/json"}
    reply = served.send("POST", "/v1/chat/completions", content=payload, headers=headers)
    assert reply.status_code in {200, 400}, reply.text
