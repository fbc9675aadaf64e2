"""Keys, web pages, and what the logs say."""

from __future__ import annotations

import logging

import pytest

from gufo_gguf.server.settings import ServerSettings
from tests.server.conftest import Running, Serve
from tests.server.standin import StandinEngine

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
KEYS = ("sk-one", "sk-two-ü")


@pytest.fixture
def locked(serve: Serve) -> Running:
    return serve(settings=ServerSettings(port=0, drain_s=0.2, api_keys=KEYS, isolate_keys=True))


def ask(running: Running, headers: dict[str, str]) -> int:
    return running.http.post(CHAT, json={"messages": USER}, headers=headers).status_code


def test_keys(locked: Running) -> None:
    for header in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "sk-one"},
        {"x-api-key": ""},
        {"Authorization": "Bearer"},
    ):
        assert ask(locked, header) == 401
    assert ask(locked, {"Authorization": "Bearer sk-one"}) == 200
    assert ask(locked, {"authorization": "bearer sk-one"}) == 200
    assert ask(locked, {"x-api-key": "sk-one"}) == 200


@pytest.mark.parametrize("key", ["sk-à".encode(), "Å".encode(), b"sk-\xff\xa0", b"sk-\x85", b'a,b;c="d"'])
def test_a_key_is_its_bytes(serve: Serve, key: bytes) -> None:
    """The last byte of a letter may be a blank in Latin-1, which is what headers are read as."""
    given = key.decode("utf-8", "surrogateescape")
    running = serve(settings=ServerSettings(port=0, drain_s=0.2, api_keys=(given,)))
    for headers in ({b"authorization": b"Bearer " + key}, {b"x-api-key": key}):
        answer = running.http.post(CHAT, json={"messages": USER}, headers=headers)  # type: ignore[arg-type]
        assert answer.status_code == 200, headers
    wrong = running.http.post(CHAT, json={"messages": USER}, headers={b"authorization": b"Bearer " + key[:-1]})  # type: ignore[arg-type]
    assert wrong.status_code == 401


def test_refusal_has_the_api_s_shape(locked: Running) -> None:
    answer = locked.post(CHAT, messages=USER)
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer"
    anthropic = locked.post("/v1/messages", messages=USER).json()
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "authentication_error")


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/slots", "/props", "/v1/cache", "/v1/cache/events", "/openapi.json"]
)
def test_everything_but_health_needs_a_key(locked: Running, path: str) -> None:
    assert locked.http.get(path).status_code == 401
    assert locked.http.get("/health").status_code == 200


def test_each_key_has_its_own_cache_scope(locked: Running) -> None:
    for key in (b"sk-one", "sk-two-ü".encode(), b"sk-one"):
        assert locked.http.post(CHAT, json={"messages": USER}, headers={b"x-api-key": key}).status_code == 200  # type: ignore[arg-type]
    first, second, third = (r.scope for r in locked.engine.requests)
    assert first and second and first != second and first == third
    assert "sk-one" not in first


def test_no_key_no_scope(running: Running) -> None:
    running.post(CHAT, messages=USER)
    assert running.engine.requests[0].scope == ""


def test_web_pages_are_kept_out(running: Running) -> None:
    origin = {"Origin": "http://evil.example"}
    # what a page may send without asking first
    simple = running.http.post(CHAT, content='{"messages": []}', headers={**origin, "content-type": "text/plain"})
    assert simple.status_code == 415
    assert running.engine.requests == []
    # and what it must ask for
    asked = running.http.options(CHAT, headers={**origin, "Access-Control-Request-Method": "POST"})
    assert "access-control-allow-origin" not in asked.headers
    answer = running.http.post(CHAT, json={"messages": USER}, headers=origin)
    assert "access-control-allow-origin" not in answer.headers


def test_cors_when_asked_for(serve: Serve) -> None:
    settings = ServerSettings(port=0, drain_s=0.2, cors_origins=("http://app.example",), api_keys=("k",))
    running = serve(settings=settings)
    ask_first = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    good = running.http.options(CHAT, headers={"Origin": "http://app.example", **ask_first})
    assert good.status_code == 200 and good.headers["access-control-allow-origin"] == "http://app.example"
    bad = running.http.options(CHAT, headers={"Origin": "http://evil.example", **ask_first})
    assert "access-control-allow-origin" not in bad.headers


def test_logs_hold_no_text_and_no_key(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    running = serve(StandinEngine(), ServerSettings(port=0, drain_s=0.2, api_keys=("sk-one",)))
    headers = {"x-api-key": "sk-one"}
    secret = [{"role": "user", "content": "the code word is walrus"}]
    for stream in (False, True):
        running.http.post(CHAT, json={"messages": secret, "stream": stream}, headers=headers)
    running.http.post(CHAT, json={"messages": secret, "temperature": "walrus"}, headers=headers)
    running.http.post(CHAT + "?word=walrus", json={"messages": secret}, headers={"x-api-key": "walrus"})
    running.engine.script = lambda r: [KeyError("walrus")]
    running.http.post(CHAT, json={"messages": secret}, headers=headers)
    assert sum(CHAT in r.getMessage() for r in caplog.records) >= 5, "requests were logged"
    ours = [r for r in caplog.records if r.name.startswith(("gufo", "uvicorn"))]  # not the test's own client
    text = "\n".join(caplog.handler.format(r) for r in ours)
    assert "walrus" not in text and "sk-one" not in text
