"""What the OpenAPI page says of requests that the routes read themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from vtoken.server.protocol.common import ErrorResponse
from vtoken.server.protocol.fields import RequestFields

_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "No valid API key.",
    404: "No such model.",
    405: "No such method here.",
    413: "The body is too large.",
    415: "The body is no JSON by its type.",
    429: "Too many requests wait; see Retry-After.",
    500: "The server failed on this request.",
    503: "The server is shutting down, or its engine does not run.",
}
_SCHEMAS = "#/components/schemas/"


def answers(response: type[BaseModel], *errors: int) -> dict[str, Any]:
    """Arguments of a route that answers with `response`, or with one of `errors`."""
    return {"response_model": None, "responses": {200: {"model": response}, **refusals(*errors)}}


def refusals(*errors: int) -> dict[int | str, Any]:
    """The `responses` of a route that answers with one of `errors`, success aside."""
    return {status: {"model": ErrorResponse, "description": _ERRORS[status]} for status in errors}


def takes(request: type[RequestFields], response: type[BaseModel], *, streams: bool = False) -> dict[str, Any]:
    """Arguments of a route that reads a JSON body, `request`, by itself."""
    arguments = answers(response, 400, 401, 404, 413, 415, 429, 500, 503)
    if streams:
        arguments["responses"][200]["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    body = {"required": True, "content": {"application/json": {"schema": {"$ref": _SCHEMAS + request.__name__}}}}
    _REQUESTS[request.__name__] = request
    return {**arguments, "openapi_extra": {"requestBody": body}}


_REQUESTS: dict[str, type[RequestFields]] = {}


def describe_requests(app: FastAPI, root_path: str) -> None:
    """Let the app's OpenAPI page have the bodies that `takes` has named."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            page = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                tags=app.openapi_tags,
            )
            schemas = page.setdefault("components", {}).setdefault("schemas", {})
            for request in _REQUESTS.values():
                schemas.update(_schemas_of(request))
            if root_path:
                page["servers"] = [{"url": root_path}]
            app.openapi_schema = page
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _schemas_of(request: type[RequestFields]) -> dict[str, Any]:
    """The schema of a request, and those it refers to. null stands for the default everywhere."""
    schema = request.model_json_schema(ref_template=_SCHEMAS + "{model}")
    schemas: dict[str, Any] = schema.pop("$defs", {})
    # The docstring lists the fields; the page has them anyway.
    schema["description"] = schema["description"].partition("\n")[0]
    schema["additionalProperties"] = True
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        field.pop("expected", None)
        if name not in required:
            about = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            if {"type": "null"} not in field.get("anyOf", ()):
                field = {"anyOf": [field, {"type": "null"}]}
            schema["properties"][name] = {**about, **field}
    return {**schemas, request.__name__: schema}
