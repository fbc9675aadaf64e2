"""Clients that speak HTTP badly, or well and unusually: over raw sockets, against the scripted engine."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx
import pytest

from gufo_gguf.server.connection import HEAD_BYTES
from gufo_gguf.server.routes import cache as cache_routes
from gufo_gguf.server.settings import ServerSettings
from tests.server.conftest import Running, Serve, running_server
from tests.server.standin import Gate, StandinEngine
from tests.server.test_streams import eventually

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def request(body: object, path: str = CHAT, version: str = "1.1", **headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


@contextmanager
def connected(running: Running) -> Iterator[socket.socket]:
    host, port = running.url.removeprefix("http://").rsplit(":", 1)
    with closing(socket.create_connection((host, int(port)), timeout=10)) as sock:
        yield sock


def answer_of(sock: socket.socket) -> tuple[int, bytes]:
    """Status and body of one answer with a length."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        if not piece:
            raise EOFError(data)
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    while len(body) < lengths[0]:
        body += sock.recv(65536)
    return int(head.split()[1]), body


def still_serves(running: Running) -> bool:
    return running.post(CHAT, messages=USER).status_code == 200 and eventually(
        lambda: len(running.server.uvicorn.state.active) == 0
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sent_requests_ahead_and_leaves_cancels_all(serve: Serve, stream: bool) -> None:
    gate = Gate()
    running = serve(StandinEngine(script=lambda r: ["Hello", gate, "never"]))
    with connected(running) as sock:
        sock.sendall(request({"messages": USER, "stream": stream}) * 3)
        assert eventually(lambda: len(running.engine.streams) == 1)
    assert eventually(running.engine.streams[0].cancelled.is_set)
    assert len(running.engine.streams) == 1, "what nobody waits for is not begun"
    gate.set()
    assert still_serves(running)


def test_requests_sent_ahead_are_answered_in_order(running: Running) -> None:
    with connected(running) as sock:
        sock.sendall(request({"content": "a"}, "/tokenize") + request({"tokens": [98]}, "/detokenize"))
        seen = b""
        while seen.count(b"HTTP/1.1 200") < 2 or not seen.endswith(b"}"):
            seen += sock.recv(65536)
    assert seen.index(b'"tokens"') < seen.index(b'"content":"b"')


def test_a_head_without_end_is_refused(running: Running) -> None:
    for start in (b"GET /health HTTP/1.1\r\nX-Long: ", b"GET /health?"):
        with connected(running) as sock:
            sock.sendall(start)
            with pytest.raises((ConnectionError, EOFError)):  # closed while we still write, or after its answer
                for _ in range(64):
                    sock.sendall(b"x" * HEAD_BYTES)
                while sock.recv(65536):
                    pass
                raise EOFError
        assert still_serves(running)


def test_a_large_head_that_ends_is_taken(running: Running) -> None:
    reply = running.http.get("/health", headers={"x-long": "x" * (HEAD_BYTES // 2)})
    assert reply.status_code == 200
    big = running.http.post("/tokenize", json={"content": "x" * (4 * HEAD_BYTES)})
    assert len(big.json()["tokens"]) == 4 * HEAD_BYTES, "a body is no head"


@pytest.mark.parametrize("cut", [10, 60, -1])
def test_half_a_request(running: Running, cut: int) -> None:
    whole = request({"messages": USER})
    with connected(running) as sock:
        sock.sendall(whole[:cut])
    assert still_serves(running)
    assert len(running.engine.requests) == 1, "the half one was not begun"


def test_the_connection_is_used_again_after_every_refusal(running: Running) -> None:
    with connected(running) as sock:
        for body, status in (({"messages": 5}, 400), ({"messages": USER}, 200), ({"nonsense": 1}, 400)):
            sock.sendall(request(body))
            assert answer_of(sock)[0] == status


def test_a_body_in_pieces_and_one_byte_at_a_time(running: Running) -> None:
    data = json.dumps({"messages": USER}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunks = b"".join(b"1\r\n" + data[i : i + 1] + b"\r\n" for i in range(len(data)))
    with connected(running) as sock:
        for byte in head + chunks + b"0\r\n\r\n":
            sock.sendall(bytes([byte]))
        assert answer_of(sock)[0] == 200


def test_http_1_0(running: Running) -> None:
    with connected(running) as sock:
        sock.sendall(request({"messages": USER}, version="1.0"))
        assert answer_of(sock)[0] == 200
        assert sock.recv(1) == b"", "closed, as 1.0 does"


@pytest.mark.parametrize("pieces", [1, 7, 1000])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_upgrade_to_http_2_is_left_out(running: Running, pieces: int, chunked: bool) -> None:
    """Java's client asks for it with every request."""
    data = json.dumps({"messages": USER}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAA\r\n"
    head += "Upgrade: h2c\r\nX-Last: é\r\n"
    head += "Transfer-Encoding: chunked\r\n\r\n" if chunked else f"Content-Length: {len(data)}\r\n\r\n"
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data) if chunked else data
    whole = head.encode() + body
    with connected(running) as sock:
        for _ in range(2):
            step = -(-len(whole) // pieces)
            for i in range(0, len(whole), step):
                sock.sendall(whole[i : i + step])
            assert answer_of(sock)[0] == 200
        sock.sendall(whole * 2)
        assert answer_of(sock)[0] == 200
    assert all(r.tokens.tolist() == running.engine.requests[0].tokens.tolist() for r in running.engine.requests)


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/9.9",
        b"NONSENSE / HTTP/1.1",
        b"CONNECT example.com:443 HTTP/1.1\r\nHost: x",
        b"GET \xff\xfe HTTP/1.1\r\nHost: x",
        b"OPTIONS * HTTP/1.1\r\nHost: x",
        b"GET /v1/models/%ff%00%ed%a0%80 HTTP/1.1\r\nHost: x",
        b"GET /v1/cache/events?since=%ff&stream=maybe HTTP/1.1\r\nHost: x",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: \xb2",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999",
        b"DELETE /v1/requests/%00%ff HTTP/1.1\r\nHost: x",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\n"
        b"Sec-WebSocket-Version: 13",
    ],
)
def test_nonsense_is_refused_and_harms_nobody(running: Running, head: bytes) -> None:
    with connected(running) as sock:
        sock.sendall(head + b"\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)
        seen = b"".join(iter(lambda: sock.recv(65536), b""))
    assert not seen or 200 <= int(seen.split()[1]) < 500
    assert still_serves(running)


def test_a_content_length_in_other_digits() -> None:
    """What a parser in front may let pass."""
    from gufo_gguf.server.middleware import Guard

    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("must not pass")

    import asyncio

    for length in (b"\xb2", b"\xb9\xb2", b"1e3", b"", b"+1"):
        sent.clear()
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [(b"content-length", length)]}
        asyncio.run(Guard(app, ServerSettings())(scope, receive, send))
        assert sent[0]["status"] == 400, length


# -- followers of the cache's events -------------------------------------------------------------
def test_dashboards_do_not_hold_up_requests(serve: Serve) -> None:
    """A question to the owner thread takes as long as a pass; fifty at once must not take all shared threads."""
    release = threading.Event()

    class Busy(StandinEngine):
        def slots(self) -> list[dict[str, Any]]:
            release.wait(30)
            return super().slots()

    running = serve(Busy())
    with httpx.Client(base_url=running.url, timeout=30, limits=httpx.Limits(max_connections=100)) as many:
        askers = [threading.Thread(target=many.get, args=("/slots",)) for _ in range(50)]
        try:
            for asker in askers:
                asker.start()
            assert eventually(lambda: len(running.server.uvicorn.server_state.tasks) >= 50)
            assert running.post(CHAT, messages=USER).status_code == 200
        finally:
            release.set()
            for asker in askers:
                asker.join()


def test_followers_that_never_read_are_bounded_and_let_go(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_routes, "_FOLLOWERS", 3)

    class Talkative(StandinEngine):
        def cache_events(self, since: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
            return [{"seq": since + i, "kind": "x" * 1000} for i in range(1, limit + 1)]

    running = serve(Talkative())
    state = running.server.uvicorn.state
    follow = b"GET /v1/cache/events?stream=true HTTP/1.1\r\nHost: x\r\n\r\n"
    with connected(running) as a, connected(running) as b, connected(running) as c:
        for sock in (a, b, c):
            sock.sendall(follow)
        assert eventually(lambda: state.followers == 3)
        refused = running.http.get("/v1/cache/events", params={"stream": "true"})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert running.http.get("/v1/cache/events").status_code == 200
        assert still_serves(running)
    assert eventually(lambda: state.followers == 0)


def test_the_end_of_the_server_waits_for_no_reader(caplog: pytest.LogCaptureFixture) -> None:
    big = "x" * (1 << 20)

    class Talkative(StandinEngine):
        def cache_events(self, since: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
            return [{"seq": since + 1, "kind": big}]

    engine = Talkative(script=lambda r: [big] * 64)
    follow = b"GET /v1/cache/events?stream=true HTTP/1.1\r\nHost: x\r\n\r\n"
    with (
        running_server(engine, ServerSettings(port=0, drain_s=0.2)) as running,
        connected(running) as a,
        connected(running) as b,
        connected(running) as c,
    ):
        a.sendall(follow)
        b.sendall(request({"messages": USER, "stream": True}))
        c.sendall(request({"messages": USER})[:-5])
        assert eventually(lambda: running.server.uvicorn.state.followers == 1 and len(engine.streams) == 1)
        running.server.stop()
    assert engine.closed
    assert [r.getMessage() for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")] == []
