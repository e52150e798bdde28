"""The model behind OpenAI's chat completions, for clients that know no other way.

A stream always ends with a finish reason and `[DONE]`, or with an error: a clean end without either
makes agents ask again without end.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ragflash.api.deps import Provided
from ragflash.api.openai_schemas import FINISH_REASONS, ChatBody, timings_body, usage_body
from ragflash.api.schemas import EngineOut
from ragflash.api.sse import EventStream, encode, until_disconnect
from ragflash.engine.request import Delta, Event, Failed, Finished
from ragflash.errors import EngineError, NotFound
from ragflash.rag.records import DEFAULT_COLLECTION

router = APIRouter(prefix="/v1", tags=["openai"])

MODEL = "ragflash"
_DONE = encode("[DONE]")


@router.get("/models")
async def list_models() -> dict[str, Any]:
    """List the names under which the model answers."""
    return {"object": "list", "data": [_model()]}


@router.get("/models/{model_id:path}")
async def get_model(model_id: str) -> dict[str, Any]:
    """Look at a model name."""
    _check_model(model_id)
    return _model()


@router.post("/chat/completions")
async def chat_completions(body: ChatBody, services: Provided, request: Request) -> Response:
    """Continue a conversation, streamed or not; leaving cancels the work."""
    _check_model(body.model)
    engine = services.engine
    reply_id = f"chatcmpl-{uuid4().hex}"
    events = _ended(engine.generate(body.request(reply_id, DEFAULT_COLLECTION)))
    reply = _Reply(reply_id, int(time.time()), EngineOut.of(engine.info()).model_dump())
    if not body.stream:
        finished = await until_disconnect(request.receive, _finish(events))
        return JSONResponse(reply.completion(finished), headers={"Cache-Control": "no-store"})
    return EventStream(
        reply.chunks(events, include_usage=body.include_usage),
        path=request.url.path,
        beat=lambda: encode(reply.chunk({})),
        beat_s=services.config.heartbeat_s,
        error_event=None,
    )


def _model() -> dict[str, Any]:
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}


def _check_model(name: str) -> None:
    if name != MODEL:
        raise NotFound(f"there is no model {name!r}; this server has {MODEL!r}")


async def _ended(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Delta | Finished, None]:
    """Pass text and the end on; raise what else ends a request, and when nothing does."""
    async with aclosing(events):
        async for event in events:
            match event:
                case Failed(error=error):
                    raise error
                case Delta():
                    yield event
                case Finished():
                    yield event
                    return
    raise EngineError("the engine ended the request without a result")


async def _finish(events: AsyncGenerator[Delta | Finished, None]) -> Finished:
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Finished):
                return event
    raise AssertionError("events end with Finished or an error")


class _Reply:
    """One reply in OpenAI's shapes; `timings` and `engine` are ours, and clients ignore them."""

    def __init__(self, reply_id: str, created: int, engine: dict[str, Any]) -> None:
        self._head = {"id": reply_id, "created": created, "model": MODEL}
        self._engine = engine

    def completion(self, finished: Finished) -> dict[str, Any]:
        """Give the whole reply at once."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": finished.text, "refusal": None},
            "finish_reason": FINISH_REASONS[finished.reason],
            "logprobs": None,
        }
        return self._head | {
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage_body(finished.usage),
            "timings": timings_body(finished.timings),
            "engine": self._engine,
        }

    def chunk(self, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        """Give one part of a stream; an empty delta says that work goes on."""
        choice = {
            "index": 0,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": None,
        }
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]}

    async def chunks(
        self, events: AsyncGenerator[Delta | Finished, None], *, include_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """Give the stream: role, text, finish reason, usage, `[DONE]`."""
        opened = False
        async with aclosing(events):
            async for event in events:
                if not opened:
                    opened = True
                    yield encode(self.chunk({"role": "assistant", "content": ""}))
                if isinstance(event, Delta):
                    yield encode(self.chunk({"content": event.text}))
                else:
                    for last in self._end(event, include_usage=include_usage):
                        yield last

    def _end(self, finished: Finished, *, include_usage: bool) -> list[bytes]:
        last = self.chunk({}, FINISH_REASONS[finished.reason])
        last |= {"timings": timings_body(finished.timings), "engine": self._engine}
        usage = usage_body(finished.usage)
        if not include_usage:
            return [encode(last | {"usage": usage}), _DONE]
        # A client that asked for usage adds up what it finds, so it is sent once.
        return [encode(last), encode(self.chunk({}) | {"choices": [], "usage": usage}), _DONE]
