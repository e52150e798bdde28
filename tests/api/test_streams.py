"""What happens when a client goes away, driven through the bare ASGI interface."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from ragflash.api.sse import with_heartbeats
from ragflash.engine.request import Delta
from ragflash.rag.records import AskStatus
from tests.api.fakes import CONFIG, World, finished, spoken, unfolding

LONG_S = 60.0
ASK = ("/v1/ask", {"question": "q"})
CHAT = (
    "/v1/chat/completions",
    {"model": "ragflash", "messages": [{"role": "user", "content": "q"}]},
)


class Connection:
    """One request over ASGI whose client can leave."""

    def __init__(self, world: World, path: str, body: dict[str, Any]) -> None:
        self._app = world.app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        self._body = [json.dumps(body).encode()]
        self._left = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.arrived = asyncio.Event()

    async def serve(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    def leave(self) -> None:
        self._left.set()

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self.arrived.set()


def part_of(world: World, path: str):
    return world.answerer if path == ASK[0] else world.engine


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(("path", "body"), [ASK, CHAT], ids=["ask", "chat"])
def test_leaving_while_queued_or_reading_cancels(
    world: World, path: str, body: dict[str, Any], stream: bool
) -> None:
    part = part_of(world, path)

    async def scenario() -> None:
        waiting = asyncio.Event()
        part.script = [waiting.set, LONG_S]
        connection = Connection(world, path, body | {"stream": stream})
        serving = asyncio.create_task(connection.serve())
        await waiting.wait()
        connection.leave()
        async with asyncio.timeout(5):
            await serving
        assert part.running == 0
        assert not any(message.get("status") == 200 for message in connection.sent)

    asyncio.run(scenario())
    part.script = unfolding() if path == ASK[0] else spoken("The next one is served.")
    assert world.send("POST", path, json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "first"),
    [(*ASK, AskStatus("retrieving")), (*CHAT, Delta("r", "Sev"))],
    ids=["ask", "chat"],
)
def test_leaving_while_streaming_cancels(
    world: World, path: str, body: dict[str, Any], first: object
) -> None:
    part = part_of(world, path)

    async def scenario() -> None:
        waiting = asyncio.Event()
        part.script = [first, waiting.set, LONG_S]
        connection = Connection(world, path, body | {"stream": True})
        serving = asyncio.create_task(connection.serve())
        await waiting.wait()
        await connection.arrived.wait()
        assert connection.sent[0]["status"] == 200
        assert part.running == 1
        connection.leave()
        async with asyncio.timeout(5):
            await serving
        assert part.running == 0

    asyncio.run(scenario())


def test_the_end_of_the_server_is_the_last_event_of_its_streams(world: World) -> None:
    async def scenario() -> list[dict[str, Any]]:
        waiting = asyncio.Event()
        world.engine.script = [Delta("r", "Sev"), waiting.set, LONG_S]
        connection = Connection(world, CHAT[0], CHAT[1] | {"stream": True})
        serving = asyncio.create_task(connection.serve())
        await waiting.wait()
        await connection.arrived.wait()
        serving.cancel()
        await serving
        return connection.sent

    sent = asyncio.run(scenario())
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert json.loads(sent[-2]["body"].removeprefix(b"data: "))["error"]["code"] == "engine_dead"
    assert world.engine.running == 0


def test_heartbeats_of_a_chat_are_chunks_with_an_empty_delta() -> None:
    world = World(replace(CONFIG, heartbeat_s=0.01))
    world.engine.script = [0.035, Delta("r", "Hi"), finished("Hi")]
    reply = world.send("POST", CHAT[0], json=CHAT[1] | {"stream": True})
    chunks = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    beats = [chunk for chunk in map(json.loads, chunks) if chunk["choices"][0]["delta"] == {}]
    assert len(beats) >= 3
    assert all(beat["choices"][0]["finish_reason"] is None for beat in beats[:-1])
    assert not any(line.startswith(":") for line in reply.text.splitlines())
    world.library.close()


def test_a_source_is_closed_when_its_reader_stops() -> None:
    closed = []

    async def numbers():
        try:
            for number in range(10):
                yield number
        finally:
            closed.append(True)

    async def scenario() -> None:
        beating = with_heartbeats(numbers(), 5.0, lambda: -1)
        assert await anext(beating) == 0
        await beating.aclose()

    asyncio.run(scenario())
    assert closed == [True]
