"""What every request passes before a route sees it, as plain ASGI.

    request ─► log ─► last resort ─► CORS ─► guard (content type, key, body size) ─► routes

Starlette's BaseHTTPMiddleware was rejected: it hides the client's disconnect from the response, and
a lost client must free its slot.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gufo_gguf.server.errors import Problem, log_failure, problem_of, problem_response
from gufo_gguf.server.settings import ServerSettings
from gufo_gguf.server.sse import ClientGone

log = logging.getLogger("gufo.access")

PUBLIC_PATHS = frozenset({"/health", "/v1/health", "/"})
"""Answered without a key: liveness probes and the front page hold nothing of a request."""


class RequestLog:
    """One line per request; never a query string, a header or a body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not log.isEnabledFor(logging.INFO):
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        seen: dict[str, Any] = {"status": 0, "bytes": 0}

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
            elif message["type"] == "http.response.body":
                seen["bytes"] += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            elapsed_ms = 1e3 * (time.perf_counter() - started)
            log.info(
                "%s %s %d %d bytes %.1f ms", scope["method"], scope["path"], seen["status"], seen["bytes"], elapsed_ms
            )


class LastResort:
    """An error that nobody expected becomes a 500 here; further out, its message would be logged."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except ClientGone:
            pass
        except Exception as error:
            log_failure(scope["path"], error)
            if started:
                raise ConnectionAbortedError("the response was cut") from None  # closes the connection
            await problem_response(problem_of(error), scope["path"])(scope, receive, send)


class Guard:
    """Refuses what no route should see: a wrong key, a body too large, a form posted by a web page."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self._max_body = settings.limits.body_bytes
        self._isolate = settings.isolate_keys
        # compared as digests: equal length whatever the client sends, so the time says nothing
        self._keys = [hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        problem = self._key_problem(scope, headers) or self._body_problem(scope, headers)
        if problem is not None:
            await problem_response(problem, scope["path"])(scope, receive, send)
            return
        if scope["method"] == "POST":
            scope = {**scope, "headers": _as_json(scope["headers"])}
        await self.app(scope, self._limited(receive), send)

    def _key_problem(self, scope: Scope, headers: Headers) -> Problem | None:
        if not self._keys or scope["path"] in PUBLIC_PATHS or scope["method"] == "OPTIONS":
            return None
        given = hashlib.sha256(_key_of(headers).encode("latin-1")).digest()
        # all are compared, so that the time does not say which one came close
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(matches):
            return Problem(
                401, "the API key is missing or wrong", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        if self._isolate:
            scope["gufo_key_scope"] = given[:12].hex()
        return None

    def _body_problem(self, scope: Scope, headers: Headers) -> Problem | None:
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            return Problem(400, "the Content-Length header is not a number")
        if int(length) > self._max_body:
            return self._too_large()
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        # A page of another origin may post these types without asking first; nothing else sends both.
        if scope["method"] == "POST" and "origin" in headers and not (kind.endswith(("/json", "+json"))):
            return Problem(415, "requests of web pages need the content type application/json")
        return None

    def _too_large(self) -> Problem:
        return Problem(413, f"the body is larger than {self._max_body} bytes", code="request_too_large")

    def _limited(self, receive: Receive) -> Receive:
        total = 0

        async def limited() -> Message:
            nonlocal total
            message = await receive()
            if message["type"] == "http.request":
                total += len(message.get("body", b""))
                if total > self._max_body:  # sent in chunks, without a length
                    # of this kind, because FastAPI turns any other into "could not be parsed"
                    raise HTTPException(413, self._too_large().message)
            return message

        return limited


def _key_of(headers: Headers) -> str:
    """Bearer as OpenAI's clients send it, x-api-key as Anthropic's do."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip(" \t")  # nothing else: the last byte of a key may be a blank in Latin-1
    return headers.get("x-api-key", "")


def _as_json(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Every body is read as JSON, whatever curl calls it."""
    return [*((k, v) for k, v in headers if k != b"content-type"), (b"content-type", b"application/json")]
