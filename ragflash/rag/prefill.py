"""Has the model read a document before anybody asks, so that the first question finds it stored."""

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from ragflash import metrics
from ragflash.engine.client import EngineClient
from ragflash.engine.request import Failed, Finished, GenerateRequest, PrefillProgress
from ragflash.rag.context import ContextPart, copied_from, document_messages
from ragflash.rag.library import Library
from ragflash.rag.plan import plan
from ragflash.rag.records import AskMode, AskRequest, DocumentRecord, Scope


@dataclass(frozen=True, slots=True)
class EngineReader:
    """Reads documents of a library with an engine; what `Prefills` works with."""

    library: Library
    engine: EngineClient

    def check(self, document: DocumentRecord) -> None:
        """See that a question about the whole document fits the model; blocks.

        Raises:
            NotFound: It cannot be asked.
            ContextTooLong: It does not fit.
        """
        asked = AskRequest(question="", document_ids=(document.id,), mode=AskMode.FULL)
        plan(self.library, self.engine, _scope_of(document), asked)

    async def read(
        self, document: DocumentRecord
    ) -> AsyncGenerator[PrefillProgress | Finished, None]:
        """Read what everything about the document begins with, while the engine has nothing to do.

        Closing the iterator cancels the work.

        Raises:
            EngineError: The engine could not serve the request.
            ContextTooLong: The document does not fit.
        """
        part = ContextPart(document, self.library.document(_scope_of(document), document.id))
        request = GenerateRequest(
            id=uuid.uuid4().hex,
            messages=document_messages(part),
            namespace=document.collection_id,
            copied=copied_from(self.library, self.engine, (part,)),
            max_tokens=0,
            background=True,
        )
        async with aclosing(self.engine.generate(request)) as events:
            async for event in events:
                match event:
                    case Failed(error=error):
                        raise error
                    case PrefillProgress():
                        yield event
                    case Finished():
                        metrics.count_reuse(event.tier, event.miss_reason)
                        yield event


def _scope_of(document: DocumentRecord) -> Scope:
    return Scope(frozenset({document.collection_id}))
