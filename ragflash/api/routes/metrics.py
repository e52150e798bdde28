"""Numbers for a monitoring system."""

from dataclasses import asdict

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response

from ragflash import metrics
from ragflash.api.deps import Provided
from ragflash.api.openapi import refusals

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=PlainTextResponse, responses=refusals())
def show_metrics(services: Provided) -> Response:
    """Give all metrics in Prometheus' text format; parts that are still loading are left out."""
    missing, _ = services.missing()
    stats = services.engine_stats()
    sessions = services.session_counts()
    health = None if "library" in missing else services.library.health()
    content = metrics.exposition(
        is_ready=not missing,
        engine=None if stats is None else asdict(stats),
        documents=None if health is None else health.documents,
        jobs=None if health is None else health.jobs,
        sessions=sessions,
    )
    return Response(content, media_type=metrics.CONTENT_TYPE)
