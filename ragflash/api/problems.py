"""Errors as HTTP: the one place that knows which error has which status.

Native routes answer `application/problem+json` (RFC 9457); the routes that copy OpenAI's answer in
its envelope. Both carry the same stable `code`. After the first byte of a stream the same bodies
travel inside it.
"""

from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ragflash import errors, log
from ragflash.errors import ContextTooLong, DocumentUnreadable, RagflashError

__all__ = [
    "PROBLEM_TYPE",
    "STATUS",
    "NotReady",
    "RequestRefused",
    "error_body",
    "error_response",
    "from_http",
    "from_validation",
]


class NotReady(RagflashError):
    """The server is up and a part of it is still loading."""

    code = "not_ready"
    title = "The server is starting"
    retryable = True


class RequestRefused(RagflashError):
    """A browser was led here by a foreign page, or by a foreign name for this address."""

    code = "request_refused"
    title = "Requests from other sites are refused"


class RouteUnknown(errors.NotFound):
    """No route has this path."""

    code = "route_unknown"
    title = "No such route"


class MethodRefused(errors.InputError):
    """The path exists, for another method."""

    code = "method_not_allowed"
    title = "The route does not take this method"


class BodyInvalid(errors.InputError):
    """The body does not have the shape that the route documents."""

    code = "body_invalid"
    title = "The request does not have the documented shape"


STATUS: dict[type[RagflashError], int] = {
    RagflashError: 500,
    errors.InputError: 400,
    errors.DocumentUnreadable: 422,
    errors.DocumentTooLarge: 413,
    errors.UnsupportedMedia: 415,
    errors.UnsafeName: 400,
    errors.QuestionBlank: 400,
    errors.ContextTooLong: 400,
    errors.ConstraintUnsupported: 400,
    errors.SettingInvalid: 500,
    errors.AccessDenied: 401,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.DataFolderLocked: 503,
    errors.IndexMismatch: 409,
    errors.ModelError: 500,
    errors.ModelMissing: 503,
    errors.GGUFInvalid: 500,
    errors.ArchitectureUnknown: 500,
    errors.TensorMissing: 500,
    errors.DrafterIncomplete: 500,
    errors.UnsupportedTensorType: 500,
    errors.TokenizerUnknown: 500,
    errors.TemplateInvalid: 500,
    errors.DeviceError: 503,
    errors.DeviceMissing: 503,
    errors.DeviceUnsupported: 503,
    errors.DeviceMemoryShort: 503,
    errors.EngineError: 500,
    errors.EngineOverloaded: 429,
    errors.EngineDead: 503,
    errors.GenerationCancelled: 499,  # nobody reads it; the log tells it from a fault
    errors.StorageError: 500,
    errors.UpstreamError: 502,
    errors.VectorStoreUnavailable: 503,
    NotReady: 503,
    RequestRefused: 403,
    RouteUnknown: 404,
    MethodRefused: 405,
    BodyInvalid: 422,
}

PROBLEM_TYPE = "application/problem+json"

_RETRY_AFTER_S: dict[int, int] = {429: 2, 502: 5, 503: 5}
_OPENAI_PATHS = ("/v1/chat/completions", "/v1/models")
_OPENAI_CODES = {"access_denied": "invalid_api_key", "not_found": "model_not_found"}
_HTTP_ERRORS: dict[int, type[RagflashError]] = {
    404: RouteUnknown,
    405: MethodRefused,
    413: errors.DocumentTooLarge,
}


def error_response(error: RagflashError, path: str) -> JSONResponse:
    """Answer a request to `path` that failed before its first byte was sent."""
    status = _status(error)
    headers = {"Cache-Control": "no-store"}
    if status in _RETRY_AFTER_S and error.retryable:
        headers["Retry-After"] = str(_RETRY_AFTER_S[status])
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    media_type = "application/json" if _is_openai(path) else PROBLEM_TYPE
    body = error_body(error, path)
    return JSONResponse(body, status_code=status, headers=headers, media_type=media_type)


def error_body(error: RagflashError, path: str) -> dict[str, Any]:
    """Describe an error the way that the clients of `path` expect."""
    return _envelope(error) if _is_openai(path) else _problem(error, path)


def from_http(error: HTTPException) -> RagflashError:
    """Give an error that the framework raised its place in the tree."""
    kind = _HTTP_ERRORS.get(error.status_code)
    if kind is None:
        kind = errors.InputError if error.status_code < 500 else RagflashError
    return kind(str(error.detail))


def from_validation(error: RequestValidationError, path: str) -> RagflashError:
    """Name every field that is wrong, without repeating its value."""
    faults = [
        f"{'.'.join(str(part) for part in fault['loc'][1:]) or fault['loc'][0]}: {fault['msg']}"
        for fault in error.errors()
    ]
    # OpenAI answers 400 to a malformed body, and some clients take 422 for a fault of the server.
    kind = errors.InputError if _is_openai(path) else BodyInvalid
    return kind("; ".join(faults))


def _status(error: RagflashError) -> int:
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def _is_openai(path: str) -> bool:
    return any(path == known or path.startswith(known + "/") for known in _OPENAI_PATHS)


def _problem(error: RagflashError, path: str) -> dict[str, Any]:
    return {
        "type": f"urn:ragflash:problem:{error.code}",
        "title": error.title,
        "status": _status(error),
        "detail": error.detail,
        "instance": path,
        "code": error.code,
        "retryable": error.retryable,
        "request_id": log.request_id.get(),
        **_members(error),
    }


def _members(error: RagflashError) -> Mapping[str, Any]:
    match error:
        case DocumentUnreadable():
            return {"reason": error.reason}
        case ContextTooLong():
            return {"prompt_tokens": error.prompt_tokens, "limit_tokens": error.limit_tokens}
        case _:
            return {}


def _envelope(error: RagflashError) -> dict[str, Any]:
    status = _status(error)
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
        status, "server_error" if status >= 500 else "invalid_request_error"
    )
    return {
        "error": {
            "message": _classic_wording(error),
            "type": kind,
            "param": "messages" if isinstance(error, ContextTooLong) else None,
            "code": _OPENAI_CODES.get(error.code, error.code),
        }
    }


def _classic_wording(error: RagflashError) -> str:
    """Agents look for this sentence, beside the code, to start a compaction."""
    if not isinstance(error, ContextTooLong) or not error.limit_tokens:
        return error.detail
    return (
        f"This model's maximum context length is {error.limit_tokens} tokens. However, your "
        f"messages resulted in {error.prompt_tokens} tokens. Please reduce the length of the "
        "messages."
    )
