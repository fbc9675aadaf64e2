"""A blocking HTTP client with server-sent events: the standard library, so that no client adds its own time."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 1800.0


class HttpError(Exception):
    """The server did not answer, or answered with an error."""


class Http:
    """One connection per request: keeping one open would let a slow close of the last request count in the next."""

    def __init__(self, base: str) -> None:
        parts = urlsplit(base)
        self.base = base
        self._host, self._port, self._secure = parts.hostname or "", parts.port, parts.scheme == "https"

    def get(self, path: str) -> Any:
        connection, answer = self._open("GET", path, None)
        with connection:
            return json.loads(answer.read() or b"{}")

    def text(self, path: str) -> str:
        connection, answer = self._open("GET", path, None)
        with connection:
            return answer.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        connection, answer = self._open("POST", path, body)
        with connection:
            return json.loads(answer.read() or b"{}")

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Events until [DONE] or the end; an error event is raised."""
        connection, answer = self._open("POST", path, body)
        with connection:
            for raw in answer:
                line = raw.strip()
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise HttpError(str(event["error"]))
                yield event

    def _open(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[_Closing, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_TIMEOUT_S)
        payload = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise HttpError(f"{self.base}{path}: {error}") from error
        if answer.status >= 400:
            said = answer.read().decode("utf-8", "replace")[:500]
            connection.close()
            raise HttpError(f"{self.base}{path}: status {answer.status}: {said}")
        return _Closing(connection), answer


class _Closing:
    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._connection.close()
