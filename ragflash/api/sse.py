"""Server-sent events that never fall silent, end with a last word, and stop with the client.

A stream is an async iterator of encoded events. Until its first event is there the reply has no
status yet, so an error can still be a proper HTTP error; afterwards it is the last event.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.sse import format_sse_event
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ragflash.api.problems import error_body, error_response
from ragflash.errors import EngineDead, GenerationCancelled, RagflashError

__all__ = [
    "STREAMED",
    "EventStream",
    "encode",
    "stream_records",
    "until_disconnect",
    "with_heartbeats",
]

_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {"schema": _EVENT}},
        "description": "The result, or the server-sent events of which each is described",
    }
}

T = TypeVar("T")
logger = logging.getLogger(__name__)


def encode(data: dict[str, Any] | str, event: str | None = None) -> bytes:
    """Spell one event; a string goes out as it is."""
    if not isinstance(data, str):
        data = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return format_sse_event(data_str=data, event=event)


async def with_heartbeats(
    events: AsyncGenerator[T, None], every_s: float, beat: Callable[[], T]
) -> AsyncGenerator[T, None]:
    """Yield the events, and a beat whenever none came for `every_s`; closes `events` in the end."""
    async with aclosing(events):
        pending: asyncio.Task[T] | None = None
        try:
            while True:
                pending = pending or asyncio.create_task(_next(events))
                done, _ = await asyncio.wait({pending}, timeout=every_s)
                if not done:
                    yield beat()
                    continue
                try:
                    event = pending.result()
                except StopAsyncIteration:
                    return
                pending = None
                yield event
        finally:
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)


async def _next(events: AsyncIterator[T]) -> T:
    return await anext(events)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, cancelled as soon as the client closes the connection.

    Args:
        receive: Of a request whose body has been read.
        work: What the client waits for.

    Raises:
        GenerationCancelled: The client went away first.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise GenerationCancelled("the client closed the connection")
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A reply that streams `events`.

    Args:
        events: Encoded events; the last one says how it ended. Closed when the client goes.
        path: Decides how an error is spelled.
        beat: Makes an event that says nothing new. Comments do not do: clients ignore them.
        beat_s: Longest silence.
        error_event: Name of the event that carries an error; OpenAI's has none.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        path: str,
        beat: Callable[[], bytes],
        beat_s: float,
        error_event: str | None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = with_heartbeats(events, beat_s, beat)
        self._path = path
        self._error_event = error_event
        self._is_started = False
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop within one event of the client's leaving."""
        try:
            await until_disconnect(receive, self._run(scope, receive, send))
        except GenerationCancelled:
            logger.info("stream cancelled by the client")
        except asyncio.CancelledError:
            # The server's grace is over. Nothing runs behind this call, so it may end in peace.
            logger.info("stream cut by the end of the server")
            if self._is_started:
                await _send_part(send, self._spell(EngineDead("the server is shutting down")))
                await _send_part(send, b"", more=False)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                first = await anext(events)
            except RagflashError as error:
                await error_response(error, self._path)(scope, receive, send)
                return
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            self._is_started = True
            await _send_part(send, first)
            try:
                async for event in events:
                    await _send_part(send, event)
            except RagflashError as error:
                logger.warning("stream failed", extra={"code": error.code})
                await _send_part(send, self._spell(error))
            except Exception:
                logger.exception("stream broke")
                await _send_part(
                    send, self._spell(RagflashError("the reply broke off; see the log"))
                )
            await _send_part(send, b"", more=False)

    def _spell(self, error: RagflashError) -> bytes:
        return encode(error_body(error, self._path), self._error_event)


def stream_records(
    records: AsyncGenerator[T, None],
    event: str,
    spell: Callable[[T], str],
    *,
    path: str,
    beat_s: float,
) -> EventStream:
    """Stream each record as an `event`, spelled as JSON, and the last one again as the beat."""
    last = encode({}, event)

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal last
        async with aclosing(records):
            async for record in records:
                last = encode(spell(record), event)
                yield last

    return EventStream(events(), path=path, beat=lambda: last, beat_s=beat_s, error_event="error")


async def _send_part(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
