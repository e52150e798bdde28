"""What the OpenAPI document says of refusals.

The framework describes what a route returns; errors are raised, in two shapes that it does not
know, so each route names the statuses it may refuse with.
"""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel

from ragflash.api.problems import PROBLEM_TYPE

__all__ = ["allowed_methods", "describe", "openai_refusals", "refusals"]

_MEANINGS = {
    400: "The request cannot be served as it is",
    401: "The key is missing or wrong",
    403: "The request comes from another site, or names another host",
    404: "There is nothing of this name that the key may see",
    409: "The state of what it concerns does not allow it",
    413: "The body is too large",
    415: "This kind of file or body is not read",
    422: "The request does not have the documented shape, or the document cannot be read",
    429: "Too many requests are waiting; see Retry-After",
    500: "A fault of the server; its log has the details",
    503: "A part is loading or does not answer; see Retry-After",
}


class Problem(BaseModel):
    """An error of a native route (RFC 9457); `code` is stable, `detail` is for people."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    retryable: bool
    request_id: str
    reason: str | None = None
    prompt_tokens: int | None = None
    limit_tokens: int | None = None


class OpenAIError(BaseModel):
    """What is wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIErrorBody(BaseModel):
    """An error of a route that copies OpenAI's."""

    error: OpenAIError


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe a native route's, beside those that every guarded route has."""
    return _described(statuses, PROBLEM_TYPE, Problem)


def openai_refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe those of a route that copies OpenAI's."""
    return _described(statuses, "application/json", OpenAIErrorBody)


def describe(app: FastAPI) -> None:
    """Have the app write its document with the shapes of errors, and without the framework's."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = made["components"]["schemas"]
            for model in (Problem, OpenAIError, OpenAIErrorBody):
                schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
                schema.pop("$defs", None)
                schemas[model.__name__] = schema
            for operation in _operations(made):
                _drop_foreign(operation["responses"])
            schemas.pop("HTTPValidationError", None)
            schemas.pop("ValidationError", None)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # the documented way


def allowed_methods(request: Request) -> str:
    """List the methods of a request's path; the framework knows those of its first route alone."""
    route = request.scope.get("route")
    if not isinstance(route, APIRoute):
        return "GET, HEAD"  # the document itself
    operations = request.app.openapi()["paths"].get(route.path_format, {})
    return ", ".join(sorted(method.upper() for method in operations))


def _described(
    statuses: tuple[int, ...], media_type: str, model: type[BaseModel]
) -> dict[int | str, dict[str, Any]]:
    content = {media_type: {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {
        status: {"description": _MEANINGS[status], "content": content}
        for status in (401, 403, *statuses, 500)
    }


def _operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [operation for path in document["paths"].values() for operation in path.values()]


def _drop_foreign(responses: dict[str, Any]) -> None:
    """Take out the framework's own 422, which no route answers."""
    content = responses.get("422", {}).get("content", {})
    if "HTTPValidationError" in str(content.get("application/json")):
        del responses["422"]
