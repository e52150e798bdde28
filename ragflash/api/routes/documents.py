"""Documents: put in, look at, read back, take out."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from ragflash.api.deps import CallerScope, DocumentLibrary, Provided
from ragflash.api.document_schemas import (
    DocumentListOut,
    DocumentOut,
    JobOut,
    PageTextOut,
    TextBody,
    UploadOut,
)
from ragflash.api.openapi import refusals
from ragflash.api.problems import BodyInvalid
from ragflash.api.routes.jobs import POLL_S, job_changes
from ragflash.api.sse import STREAMED, EventStream, stream_records, until_disconnect
from ragflash.errors import DocumentTooLarge, NotFound, UnsupportedMedia
from ragflash.rag.records import (
    DEFAULT_COLLECTION,
    DocumentRecord,
    DocumentState,
    DuplicatePolicy,
    JobRecord,
    Scope,
)

router = APIRouter(prefix="/v1/documents", tags=["documents"])

MAX_WAIT_S = 60.0

_SETTLED = frozenset({DocumentState.READY, DocumentState.PARTIAL, DocumentState.FAILED})
_UPLOAD_BODIES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}},
                }
            },
            "application/json": {"schema": TextBody.model_json_schema()},
        },
    }
}


@router.post(
    "",
    status_code=202,
    openapi_extra=_UPLOAD_BODIES,
    responses=refusals(400, 404, 409, 413, 415, 422, 503)
    | {200: {"model": UploadOut, "description": "These bytes were there already"}},
)
async def add_document(
    request: Request,
    response: Response,
    scope: CallerScope,
    services: Provided,
    on_duplicate: DuplicatePolicy = DuplicatePolicy.REUSE,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0,
    *,
    prefill: bool = False,
) -> UploadOut:
    """Take a file (multipart, part `file`) or a text (JSON); reading it goes on in a job.

    With `wait` the reply comes when the job has ended, at the latest after so many seconds. Bytes
    that are already there answer 200 with `deduplicated`. With `prefill` (here, or in a text's
    JSON) the model reads it too, once it is ready and when there is time: that is a job of its own.
    """
    library = services.library
    async with _received(request, services.config.max_upload_bytes) as (
        name,
        source,
        wants_prefill,
    ):
        if prefill or wants_prefill:
            _ = services.sessions  # without them there is nothing to keep it in: refused
        added = await asyncio.to_thread(
            library.add,
            scope,
            DEFAULT_COLLECTION,
            name,
            source,
            on_duplicate=on_duplicate,
            prefill=prefill or wants_prefill,
        )
    record, job = added.document, added.job
    if wait:
        work = _settled(library, scope, job.id, wait)
        job = await until_disconnect(request.receive, work)
        record = await asyncio.to_thread(library.get, scope, record.id)
    if added.deduplicated:
        response.status_code = 200
    response.headers["Location"] = f"{router.prefix}/{record.id}"
    return UploadOut(
        document=DocumentOut.of(record),
        job=JobOut.of(job),
        deduplicated=added.deduplicated,
        prefill=None if added.prefill is None else JobOut.of(added.prefill),
    )


@router.get("", responses=refusals(404, 422, 503))
def list_documents(
    scope: CallerScope,
    services: Provided,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> DocumentListOut:
    """List documents, newest first; `after` is the `last_id` of the page before."""
    page = services.library.list(scope, limit=limit, after=after)
    ids = [record.id for record in page.items]
    return DocumentListOut(
        data=tuple(DocumentOut.of(record) for record in page.items),
        has_more=page.has_more,
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
    )


@router.get("/{document_id}", responses=refusals(404, 503))
def get_document(document_id: str, scope: CallerScope, services: Provided) -> DocumentOut:
    """Look at a document."""
    return DocumentOut.of(services.library.get(scope, document_id))


@router.delete("/{document_id}", status_code=204, responses=refusals(404, 503))
def delete_document(document_id: str, scope: CallerScope, services: Provided) -> None:
    """Take a document out, whatever its state; afterwards nothing finds it any more."""
    services.library.delete(scope, document_id)


@router.get("/{document_id}/content", response_class=FileResponse, responses=refusals(404, 503))
def get_content(
    document_id: str, scope: CallerScope, services: Provided, request: Request
) -> Response:
    """Give the original bytes back; takes `Range` and `If-None-Match`."""
    record = services.library.get(scope, document_id)
    headers = {
        "ETag": f'"{record.sha256}"',
        "Cache-Control": "private, no-cache",
        # What a stranger wrote must not run as a page of this server.
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "sandbox",
    }
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return FileResponse(
        services.library.content_path(scope, document_id),
        headers=headers,
        media_type=record.media_type,
        filename=record.name,
    )


@router.get("/{document_id}/text", responses=refusals(404, 409, 422, 503))
def get_text(
    document_id: str,
    scope: CallerScope,
    services: Provided,
    page: Annotated[int | None, Query(ge=1)] = None,
) -> PageTextOut:
    """Give the text that quotes and offsets refer to, whole or of one physical page."""
    document = services.library.document(scope, document_id)
    if page is None:
        start, end, label = 0, len(document.text), None
    else:
        found = next((part for part in document.pages if part.number == page), None)
        if found is None:
            raise NotFound(f"the document has {len(document.pages)} pages, and no page {page}")
        start, end, label = found.start, found.end, found.label
    return PageTextOut(
        document=document_id,
        page=page,
        label=label,
        start=start,
        end=end,
        text=document.text[start:end],
    )


@router.get(
    "/{document_id}/events",
    status_code=200,
    response_class=EventStream,
    responses=refusals(404, 503) | STREAMED,
)
async def document_events(
    document_id: str, scope: CallerScope, services: Provided, request: Request
) -> EventStream:
    """Follow a document until it is ready or failed: an event `document` whenever it changes.

    Pages and chunks are counted in the events of its job.
    """
    return stream_records(
        _document_changes(services.library, scope, document_id),
        "document",
        lambda record: DocumentOut.of(record).model_dump_json(),
        path=request.url.path,
        beat_s=services.config.heartbeat_s,
    )


async def _document_changes(
    library: DocumentLibrary, scope: Scope, document_id: str
) -> AsyncGenerator[DocumentRecord, None]:
    seen: DocumentRecord | None = None
    while True:
        record = await asyncio.to_thread(library.get, scope, document_id)
        if record != seen:
            seen = record
            yield record
        if record.state in _SETTLED:
            return
        await asyncio.sleep(POLL_S)


async def _settled(
    library: DocumentLibrary, scope: Scope, job_id: str, timeout_s: float
) -> JobRecord:
    async with aclosing(job_changes(library, scope, job_id, timeout_s)) as changes:
        *_, latest = [record async for record in changes]
    return latest


@asynccontextmanager
async def _received(
    request: Request, limit_bytes: int
) -> AsyncIterator[tuple[str, BinaryIO | bytes, bool]]:
    """Name and content of what the request brings, and whether it wants that read beforehand.

    A file is gone afterwards.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        yield await _read_text(request, limit_bytes)
        return
    if kind != "multipart/form-data":
        raise UnsupportedMedia(
            "send multipart/form-data with a part `file`, or application/json with `text`"
        )
    async with request.form(max_files=1, max_fields=4) as form:
        part = form.get("file")
        if not isinstance(part, UploadFile):
            raise BodyInvalid("the form has no file in a part named `file`")
        _check_size(part.size or 0, limit_bytes)
        yield part.filename or "", part.file, False


async def _read_text(request: Request, limit_bytes: int) -> tuple[str, bytes, bool]:
    try:
        body = TextBody.model_validate_json(await request.body())
    except ValidationError as error:
        faults = [fault | {"loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise RequestValidationError(faults) from error
    content = body.text.encode()
    _check_size(len(content), limit_bytes)
    return body.name, content, body.prefill


def _check_size(size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise DocumentTooLarge(
            f"the document has {size_bytes} bytes; the limit of this server is {limit_bytes} "
            "(RAGFLASH_MAX_UPLOAD_BYTES)"
        )
