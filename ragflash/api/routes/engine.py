"""The model that runs, and another in its place."""

import asyncio

from fastapi import APIRouter

from ragflash.api.deps import Provided
from ragflash.api.openapi import refusals
from ragflash.api.schemas import Body, EngineOut, Reply, Text

router = APIRouter(tags=["engine"])


class EngineStateOut(Reply):
    """The model that runs, `null` while one is being loaded, and those that may be named."""

    engine: EngineOut | None
    models: list[str]


class ModelBody(Body):
    """A model to run, by one of the names that `GET /v1/engine` lists."""

    model: Text


@router.get("/v1/engine", responses=refusals(503))
def get_engine(services: Provided) -> EngineStateOut:
    """Say which model runs, and which could."""
    names = services.models.names()
    info = services.engine_info()
    return EngineStateOut(engine=EngineOut.of(info) if info else None, models=list(names))


@router.put("/v1/engine", responses=refusals(400, 404, 409, 422, 503))
async def put_engine(body: ModelBody, services: Provided) -> EngineStateOut:
    """Run another model; answers when it is loaded.

    Requests under way have half a minute to end, new ones are refused meanwhile (503). What is
    stored of documents stays, for each model its own. If it cannot be loaded, the model before runs
    again.
    """
    await asyncio.to_thread(services.models.use, body.model)
    return get_engine(services)
