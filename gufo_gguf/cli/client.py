"""Requests of the command line to a running server; the standard library is enough for them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from gufo_gguf.core.errors import ConfigError, GufoError

_TIMEOUT_S = 60.0


class Client:
    """One server.  Every failure is a GufoError that names the address and the server's own words."""

    def __init__(self, url: str, api_key: str = "") -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url!r}: give it as http://host:port")
        self._base = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        """The answer's JSON."""
        with self._open(path, None) as answer:
            return json.load(answer)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects of a stream of server-sent events, until [DONE]; an error event is raised."""
        with self._open(path, body) as answer:
            for raw in answer:
                line = raw.decode("utf-8", "replace").strip()
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise GufoError(_message(event) or "the server ended the stream with an error")
                yield event

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            try:
                said = _message(json.loads(error.read()))
            except ValueError:
                said = ""
            raise GufoError(f"{self._base}{path}: status {error.code}" + (f", {said}" if said else "")) from error
        except OSError as error:
            reason = getattr(error, "reason", None) or error
            raise GufoError(f"{self._base} does not answer: {reason}") from error


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")
