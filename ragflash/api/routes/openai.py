"""The model behind OpenAI's chat completions, for clients that know no other way.

`ragflash` continues a conversation; `ragflash/doc:{id}` one about a document, which is read before
all that a client brings, so that clients with different instructions and tools share it.

A stream always ends with a finish reason and `[DONE]`, or with an error: a clean end without either
makes agents ask again without end.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ragflash import metrics
from ragflash.api.deps import CallerScope, DocumentLibrary, Provided
from ragflash.api.openai_schemas import (
    FINISH_REASONS,
    ChatBody,
    cache_body,
    logprobs_body,
    timings_body,
    usage_body,
)
from ragflash.api.openapi import openai_refusals
from ragflash.api.schemas import EngineOut
from ragflash.api.sse import STREAMED, EventStream, encode, until_disconnect
from ragflash.engine.choices import generate_choices, total_timings, total_usage
from ragflash.engine.logprobs import TokenLogprob
from ragflash.engine.request import Delta, Event, Failed, Finished
from ragflash.errors import EngineError, NotFound
from ragflash.rag.records import DEFAULT_COLLECTION, DocumentRecord, Scope

router = APIRouter(prefix="/v1", tags=["openai"])

MODEL = "ragflash"
_ABOUT = f"{MODEL}/doc:"
_PAGE = 100
_DONE = encode("[DONE]")


@router.get("/models", responses=openai_refusals())
def list_models(scope: CallerScope, services: Provided) -> dict[str, Any]:
    """List the names under which the model answers: its own, and one for each document."""
    missing, _ = services.missing()
    documents = () if "library" in missing else _documents(services.library, scope)
    return {"object": "list", "data": [_model(), *map(_document_model, documents)]}


@router.get("/models/{model_id:path}", responses=openai_refusals(404))
def get_model(model_id: str, scope: CallerScope, services: Provided) -> dict[str, Any]:
    """Look at a model name."""
    document_id = _document_id(model_id)
    if document_id is None:
        return _model()
    record = services.library.get(scope, document_id)
    if not record.state.is_searchable:
        raise NotFound(f"document {record.id} is {record.state} and cannot be asked yet")
    return _document_model(record)


@router.post("/chat/completions", responses=openai_refusals(400, 404, 413, 429, 503) | STREAMED)
async def chat_completions(
    body: ChatBody, scope: CallerScope, services: Provided, request: Request
) -> Response:
    """Continue a conversation, streamed or not; leaving cancels the work."""
    document_id = _document_id(body.model)
    engine = services.engine
    reply_id = f"chatcmpl-{uuid4().hex}"
    about_document = document_id is not None
    asked = body.request(reply_id, DEFAULT_COLLECTION, about_document=about_document)
    if document_id is not None:
        place = services.conversations.place
        asked = await asyncio.to_thread(place, scope, document_id, asked, body.tools or ())
    num_choices = body.n or 1
    events = _ended(generate_choices(engine, asked, num_choices), num_choices)
    head = {"id": reply_id, "created": int(time.time()), "model": body.model}
    engine_body = EngineOut.of(engine.info()).model_dump()
    reply = _Reply(head, engine_body, num_choices, has_logprobs=asked.logprobs)
    if not body.stream:
        finished = await until_disconnect(request.receive, _finish(events, num_choices))
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


def _document_model(record: DocumentRecord) -> dict[str, Any]:
    return _model() | {"id": _ABOUT + record.id, "created": record.created_ms // 1000}


def _documents(library: DocumentLibrary, scope: Scope) -> Iterator[DocumentRecord]:
    """Go through the documents that can be asked, newest first."""
    after: str | None = None
    while True:
        page = library.list(scope, limit=_PAGE, after=after)
        yield from (record for record in page.items if record.state.is_searchable)
        if not page.has_more:
            return
        after = page.items[-1].id


def _document_id(name: str) -> str | None:
    """Return the document that a model name is about; `None` for the plain model.

    Raises:
        NotFound: There is no model of that name.
    """
    if name == MODEL:
        return None
    if not name.startswith(_ABOUT):
        raise NotFound(
            f"there is no model {name!r}; this server has {MODEL!r}, and {_ABOUT + '{id}'!r} for "
            "each document that is ready"
        )
    return name.removeprefix(_ABOUT)


async def _ended(
    events: AsyncGenerator[tuple[int, Event], None], num_choices: int
) -> AsyncGenerator[tuple[int, Delta | Finished], None]:
    """Pass text and the ends on; raise what else ends a request, and when nothing does."""
    num_ended = 0
    async with aclosing(events):
        async for number, event in events:
            match event:
                case Failed(error=error):
                    raise error
                case Delta():
                    yield number, event
                case Finished():
                    num_ended += 1
                    metrics.count_prompt(
                        event.timings.ttft_ms / 1000, event.tier, event.miss_reason
                    )
                    yield number, event
    if num_ended < num_choices:
        raise EngineError("the engine ended the request without a result")


async def _finish(
    events: AsyncGenerator[tuple[int, Delta | Finished], None], num_choices: int
) -> list[Finished]:
    async with aclosing(events):
        ends = {number: event async for number, event in events if isinstance(event, Finished)}
    return [ends[number] for number in range(num_choices)]


class _Reply:
    """One reply in OpenAI's shapes; what is not of these is ours, and clients ignore it."""

    def __init__(
        self,
        head: dict[str, Any],
        engine: dict[str, Any],
        num_choices: int,
        *,
        has_logprobs: bool,
    ) -> None:
        self._head = head
        self._engine = engine
        self._num_choices = num_choices
        self._has_logprobs = has_logprobs

    def completion(self, finished: Sequence[Finished]) -> dict[str, Any]:
        """Give the whole reply at once."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": each.text, "refusal": None},
                "finish_reason": FINISH_REASONS[each.reason],
                "logprobs": self._logprobs(each.logprobs[: each.num_shown]),
            }
            for index, each in enumerate(finished)
        ]
        return self._head | {
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_body(total_usage(finished)),
            "timings": timings_body(total_timings(finished)),
            **cache_body(finished[0]),
            "engine": self._engine,
        }

    def chunk(
        self,
        delta: dict[str, str],
        *,
        index: int = 0,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Give one part of a stream; an empty delta says that work goes on."""
        choice = {
            "index": index,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": logprobs,
        }
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]}

    async def chunks(
        self, events: AsyncGenerator[tuple[int, Delta | Finished], None], *, include_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """Give the stream: role, text and finish reason of each choice, usage, `[DONE]`."""
        opened: set[int] = set()
        ends: dict[int, Finished] = {}
        async with aclosing(events):
            async for index, event in events:
                if index not in opened:
                    opened.add(index)
                    yield encode(self.chunk({"role": "assistant", "content": ""}, index=index))
                if isinstance(event, Delta):
                    logprobs = self._logprobs(event.logprobs)
                    yield encode(
                        self.chunk({"content": event.text}, index=index, logprobs=logprobs)
                    )
                    continue
                ends[index] = event
                end = self.chunk({}, index=index, finish_reason=FINISH_REASONS[event.reason])
                if len(ends) < self._num_choices:
                    yield encode(end)
        finished = [ends[number] for number in range(self._num_choices)]
        for last in self._last(end, finished, include_usage=include_usage):
            yield last

    def _last(
        self, end: dict[str, Any], finished: Sequence[Finished], *, include_usage: bool
    ) -> list[bytes]:
        timings = timings_body(total_timings(finished))
        end = end | {"timings": timings, **cache_body(finished[0]), "engine": self._engine}
        usage = usage_body(total_usage(finished))
        if not include_usage:
            return [encode(end | {"usage": usage}), _DONE]
        # A client that asked for usage adds up what it finds, so it is sent once.
        return [encode(end), encode(self.chunk({}) | {"choices": [], "usage": usage}), _DONE]

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return logprobs_body(logprobs) if self._has_logprobs else None
