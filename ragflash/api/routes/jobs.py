"""Background work: look at it, follow it, stop it."""

import asyncio
import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request

from ragflash.api.deps import CallerScope, DocumentLibrary, Provided
from ragflash.api.document_schemas import JobOut
from ragflash.api.openapi import refusals
from ragflash.api.sse import STREAMED, EventStream, stream_records
from ragflash.rag.records import JobRecord, Scope

router = APIRouter(tags=["jobs"])

POLL_S = 0.1


@router.get("/v1/jobs/{job_id}", responses=refusals(404, 503))
def get_job(job_id: str, scope: CallerScope, services: Provided) -> JobOut:
    """Look at a job."""
    return JobOut.of(services.library.job(scope, job_id))


@router.post("/v1/jobs/{job_id}/cancel", responses=refusals(404, 503))
def cancel_job(job_id: str, scope: CallerScope, services: Provided) -> JobOut:
    """Stop a job; one that has ended stays as it is."""
    services.library.cancel(scope, job_id)
    return JobOut.of(services.library.job(scope, job_id))


@router.get(
    "/v1/jobs/{job_id}/events",
    status_code=200,
    response_class=EventStream,
    responses=refusals(404, 503) | STREAMED,
)
async def job_events(
    job_id: str, scope: CallerScope, services: Provided, request: Request
) -> EventStream:
    """Follow a job until it ends: an event `job` whenever it moves."""
    return stream_records(
        job_changes(services.library, scope, job_id),
        "job",
        lambda record: JobOut.of(record).model_dump_json(),
        path=request.url.path,
        beat_s=services.config.heartbeat_s,
    )


async def job_changes(
    library: DocumentLibrary, scope: Scope, job_id: str, timeout_s: float | None = None
) -> AsyncGenerator[JobRecord, None]:
    """Yield a job's record now and whenever it has changed, until it ends or time is up.

    The job is polled: a call that blocks until something happens would hold a thread of the pool
    for every client that watches.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    seen: JobRecord | None = None
    while True:
        record = await asyncio.to_thread(library.job, scope, job_id)
        if record != seen:
            seen = record
            yield record
        if record.state.is_final or (deadline is not None and time.monotonic() >= deadline):
            return
        await asyncio.sleep(POLL_S)
