"""Failures as clients expect them: OpenAI's shape, or Anthropic's on Anthropic's paths.

    OpenAI      {"error": {"message", "type", "param", "code", ...}}
    Anthropic   {"type": "error", "error": {"type", "message"}, "request_id"}

``Problem`` is the one form inside the server; where it came from (validation, engine, routing) and
what it looks like on the wire are decided in two different functions.  FastAPI's own shape
(``{"detail": [...]}``, status 422) was rejected: no client of these APIs reads it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gufo_gguf.core.errors import ContextLengthExceeded, GufoError, ModelError, Overloaded, RequestError
from gufo_gguf.server.wire import JsonResponse

log = logging.getLogger("gufo.server")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    501: "not_supported_error",
    503: "unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {501: "invalid_request_error", 503: "overloaded_error", 500: "api_error"}


@dataclass(frozen=True, slots=True)
class Problem:
    status: int
    message: str
    code: str | None = None
    param: str | None = None
    type: str | None = None
    """None = the usual one for the status."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


class ProblemError(Exception):
    """A problem found while a request is handled; becomes its response."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def refuse(message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> ProblemError:
    """An exception for a request that cannot be served as asked."""
    return ProblemError(Problem(status, message, code=code, param=param))


def problem_of(error: BaseException) -> Problem:
    """What an exception means for the client.  Internal ones say nothing of their insides."""
    match error:
        case ProblemError():
            return error.problem
        case ContextLengthExceeded():
            # clients look at `type` (llama-server's), at `code` (OpenAI's), or for a phrase in the message
            return Problem(
                400,
                f"the request has {error.n_prompt} prompt tokens and exceeds the available context size of "
                f"{error.n_ctx} tokens; shorten the prompt or start the server with a larger --ctx-size",
                code=error.code,
                param=error.param or "messages",
                type="exceed_context_size_error",
                extra={"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx},
            )
        case RequestError():
            return Problem(400, str(error), code=error.code, param=error.param)
        case Overloaded():
            return Problem(503, str(error), code="overloaded", headers={"Retry-After": str(error.retry_after_s)})
        case RecursionError():
            return Problem(400, "the request is nested too deeply")
        case UnicodeError():
            return Problem(400, "the request holds text that is not valid Unicode (half of a surrogate pair)")
        case HTTPException():
            return _routing(error)
        case ModelError() | GufoError():
            return Problem(500, str(error), code=type(error).__name__)
        case _:
            return Problem(500, "internal error; the server's log says more", code="internal_error")


def _routing(error: HTTPException) -> Problem:
    headers = dict(error.headers or {})
    match error.status_code:
        case 404:
            return Problem(404, "there is no such path here", code="not_found", headers=headers)
        case 405:
            return Problem(405, "this path does not take that method", code="method_not_allowed", headers=headers)
        case status:
            return Problem(status, str(error.detail or HTTPStatus(status).phrase), headers=headers)


def field_path(loc: tuple[str | int, ...]) -> str | None:
    """``("body", "messages", 0, "role")`` as ``messages[0].role``."""
    path = ""
    for part in loc[1:] if loc and loc[0] in ("body", "query", "path", "header") else loc:
        path += f"[{part}]" if isinstance(part, int) else (f".{part}" if path else part)
    return path or None


def validation_problem(error: RequestValidationError) -> Problem:
    """The first thing wrong with a body, naming the field.  The offending value is not repeated."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return Problem(
            400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', 'syntax error')}", code="invalid_json"
        )
    param = first.get("ctx", {}).get("name") or field_path(tuple(first["loc"]))
    reason = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "missing":
        reason = "is required"
    if param is None:
        return Problem(400, f"the body is not usable: {reason}", code="invalid_body")
    if not reason.startswith(f"{param}:"):
        reason = f"{param}: {reason}"
    return Problem(
        400, reason, code=first["type"] if first["type"].endswith("_field") else "invalid_value", param=param
    )


def openai_body(problem: Problem) -> dict[str, Any]:
    return {
        "error": {
            "message": problem.message,
            "type": problem.type
            or _TYPES.get(problem.status, "server_error" if problem.status >= 500 else "invalid_request_error"),
            "param": problem.param,
            "code": problem.code or problem.status,
            **problem.extra,
        }
    }


def anthropic_body(problem: Problem) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(problem.status) or _TYPES.get(problem.status, "api_error")
    details = {"details": problem.extra["details"]} if "details" in problem.extra else {}
    return {"type": "error", "error": {"type": kind, "message": problem.message, **details}}


def is_anthropic(path: str) -> bool:
    return path.startswith(("/v1/messages", "/messages"))


def problem_response(problem: Problem, path: str) -> Response:
    body = anthropic_body(problem) if is_anthropic(path) else openai_body(problem)
    return JsonResponse(body, status_code=problem.status, headers=dict(problem.headers))


def log_failure(path: str, error: BaseException) -> None:
    """Where it failed, without the exception's message: that may hold a piece of a prompt."""
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s failed: %s\n%s", path, type(error).__name__, where)
    log.debug("the message of that: %s", error)


def install_handlers(app: FastAPI) -> None:
    """Every way a request can fail before its response began, in one shape."""

    async def handle(request: Request, error: Exception) -> Response:
        problem = validation_problem(error) if isinstance(error, RequestValidationError) else problem_of(error)
        if problem.status >= 500 and problem.status not in (501, 503, 504):
            log_failure(request.url.path, error)
        return problem_response(problem, request.url.path)

    for kind in (ProblemError, GufoError, RequestValidationError, HTTPException, UnicodeError, RecursionError):
        app.add_exception_handler(kind, handle)
