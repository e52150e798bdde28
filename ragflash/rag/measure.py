"""What is told about the work on documents: how long it took and how it ended."""

import logging
import time
from collections.abc import Callable

from prometheus_client import Histogram

from ragflash import log
from ragflash.errors import NotFound
from ragflash.rag.job_worker import JobControl
from ragflash.rag.jobs import JobTable
from ragflash.rag.records import JobState, Scope

_log = logging.getLogger(__name__)


def measured(
    run: Callable[[JobControl], None], jobs: JobTable, seconds_by_state: Histogram
) -> Callable[[JobControl], None]:
    """Return `run` with a log line and a metric for each job that it ends.

    An interrupted job raises instead, and one that is put off has not ended. What is logged
    meanwhile has the job's id for a request id: the request that made the job ended long ago, with
    this id in its reply.
    """

    def run_measured(control: JobControl) -> None:
        job, started = control.job, time.monotonic()
        token = log.request_id.set(job.id)
        try:
            run(control)
            state = _state(job.id, job.collection_id, jobs)
            if not state.is_final:
                return
            seconds = time.monotonic() - started
            seconds_by_state.labels(state.value).observe(seconds)
            fields = {
                "kind": job.kind,
                "document_id": job.document_id,
                "state": state,
                "ms": round(1000 * seconds),
            }
            _log.info("job ended", extra=fields)
        finally:
            log.request_id.reset(token)

    return run_measured


def _state(job_id: str, collection_id: str, jobs: JobTable) -> JobState:
    try:
        return jobs.get(Scope(frozenset({collection_id})), job_id).state
    except NotFound:  # it went with its document
        return JobState.CANCELLED
