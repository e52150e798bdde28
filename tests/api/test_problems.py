import json
from collections.abc import Iterator

import pytest

from ragflash.api.problems import STATUS, error_body, error_response
from ragflash.errors import (
    ContextTooLong,
    DocumentUnreadable,
    EngineDead,
    EngineOverloaded,
    GGUFInvalid,
    RagflashError,
    StorageError,
    VectorStoreUnavailable,
)
from tests.api.fakes import CONFIG, World


def tree(kind: type[RagflashError] = RagflashError) -> Iterator[type[RagflashError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from tree(child)


def make(kind: type[RagflashError]) -> RagflashError:
    if kind is DocumentUnreadable:
        return DocumentUnreadable("encrypted", "it needs a password")
    if issubclass(kind, GGUFInvalid):
        return kind("tensor count", 8, "too many")
    return kind("what is wrong")


@pytest.mark.parametrize("kind", sorted(set(tree()), key=str), ids=lambda kind: kind.__name__)
def test_every_error_has_a_status_and_both_spellings(kind: type[RagflashError]) -> None:
    assert kind in STATUS
    error = make(kind)
    native = error_response(error, "/v1/ask")
    assert native.headers["content-type"] == "application/problem+json"
    body = json.loads(bytes(native.body))
    assert body["status"] == native.status_code == STATUS[kind]
    assert body["code"] == kind.code
    assert body["type"].endswith(kind.code)
    assert body["title"] == kind.title
    assert body["detail"] == str(error)
    assert {"instance", "request_id", "retryable"} <= body.keys()
    openai = error_body(error, "/v1/chat/completions")["error"]
    assert openai.keys() == {"message", "type", "param", "code"}


def test_codes_are_unique() -> None:
    kinds = set(tree())
    assert len({kind.code for kind in kinds}) == len(kinds)


def test_reason_of_an_unreadable_document_is_told() -> None:
    assert error_body(make(DocumentUnreadable), "/v1/documents")["reason"] == "encrypted"


def test_context_overflow_has_the_classic_wording() -> None:
    error = ContextTooLong("too long", prompt_tokens=9000, limit_tokens=2048)
    told = error_body(error, "/v1/chat/completions")["error"]
    assert told["code"] == "context_length_exceeded"
    assert told["message"].startswith(
        "This model's maximum context length is 2048 tokens. "
        "However, your messages resulted in 9000 tokens."
    )
    native = error_body(error, "/v1/ask")
    assert (native["prompt_tokens"], native["limit_tokens"]) == (9000, 2048)


def send_ask(world: World, **body: object):
    return world.send("POST", "/v1/ask", json=body)


def send_search(world: World, **body: object):
    return world.send("POST", "/v1/search", json=body)


def upload(world: World, name: str, content: bytes = b"x"):
    return world.send("POST", "/v1/documents", files={"file": (name, content)})


BAD_INPUTS = {
    "blank question": (lambda w: send_ask(w, question=" \n"), 400, "question_blank"),
    "no question": (send_ask, 422, "body_invalid"),
    "misspelt key": (lambda w: send_ask(w, question="q", mod="full"), 422, "body_invalid"),
    "unknown mode": (lambda w: send_ask(w, question="q", mode="all"), 422, "body_invalid"),
    "wrong type": (lambda w: send_ask(w, question=7), 422, "body_invalid"),
    "no quotes wanted": (lambda w: send_ask(w, question="q", max_quotes=0), 422, "body_invalid"),
    "unknown document": (lambda w: send_ask(w, question="q", documents=["no"]), 404, "not_found"),
    "blank query": (lambda w: send_search(w, query=""), 400, "question_blank"),
    "huge limit": (lambda w: send_search(w, query="q", limit=10**9), 422, "body_invalid"),
    "not JSON": (
        lambda w: w.send(
            "POST", "/v1/ask", content="{", headers={"content-type": "application/json"}
        ),
        422,
        "body_invalid",
    ),
    "JSON document without text": (
        lambda w: w.send("POST", "/v1/documents", json={"name": "a.txt"}),
        422,
        "body_invalid",
    ),
    "document of another content type": (
        lambda w: w.send("POST", "/v1/documents", content=b"x"),
        415,
        "unsupported_type",
    ),
    "form without a file": (
        lambda w: w.send("POST", "/v1/documents", files={"other": ("a.txt", b"x")}),
        422,
        "body_invalid",
    ),
    "broken form": (
        lambda w: w.send(
            "POST",
            "/v1/documents",
            content=b"x",
            headers={"content-type": "multipart/form-data"},
        ),
        400,
        "invalid_request",
    ),
    "escaping name": (lambda w: upload(w, "../x.txt"), 400, "unsafe_name"),
    "too large": (lambda w: upload(w, "a", b"x" * 20_000), 413, "document_too_large"),
    "huge question": (lambda w: send_ask(w, question="x" * 2**24), 413, "document_too_large"),
    "bad policy": (
        lambda w: w.send("POST", "/v1/documents?on_duplicate=maybe", json={"text": "x"}),
        422,
        "body_invalid",
    ),
    "page zero": (lambda w: w.send("GET", "/v1/documents/d/text?page=0"), 422, "body_invalid"),
    "unknown job": (lambda w: w.send("GET", "/v1/jobs/none"), 404, "not_found"),
    "unknown route": (lambda w: w.send("GET", "/v2"), 404, "route_unknown"),
    "wrong method": (lambda w: w.send("GET", "/v1/ask"), 405, "method_not_allowed"),
}


@pytest.mark.parametrize(("send", "status", "code"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_bad_input_is_refused_with_a_reason(world: World, send, status: int, code: str) -> None:
    reply = send(world)
    assert (reply.status_code, reply.json()["code"]) == (status, code)
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.json()["detail"]
    assert reply.json()["request_id"] == reply.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retried"),
    [
        (EngineOverloaded("32 requests are waiting"), 429, True),
        (EngineDead("the worker has ended"), 503, True),
        (VectorStoreUnavailable("connection refused"), 503, True),
        (ContextTooLong("9000 tokens"), 400, False),
        (StorageError("disk full"), 500, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failing_parts_have_their_status(
    world: World, error: RagflashError, status: int, retried: bool, stream: bool
) -> None:
    world.answerer.script = [error]
    reply = send_ask(world, question="q", stream=stream)
    assert reply.status_code == status
    assert ("retry-after" in reply.headers) is retried
    assert reply.json()["retryable"] is error.retryable


def test_a_bug_is_a_500_that_tells_nothing_but_its_id(world: World) -> None:
    world.answerer.script = [KeyError("secret")]
    reply = send_ask(world, question="q")
    assert (reply.status_code, reply.json()["code"]) == (500, "internal_error")
    assert "secret" not in reply.text
    assert reply.json()["request_id"] == reply.headers["x-request-id"]


def test_an_embedder_that_fails_is_not_the_fault_of_the_file(world: World) -> None:
    world.library.failure = VectorStoreUnavailable("the store does not answer")
    assert upload(world, "good.txt").status_code == 503


def test_validation_does_not_repeat_what_was_sent(world: World) -> None:
    reply = send_ask(world, question="q", max_tokens="my password")
    assert "max_tokens" in reply.json()["detail"]
    assert "my password" not in reply.text


def test_limits_are_told(world: World) -> None:
    limits = world.send("GET", "/version").json()["limits"]
    assert limits["max_upload_bytes"] == CONFIG.max_upload_bytes
    assert limits["context_tokens"] == 2048
