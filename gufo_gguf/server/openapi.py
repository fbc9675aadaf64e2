"""The OpenAPI document, corrected: errors as they really are.

FastAPI documents its own 422 for every body; here such a request is a 400 in OpenAI's shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
            },
        }
    },
}
_ERRORS = {
    "400": "The request cannot be served as asked; `param` names the field.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such thing here.",
    "413": "The body is larger than the server takes.",
    "415": "A web page's request that is not JSON.",
    "500": "A bug or a failure of the device.",
    "501": "Understood, but not built.",
    "504": "The request took longer than its limit (`--timeout`, or its field `timeout`).",
    "503": "Too many requests, or shutting down; Retry-After says when to try again.",
}


_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/completion")
"""Answered as server-sent events when the body says ``stream: true``."""


def install(app: FastAPI) -> None:
    """Make ``app.openapi()`` give the corrected document."""
    original: Callable[[], dict[str, Any]] = app.openapi

    def corrected() -> dict[str, Any]:
        document = original()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas["Error"] = _ERROR_SCHEMA
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        for path, operations in document["paths"].items():
            for operation in operations.values():
                responses = operation["responses"]
                if path in _STREAMED or path == "/v1/cache/events":
                    responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
                responses.pop("422", None)
                for status, text in _ERRORS.items():
                    responses.setdefault(status, {"description": text, "content": content})
        return document

    app.openapi = corrected  # type: ignore[method-assign]
