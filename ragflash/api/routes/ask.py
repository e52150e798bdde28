"""Questions over documents, answered at once or as they unfold."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ragflash.api.deps import CallerScope, Provided
from ragflash.api.openapi import refusals
from ragflash.api.schemas import AnswerOut, AskBody, CitationOut, HitOut
from ragflash.api.sse import STREAMED, EventStream, encode, until_disconnect
from ragflash.rag.records import (
    Answer,
    AnswerDelta,
    AskEvent,
    AskSources,
    AskStatus,
    CitationFound,
)

router = APIRouter(tags=["ask"])


@router.post(
    "/v1/ask",
    response_model=AnswerOut,
    responses=refusals(400, 404, 409, 413, 422, 429, 503) | STREAMED,
)
async def ask(
    body: AskBody, scope: CallerScope, services: Provided, request: Request
) -> Response | AnswerOut:
    """Answer a question with verified quotes.

    With `stream` the events are `status`, `sources`, `delta`, `citation` and, last, `answer` (the
    same object as without) or `error`. Leaving cancels the work.
    """
    events = services.answerer.ask(scope, body.request())
    if body.stream:
        return _stream(events, request.url.path, services.config.heartbeat_s)
    return AnswerOut.of(await until_disconnect(request.receive, _last(events)))


async def _last(events: AsyncGenerator[AskEvent, None]) -> Answer:
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Answer):
                return event
    raise AssertionError("an ask ends with its answer or an error")


def _stream(events: AsyncGenerator[AskEvent, None], path: str, beat_s: float) -> EventStream:
    status = _encode(AskStatus("queued"))

    async def encoded() -> AsyncGenerator[bytes, None]:
        nonlocal status
        async with aclosing(events):
            async for event in events:
                spelled = _encode(event)
                if isinstance(event, AskStatus):
                    status = spelled
                yield spelled

    return EventStream(
        encoded(), path=path, beat=lambda: status, beat_s=beat_s, error_event="error"
    )


def _encode(event: AskEvent) -> bytes:
    match event:
        case AskStatus(stage, done, total):
            return encode({"stage": stage, "done": done, "total": total}, "status")
        case AskSources(hits, document_ids):
            found = [HitOut.of(hit).model_dump() for hit in hits]
            return encode({"hits": found, "documents": list(document_ids)}, "sources")
        case AnswerDelta(text):
            return encode({"text": text}, "delta")
        case CitationFound(citation):
            return encode(CitationOut.of(citation).model_dump_json(), "citation")
        case Answer():
            return encode(AnswerOut.of(event).model_dump_json(), "answer")
