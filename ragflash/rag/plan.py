"""Decides what an answer reads: whole documents when they fit the context, else passages."""

from dataclasses import dataclass

from ragflash.engine.client import EngineClient
from ragflash.errors import ContextTooLong, NotFound
from ragflash.rag.library import Library
from ragflash.rag.records import AskMode, AskRequest, DocumentRecord, Scope

# Rules, fence and quote around documents and question, and the lines that name each document.
_FRAME_TOKENS, _HEAD_TOKENS = 600, 16


@dataclass(frozen=True, slots=True)
class Plan:
    """What is read, how, and why.

    Attributes:
        mode: Never `auto`.
        reason: A sentence for the reply.
        context: `single`, `bundle` or `retrieved`.
        namespace: What is cached of this ask is shared inside it only.
    """

    records: tuple[DocumentRecord, ...]
    mode: AskMode
    reason: str
    context: str
    namespace: str


def plan(library: Library, engine: EngineClient | None, scope: Scope, request: AskRequest) -> Plan:
    """Choose documents and mode.

    Raises:
        NotFound: A document is outside the scope or is not readable.
        ContextTooLong: Mode `full` was asked for and does not fit.
    """
    records = _records(library, scope, request)
    mode, reason = _mode(library, engine, scope, records, request)
    context = "retrieved"
    if mode is AskMode.FULL:
        context = "single" if len(records) == 1 else "bundle"
    namespace = "\x1f".join(sorted({record.collection_id for record in records}))
    return Plan(records, mode, reason, context, namespace)


def _records(library: Library, scope: Scope, request: AskRequest) -> tuple[DocumentRecord, ...]:
    if request.document_ids is None:
        return tuple(record for record in _all(library, scope) if record.state.is_searchable)
    records = tuple(library.get(scope, id_) for id_ in dict.fromkeys(request.document_ids))
    for record in records:
        if not record.state.is_searchable:
            raise NotFound(f"document {record.id} is {record.state} and cannot be asked yet")
    return records


def _all(library: Library, scope: Scope) -> list[DocumentRecord]:
    records: list[DocumentRecord] = []
    after: str | None = None
    while True:
        page = library.list(scope, limit=1000, after=after)
        records += page.items
        if not page.has_more:
            return records
        after = page.items[-1].id


def _mode(
    library: Library,
    engine: EngineClient | None,
    scope: Scope,
    records: tuple[DocumentRecord, ...],
    request: AskRequest,
) -> tuple[AskMode, str]:
    if request.mode is AskMode.RETRIEVE:
        return AskMode.RETRIEVE, "asked for"
    if engine is None:
        return AskMode.RETRIEVE, "no model is used"
    limit = engine.info().context_tokens
    needed = _FRAME_TOKENS + request.max_tokens + len(engine.tokenize(request.question))
    needed += sum(record.tokens + _HEAD_TOKENS for record in records)
    for record in records:
        if not record.tokens and needed <= limit:  # ingested when no model was there to count
            needed += len(engine.tokenize(library.document(scope, record.id).text))
    if request.mode is AskMode.FULL:
        if needed > limit:
            raise ContextTooLong(
                f"the documents need {needed} tokens and the model reads {limit}: "
                "ask fewer documents, or use mode retrieve",
                prompt_tokens=needed,
                limit_tokens=limit,
            )
        return AskMode.FULL, "asked for"
    if not records:
        return AskMode.RETRIEVE, "there are no documents"
    if needed <= limit:
        return AskMode.FULL, f"{needed} tokens fit the context of {limit}"
    return AskMode.RETRIEVE, f"{needed} tokens do not fit the context of {limit}"
