"""Reads a document before anybody asks, so that the first question finds it stored."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ragflash.engine.client import EngineClient
from ragflash.engine.request import Failed, Finished, GenerateRequest, PrefillProgress
from ragflash.rag.context import ContextPart, build_messages
from ragflash.rag.library import Library
from ragflash.rag.plan import plan
from ragflash.rag.records import AskMode, AskRequest, AskStatus, Prefilled, Scope


async def prefill(
    library: Library, engine: EngineClient, scope: Scope, document_id: str
) -> AsyncGenerator[AskStatus | Prefilled, None]:
    """Read what a question about the whole document begins with; the last event is `Prefilled`.

    Closing the iterator cancels the work.

    Raises:
        NotFound: The document is outside the scope, or cannot be asked yet.
        ContextTooLong: It does not fit the model's context.
        EngineError: The engine could not serve the request.
    """
    begun = time.monotonic()
    asked = AskRequest(question="", document_ids=(document_id,), mode=AskMode.FULL)
    chosen = await asyncio.to_thread(plan, library, engine, scope, asked)
    (record,) = chosen.records
    part = ContextPart(record, await asyncio.to_thread(library.document, scope, record.id))
    request = GenerateRequest(
        id=uuid.uuid4().hex,
        messages=build_messages([part], "", mark=""),
        namespace=chosen.namespace,
        max_tokens=0,
    )
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            match event:
                case PrefillProgress(done=done, total=total):
                    yield AskStatus("reading", done, total)
                case Failed(error=error):
                    raise error
                case Finished():
                    yield Prefilled(
                        record.id,
                        event.usage,
                        1000 * (time.monotonic() - begun),
                        event.tier,
                        event.miss_reason,
                    )
