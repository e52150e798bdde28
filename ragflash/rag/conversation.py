"""Puts a client's conversation behind a stored document.

Rules and document come first, the same for everybody who talks about the document, so that they are
read once. What a client brings (its own instructions, its tools) opens the user's first turn,
behind the document and the mark that fences it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from ragflash.engine.client import EngineClient
from ragflash.engine.request import ChatMessage, GenerateRequest, SegmentKind, TextSegment
from ragflash.errors import InputError, NotFound, TemplateInvalid
from ragflash.rag.context import ContextPart, copied_from, document_messages
from ragflash.rag.library import Library
from ragflash.rag.records import Scope
from ragflash_prompts import load

_SHARED_SEGMENTS = 2  # rules and document


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations about the documents of a library."""

    library: Library
    engine: EngineClient

    def place(
        self,
        scope: Scope,
        document_id: str,
        request: GenerateRequest,
        tools: Sequence[object] = (),
    ) -> GenerateRequest:
        """Return the request with a document before all that its messages say; blocks.

        System messages before the first other one, and tools, stand in the user's first turn; a
        later system message is a turn of the user in its place.

        Args:
            scope: What the caller may see.
            document_id: The document.
            request: As for a conversation without documents.
            tools: JSON values, shown to the model as they are.

        Raises:
            NotFound: The document is outside the scope, or cannot be asked yet.
        """
        record = self.library.get(scope, document_id)
        if not record.state.is_searchable:
            raise NotFound(f"document {record.id} is {record.state} and cannot be asked yet")
        part = ContextPart(record, self.library.document(scope, record.id))
        turns = _turns(request.messages, _mark(record.id), tools)
        rules, shown = document_messages(part)
        opening = ChatMessage("user", (*shown.segments, *turns[0].segments))
        placed = replace(
            request,
            messages=(rules, opening, *turns[1:]),
            namespace=record.collection_id,
            copied=copied_from(self.library, self.engine, (part,)),
        )
        try:
            is_shared = self.engine.begins_alike(placed, _SHARED_SEGMENTS)
        except (InputError, TemplateInvalid):
            # The template puts system turns elsewhere once there is a conversation, or takes none.
            opening = ChatMessage("user", (*rules.segments, *opening.segments))
            placed, is_shared = replace(placed, messages=(opening, *turns[1:])), False
        return replace(placed, client_prefix=not is_shared)


def _turns(
    messages: Sequence[ChatMessage], mark: str, tools: Sequence[object]
) -> tuple[ChatMessage, ...]:
    """Return the conversation without system turns; the first turn is the user's."""
    leading = [*takewhile(lambda message: message.role == "system", messages)]
    texts = [segment.text for message in leading for segment in message.segments]
    if tools:
        spelled = json.dumps(tools, ensure_ascii=False, separators=(",", ":"))
        texts.append(load("client_tools").render(tools=spelled))
    brought = "".join(f"{text}\n\n" for text in texts if text)
    text = load("conversation").render(mark=mark, brought=brought)
    first = TextSegment(SegmentKind.CONVERSATION, text)
    rest = [
        replace(message, role="user") if message.role == "system" else message
        for message in messages[len(leading) :]
    ]
    if rest[0].role != "user":
        return (ChatMessage("user", (first,)), *rest)
    return (ChatMessage("user", (first, *rest[0].segments)), *rest[1:])


def _mark(document_id: str) -> str:
    """Fence that a document's author cannot know: ids are drawn when a document is taken in."""
    return hashlib.blake2b(document_id.encode(), digest_size=4).hexdigest()
