"""What happens to every request before its route: an id, a guard, a limit.

Plain ASGI: the framework's own middleware class would hide a client's disconnect from streams.
"""

import hmac
import logging
import re
import time
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragflash import log, metrics
from ragflash.api.deps import ApiConfig
from ragflash.api.problems import RequestRefused, error_response
from ragflash.errors import AccessDenied, DocumentTooLarge, RagflashError

__all__ = ["BodyLimit", "Guard", "RequestId"]

OPEN_PATHS = frozenset({"/healthz"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_FRAMING_BYTES = 64 * 1024  # boundaries, part headers and fields around an uploaded file
_UPLOAD_PATH = "/v1/documents"
_CLIENT_LEFT = 499  # before there was a reply
_REQUEST_BYTES = 16 * 1024 * 1024  # of any other body, which is held in memory

logger = logging.getLogger(__name__)


class RequestId:
    """Takes the client's `X-Request-Id` or makes one; it is in the reply, errors and log.

    As the outermost of all it also measures what a request takes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Log one line a request, and count it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        current = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        log.request_id.set(current)
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = current
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = status or 500  # the framework's outermost layer replies
            raise
        finally:
            _record(scope, status or _CLIENT_LEFT, time.perf_counter() - started)


def _record(scope: Scope, status: int, seconds: float) -> None:
    # A path has ids in it and a refused one anything at all; a route's pattern has neither.
    route = getattr(scope.get("route"), "path", "other")
    method = scope["method"] if "route" in scope else "other"
    metrics.HTTP_REQUESTS.labels(method, route, status).inc()
    metrics.HTTP_REQUEST_SECONDS.labels(route).observe(seconds)
    fields = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "ms": round(seconds * 1000, 1),
    }
    logger.info("request ended", extra=fields)


class Guard:
    """Lets a request pass that has the key, the right `Host`, and no foreign `Origin`.

    The last two close the way by which a web page could drive a server on its visitor's own
    machine, where often no key is set.
    """

    def __init__(self, app: ASGIApp, config: ApiConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse in the style of the route."""
        if scope["type"] == "http":
            try:
                self._check(Headers(scope=scope), scope["path"])
            except RagflashError as error:
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, headers: Headers, path: str) -> None:
        host = headers.get("host", "")
        allowed = self._config.allowed_hosts
        if allowed is not None and _host_name(host) not in allowed:
            raise RequestRefused(
                f"this server does not answer to the name {host!r}; "
                "if it should, add it to RAGFLASH_ALLOWED_HOSTS"
            )
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            raise RequestRefused(f"pages of {origin} may not use this server")
        if path not in OPEN_PATHS and self._config.api_key is not None:
            _check_key(headers, self._config.api_key)


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # unbalanced brackets
        return ""


def _check_key(headers: Headers, key: str) -> None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    if not given:
        raise AccessDenied("send the API key as `Authorization: Bearer KEY` or as `x-api-key`")
    if not hmac.compare_digest(given.encode(), key.encode()):
        raise AccessDenied("the API key is not the one that this server was started with")


class BodyLimit:
    """Refuses bodies that are too large, by their announced and by their real size."""

    def __init__(self, app: ASGIApp, config: ApiConfig) -> None:
        self._app = app
        self._upload_bytes = config.max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what is received; nothing is read from a client that announces too much."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit_bytes = _REQUEST_BYTES
        told = f"the request is larger than {_REQUEST_BYTES} bytes"
        if scope["path"] == _UPLOAD_PATH:
            limit_bytes = self._upload_bytes + _FRAMING_BYTES
            told = (
                f"the document is larger than {self._upload_bytes} bytes, the limit of this "
                "server (RAGFLASH_MAX_UPLOAD_BYTES)"
            )
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > limit_bytes:
            await error_response(DocumentTooLarge(told), scope["path"])(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit_bytes:
                # The framework turns anything but its own exception into "cannot parse the body".
                raise HTTPException(413, told)
            return message

        await self._app(scope, counted, send)
