"""Whether the process lives, whether it can serve, and what it accepts."""

from fastapi import APIRouter, Response

from ragflash import __version__
from ragflash.api.deps import Provided
from ragflash.api.openapi import refusals
from ragflash.api.schemas import EngineOut, LimitsOut, ReadinessOut, VersionOut

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Say that the process answers; the only route without a key."""
    return {"status": "alive"}


@router.get("/readyz", responses=refusals() | {503: {"model": ReadinessOut}})
async def readyz(services: Provided, response: Response) -> ReadinessOut:
    """Say whether documents can be added and questions answered, and what is missing."""
    missing, detail = services.missing()
    if missing:
        response.status_code = 503
        response.headers["Retry-After"] = "5"
    return ReadinessOut(ready=not missing, missing=missing, detail=detail)


@router.get("/version", responses=refusals())
async def version(services: Provided) -> VersionOut:
    """Say what runs and within which limits; answers while the model is still loading."""
    info = services.engine_info()
    return VersionOut(
        version=__version__,
        limits=LimitsOut(
            max_upload_bytes=services.config.max_upload_bytes,
            heartbeat_s=services.config.heartbeat_s,
            context_tokens=info.context_tokens if info else None,
        ),
        engine=EngineOut.of(info) if info else None,
    )
