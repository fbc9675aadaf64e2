"""uvicorn's HTTP/1.1 connection, with what it leaves open for odd clients.

    requests sent ahead (pipelining)   when the client goes, every request of the connection is told, not
                                       only the newest: the one that is being answered holds a slot
    a head without end                 refused beyond 64 KiB; httptools gathers it without a limit
    an offer of HTTP/2 or a websocket  ignored, as it may be; httptools leaves out the body of such a request,
                                       and Java's HTTP client makes the offer with every one

h11, which has both, was rejected: it costs more per chunk of a stream than the token's sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_BYTES = 64 << 10
"""Of a request line and headers that come in more than one piece."""
_AHEAD = 16
"""Requests sent ahead while which the connection is still read, so that its end is noticed."""


class _Parser:
    """httptools' parser, which is given a request that offers an upgrade once more without the offer."""

    def __init__(self, parser: Any, head: Callable[[], bytes]) -> None:
        self._parser = parser
        self._head = head

    def feed_data(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head() + data[upgrade.args[0] :]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


class Connection(HttpToolsProtocol):
    """Event-loop thread only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser: Any = _Parser(self.parser, self._plain_head)
        self._in_head = True
        self._head_bytes = 0
        self._older: list[RequestResponseCycle] = []
        """Requests before the newest one that are not answered yet."""

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data) if self._in_head else 0
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def _plain_head(self) -> bytes:
        """What was just parsed, without the offer of an upgrade."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] not in (b"upgrade", b"connection")]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("a server is no proxy")
            return
        self._in_head, self._head_bytes = False, 0
        before = self.cycle
        super().on_headers_complete()
        self._older = [cycle for cycle in self._older if not cycle.response_complete]
        if before is not None and before is not self.cycle and not before.response_complete:
            self._older.append(before)
            if len(self.pipeline) < _AHEAD:
                self.flow.resume_reading()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head = True
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._older:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._older.clear()
        super().connection_lost(exc)
