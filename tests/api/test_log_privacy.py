"""At INFO the log tells what happened and when, and nothing of what was said."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from ragflash import log
from ragflash.log import LogFormat
from ragflash.rag.answer import Answerer
from ragflash.rag.library import Library
from ragflash_ingest.document import FailureReason, ParseError
from tests.api.fakes import World
from tests.api.real_world import real_world
from tests.rag.conftest import TextParser
from tests.rag.engines import ScriptedEngine

DOCUMENT = "The treasurer Ottokar embezzled 700 crowns. He was never caught by anybody."
QUESTION = "Who was it that embezzled crowns?"
WORDS = ("ottokar", "embezzled", "crowns", "treasurer", "caught", "ledger.txt", "who was it")


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What is logged at INFO, as JSON lines."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    stream = io.StringIO()
    log.configure("info", LogFormat.JSON, stream)
    yield stream
    root.handlers, root.level = handlers, level


@pytest.fixture
def parser() -> TextParser:
    return TextParser()


@pytest.fixture
def real(tmp_path, parser) -> Iterator[World]:
    def answerer(library: Library) -> Answerer:
        return Answerer(library, ScriptedEngine())

    with real_world(tmp_path / "data", parser, answerer=answerer) as world:
        yield world


def add(world: World, text: str = DOCUMENT) -> dict:
    files = {"file": ("ledger.txt", text.encode())}
    return world.send("POST", "/v1/documents?wait=30", files=files).json()


def own_lines(written: io.StringIO) -> list[dict]:
    """What was logged by us, not by the client of this test."""
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    return [line for line in lines if line["logger"].startswith("ragflash")]


def test_nothing_that_was_said_is_logged(real: World, parser, written: io.StringIO) -> None:
    document_id = add(real)["document"]["id"]
    for stream in (False, True):
        asked = {"question": QUESTION, "documents": [document_id], "stream": stream}
        reply = real.send("POST", "/v1/ask", json=asked)
        assert "embezzled" in reply.text
        messages = [{"role": "user", "content": QUESTION}]
        chat = {"model": "ragflash", "messages": messages, "stream": stream}
        real.send("POST", "/v1/chat/completions", json=chat)
    real.send("POST", "/v1/search", json={"query": QUESTION})
    real.send("POST", "/v1/ask", json={"question": QUESTION, "documents": ["ottokar" * 9]})
    real.send("POST", "/v1/ask", json={"question": [QUESTION]})
    parser.fault = ParseError(FailureReason.NO_TEXT, "nothing but Ottokar")
    add(real, DOCUMENT * 2)
    real.send("DELETE", f"/v1/documents/{document_id}")
    real.services.library.close()  # the last job's line is there when its thread has ended
    said = written.getvalue().lower()
    assert [word for word in WORDS if word in said] == []
    events = [line["event"] for line in own_lines(written)]
    assert events.count("request ended") == 10
    assert events.count("question answered") == 2
    assert events.count("job ended") == 2


def test_every_line_names_its_request_or_job(real: World, written: io.StringIO) -> None:
    job_id = add(real)["job"]["id"]
    headers = {"x-request-id": "trace-7"}
    reply = real.send("POST", "/v1/ask", json={"question": QUESTION}, headers=headers)
    assert reply.headers["x-request-id"] == "trace-7"
    real.services.library.close()
    lines = own_lines(written)
    assert all(line["request_id"] for line in lines)
    of_request = [line["event"] for line in lines if line["request_id"] == "trace-7"]
    assert of_request == ["question answered", "request ended"]
    (job,) = (line for line in lines if line["event"] == "job ended")
    assert (job["request_id"], job["state"]) == (job_id, "done")
