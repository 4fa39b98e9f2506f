"""The server's description of itself, ``/openapi.json``: what the framework knows, and what makes it true.

Used by :mod:`duckllm.server.app`. Refusals are ours and not the framework's: every status that a path may
answer with is there, with its envelope, and where there are keys, how they are sent.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from duckllm.server.errors import ANTHROPIC_PATHS
from duckllm.server.security import is_public

# Statuses of requests with a body: unread or malformed, of another model, late, too large.
_BODY_STATUSES = (400, 404, 408, 413)
# Of those that compute a reply, as soon as too many wait.
_REPLY_STATUS = 429
_FRAMEWORKS_STATUS = "422"
_FRAMEWORKS_SCHEMAS = ("HTTPValidationError", "ValidationError")
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_ERRORS = {
    "OpenAIError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
}


def describe(app: FastAPI, *, has_keys: bool, checks_names: bool) -> None:
    """Has the application describe itself as it is.

    Args:
        app: With all its paths.
        has_keys: Whether requests need a key.
        checks_names: Whether requests for other names than this machine's are refused.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app, has_keys=has_keys, checks_names=checks_names)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _described(app: FastAPI, *, has_keys: bool, checks_names: bool) -> dict[str, Any]:
    schema = get_openapi(
        title=app.title,
        version=app.version,
        description="Replies of a mixture-of-experts model, in the forms of several APIs.",
        routes=app.routes,
    )
    components = schema["components"]
    for name in _FRAMEWORKS_SCHEMAS:
        components["schemas"].pop(name, None)
    components["schemas"] |= _ERRORS
    if has_keys:
        components["securitySchemes"] = _SECURITY
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            _complete(path, operation, components["schemas"])
            if checks_names:
                operation["responses"].setdefault("403", _error(path, 403))
            if has_keys and not is_public(path):
                operation["security"] = [{name: []} for name in _SECURITY]
                operation["responses"]["401"] = _error(path, 401)
    return schema


def _complete(path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Adds what a path's own checks answer."""
    responses: dict[str, Any] = operation["responses"]
    responses.pop(_FRAMEWORKS_STATUS, None)
    if "501" in responses:
        responses["501"] = _error(path, 501)
    statuses = [500, 503]
    if "requestBody" in operation:
        statuses += _BODY_STATUSES
        if "stream" in _body_fields(operation, schemas):
            statuses.append(_REPLY_STATUS)
            responses["200"]["content"]["text/event-stream"] = {}
    elif operation.get("parameters"):
        statuses.append(404)
    for status in statuses:
        responses.setdefault(str(status), _error(path, status))


def _body_fields(operation: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    fields: dict[str, Any] = schemas[body["$ref"].rpartition("/")[2]]["properties"]
    return fields


def _error(path: str, status: int) -> dict[str, Any]:
    name = "AnthropicError" if path.startswith(ANTHROPIC_PATHS) else "OpenAIError"
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": HTTPStatus(status).phrase, "content": {"application/json": {"schema": schema}}}
