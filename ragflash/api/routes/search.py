"""Passages without an answer."""

from fastapi import APIRouter

from ragflash.api.deps import CallerScope, Provided
from ragflash.api.openapi import refusals
from ragflash.api.schemas import HitOut, SearchBody, SearchOut

router = APIRouter(tags=["search"])


@router.post("/v1/search", responses=refusals(400, 404, 409, 413, 422, 503))
def search(body: SearchBody, scope: CallerScope, services: Provided) -> SearchOut:
    """Find the passages that match a query best."""
    hits = services.library.search(
        scope,
        body.query,
        document_ids=body.documents,
        limit=body.limit,
        mode=body.mode,
    )
    return SearchOut(query=body.query, mode=body.mode, data=tuple(HitOut.of(hit) for hit in hits))
