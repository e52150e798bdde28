"""The server as an ASGI application."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ragflash import __version__, log
from ragflash.api.deps import ApiConfig, Services
from ragflash.api.middleware import BodyLimit, Guard, RequestId
from ragflash.api.openapi import allowed_methods, describe
from ragflash.api.problems import error_response, from_http, from_validation
from ragflash.api.routes import (
    ask,
    documents,
    engine,
    health,
    jobs,
    metrics,
    openai,
    search,
    sessions,
)
from ragflash.errors import RagflashError
from ragflash.settings import Settings, is_loopback

__all__ = ["api_config", "create_app"]

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
logger = logging.getLogger(__name__)


def api_config(settings: Settings) -> ApiConfig:
    """Take from the settings what concerns HTTP.

    Raises:
        SettingInvalid: The server would be open to other machines without a key.
    """
    settings.check_exposure()
    more = frozenset(name.lower() for name in settings.allowed_hosts)
    # Beyond loopback the names under which a server is reached are not known here.
    local = is_loopback(settings.host)
    names = more | _LOOPBACK_NAMES | {settings.host.lower()} if local or more else None
    return ApiConfig(
        api_key=settings.api_key.get_secret_value() if settings.api_key else None,
        allowed_hosts=names,
        heartbeat_s=settings.heartbeat_s,
        max_upload_bytes=settings.max_upload_bytes,
    )


def create_app(services: Services, start: Callable[[], None] | None = None) -> FastAPI:
    """Put routes, guards and error handling together.

    Args:
        services: What the routes work with; may still be empty.
        start: Fills `services`; runs in a thread while the server already answers, and is waited
            for before the server ends.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(_start(services, start)) if start else None
        yield
        if starting is not None:
            await starting

    app = FastAPI(
        title="ragflash",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    app.state.services = services
    for module in (documents, search, ask, sessions, jobs, openai, engine, health, metrics):
        app.include_router(module.router)
    describe(app)
    app.add_exception_handler(RagflashError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_fault)
    app.add_middleware(BodyLimit, config=services.config)
    app.add_middleware(Guard, config=services.config)
    app.add_middleware(RequestId)  # added last, runs first
    return app


async def _start(services: Services, start: Callable[[], None]) -> None:
    try:
        await asyncio.to_thread(start)
    except RagflashError as error:
        logger.warning("start failed", extra={"code": error.code, "detail": error.detail})
        services.fail(error)
    except Exception:
        logger.exception("start broke")
        services.fail(RagflashError("the server could not start; its log has the details"))


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RagflashError)
    return error_response(error, request.url.path)


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(from_validation(error, request.url.path), request.url.path)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(from_http(error), request.url.path)
    if error.status_code == 405:
        response.headers["Allow"] = allowed_methods(request)
    return response


async def _on_fault(request: Request, error: Exception) -> Response:
    """Answer for a bug; the server logs its traceback."""
    logger.error("request broke", exc_info=error)
    response = error_response(
        RagflashError("this is a fault of the server; its log has the details"), request.url.path
    )
    response.headers["X-Request-Id"] = log.request_id.get()
    return response
