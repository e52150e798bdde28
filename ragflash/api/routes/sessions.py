"""Remembered prompts: look at their files, keep or remove them, read a document beforehand."""

from collections.abc import Mapping
from contextlib import suppress

from fastapi import APIRouter

from ragflash.api.deps import CallerScope, Provided, Services
from ragflash.api.document_schemas import JobOut
from ragflash.api.openapi import refusals
from ragflash.api.session_schemas import (
    SessionListOut,
    SessionOut,
    collections_of,
)
from ragflash.errors import NotFound
from ragflash.rag.records import Scope
from ragflash.sessions import SessionInfo

router = APIRouter(tags=["sessions"])


@router.get("/v1/sessions", responses=refusals(503))
def list_sessions(scope: CallerScope, services: Provided) -> SessionListOut:
    """List the files of remembered prompts, the last used first, and what they may take.

    Answers after the engine's current step, which says what it has of them in memory.
    """
    if not services.keeps_sessions:
        return SessionListOut(enabled=False)
    found = _visible(services, scope)
    in_memory = services.stored_bytes()
    shown = [_described(services, scope, info, in_memory) for info in found]
    return SessionListOut.of_files(found, shown, services.sessions.counts())


@router.post("/v1/sessions/{session_id}/pin", responses=refusals(404, 409, 503))
def pin_session(session_id: str, scope: CallerScope, services: Provided) -> SessionOut:
    """Keep a file, and those before it in the prompt, when room has to be made."""
    _find(services, scope, session_id)
    services.sessions.pin(session_id)
    found = _find(services, scope, session_id)
    return _described(services, scope, found, services.stored_bytes())


@router.delete("/v1/sessions/{session_id}/pin", responses=refusals(404, 409, 503))
def unpin_session(session_id: str, scope: CallerScope, services: Provided) -> SessionOut:
    """Let a file go when room has to be made; one that is not pinned stays as it is."""
    _find(services, scope, session_id)
    services.sessions.unpin(session_id)
    found = _find(services, scope, session_id)
    return _described(services, scope, found, services.stored_bytes())


@router.delete("/v1/sessions/{session_id}", status_code=204, responses=refusals(404, 409, 503))
def delete_session(session_id: str, scope: CallerScope, services: Provided) -> None:
    """Remove a file and all that follow it in a prompt, pinned or not.

    What memory has is still used, and written again with its next use. To have a document's text
    gone for good, delete the document.
    """
    _find(services, scope, session_id)
    services.sessions.delete(session_id)


@router.post(
    "/v1/documents/{document_id}/prefill",
    status_code=202,
    responses=refusals(400, 404, 409, 503),
)
def prefill_document(document_id: str, scope: CallerScope, services: Provided) -> JobOut:
    """Have a document read before anybody asks, while the model has nothing else to do.

    The job counts tokens; a document whose job waits or runs already has no second one. The
    document is `prefilling` while the job runs, and can be asked as before. What was read is in its
    file within seconds of the job's end.
    """
    _ = services.sessions
    return JobOut.of(services.library.prefill(scope, document_id))


def _visible(services: Services, scope: Scope) -> list[SessionInfo]:
    """List what only documents of collections in the scope have to do with."""
    return [
        info
        for info in services.sessions.list()
        if all(collection_id in scope for collection_id in collections_of(info.namespace))
    ]


def _find(services: Services, scope: Scope, session_id: str) -> SessionInfo:
    for info in _visible(services, scope):
        if info.id == session_id:
            return info
    raise NotFound(f"there is no session {session_id!r}")


def _described(
    services: Services, scope: Scope, info: SessionInfo, in_memory: Mapping[str, int]
) -> SessionOut:
    names: dict[str, str] = {}
    for document_id in info.source_ids:
        with suppress(NotFound):  # deleted a moment ago
            names[document_id] = services.library.get(scope, document_id).name
    return SessionOut.of_file(info, names, in_memory.get(info.id, 0))
