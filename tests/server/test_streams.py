"""A stream in time: lost clients, silence, shutdown, many at once, slow readers."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest

from gufo_gguf.engine.types import GenerateRequest
from gufo_gguf.server.settings import Limits, ServerSettings
from tests.server.conftest import Running, Serve
from tests.server.standin import Gate, StandinEngine, Step

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def eventually(true: object, seconds: float = 5) -> bool:
    """Poll a condition of another thread; the time is a bound for a broken run, not a measurement."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():  # type: ignore[operator]
            return True
        time.sleep(0.005)
    return False


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/completion", "/v1/responses"])
def test_client_gone_in_a_stream_cancels(serve: Serve, path: str) -> None:
    gate = Gate()
    running = serve(StandinEngine(script=lambda r: ["Hello", gate, "never"]))
    body: dict[str, object] = {"messages": USER} if "complet" not in path or path == CHAT else {"prompt": "x"}
    body = {"input": "x"} if path == "/v1/responses" else body
    with running.http.stream("POST", path, json={**body, "stream": True}) as stream:
        texts = stream.iter_text()  # kept: dropping the iterator closes the connection
        seen = ""
        while "Hello" not in seen:
            seen += next(texts)
        assert not running.engine.streams[0].cancelled.is_set()
    assert eventually(running.engine.streams[0].cancelled.is_set)


@pytest.mark.parametrize("stream", [False, True])
def test_client_gone_before_the_answer_cancels_every_choice(serve: Serve, stream: bool) -> None:
    gate = Gate()
    running = serve(StandinEngine(script=lambda r: [gate, "never"]))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(running.url + CHAT, json={"messages": USER, "n": 2, "stream": stream}, timeout=0.3)
    assert eventually(lambda: len(running.engine.streams) == 2)
    assert eventually(lambda: all(s.cancelled.is_set() for s in running.engine.streams))


def test_cancel_by_id(serve: Serve) -> None:
    gate = Gate()
    running = serve(StandinEngine(script=lambda r: ["Hello", gate, "never"]))
    with running.http.stream("POST", CHAT, json={"messages": USER, "stream": True}) as stream:
        texts = stream.iter_text()
        seen = next(texts)
        answer_id = json.loads(seen.splitlines()[0].removeprefix("data: "))["id"]
        assert running.engine.requests[0].request_id == answer_id
        assert httpx.delete(f"{running.url}/v1/requests/{answer_id}").json()["cancelled"] is True
        seen += "".join(texts)
    assert '"code":"cancelled"' in seen and "never" not in seen
    assert eventually(lambda: httpx.delete(f"{running.url}/v1/requests/{answer_id}").status_code == 404)


def test_finished_streams_leave_nothing_behind(running: Running) -> None:
    for _ in range(3):
        running.post(CHAT, messages=USER, stream=True)
        running.post(CHAT, messages=USER)
    assert eventually(lambda: len(running.server.uvicorn.state.active) == 0)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (CHAT, '"delta":{}'),
        ("/v1/completions", '"text":""'),
        ("/v1/messages", "event: ping"),
        ("/completion", '"content":""'),
        ("/v1/responses", "event: response.in_progress"),
    ],
)
def test_silence_is_filled_with_real_events(serve: Serve, path: str, expected: str) -> None:
    gate = Gate()
    settings = ServerSettings(port=0, drain_s=0.2, keepalive_s=0.05)
    running = serve(StandinEngine(script=lambda r: [gate, "Hello"], progress=()), settings)
    body: dict[str, object] = {"messages": USER} if path in (CHAT, "/v1/messages") else {"prompt": "x"}
    body = {"input": "x"} if path == "/v1/responses" else body
    with running.http.stream("POST", path, json={**body, "stream": True}) as stream:
        seen = ""
        for text in stream.iter_text():
            seen += text
            if seen.count(expected) >= 2:
                gate.set()
    assert seen.count(expected) >= 2
    assert "Hello" in seen
    assert not any(line.startswith(":") for line in seen.splitlines()), "comments are no events for some clients"


def test_keepalives_do_not_disturb_the_official_client(serve: Serve) -> None:
    gate = Gate()
    threading.Timer(0.3, gate.set).start()
    running = serve(
        StandinEngine(script=lambda r: [gate, "Hello"]), ServerSettings(port=0, drain_s=0.2, keepalive_s=0.05)
    )
    with running.openai.chat.completions.stream(model="any", messages=USER) as stream:  # type: ignore[arg-type]
        assert stream.get_final_completion().choices[0].message.content == "Hello"


def test_slow_reader_does_not_stall_others(serve: Serve) -> None:
    big = "x" * 20_000

    def script(request: GenerateRequest) -> list[Step]:
        return [big] * 200 if len(request.tokens) > 60 else ["short"]

    running = serve(StandinEngine(script=script))
    with running.http.stream(
        "POST", CHAT, json={"messages": [{"role": "user", "content": "y" * 60}], "stream": True}
    ) as slow:
        next(slow.iter_raw(1024))  # and then read no more
        for _ in range(3):
            answer = httpx.post(running.url + CHAT, json={"messages": USER}, timeout=10)
            assert answer.json()["choices"][0]["message"]["content"] == "short"


def test_many_streams_at_once_get_their_own_words(serve: Serve) -> None:
    def script(request: GenerateRequest) -> list[Step]:
        word = bytes(t for t in request.tokens.tolist() if 97 <= t < 123).decode()[-5:]
        return [*word, "."]

    running = serve(StandinEngine(script=script))
    got: dict[str, str] = {}

    def ask(word: str) -> None:
        text = httpx.post(running.url + "/v1/completions", json={"prompt": word, "stream": True}, timeout=20).text
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        got[word] = "".join(c["choices"][0]["text"] for c in chunks)

    words = ["alpha", "bravo", "delta", "gamma", "kappa", "omega", "sigma", "theta"]
    threads = [threading.Thread(target=ask, args=(word,)) for word in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == {word: f"{word}." for word in words}


def test_more_requests_than_the_limit_are_503(serve: Serve) -> None:
    gate = Gate()
    settings = ServerSettings(port=0, drain_s=0.2, limits=Limits(streams=1))
    running = serve(StandinEngine(script=lambda r: ["a", gate, "b"]), settings)
    with running.http.stream("POST", CHAT, json={"messages": USER, "stream": True}) as stream:
        texts = stream.iter_text()
        next(texts)
        second = httpx.post(running.url + CHAT, json={"messages": USER})
        assert (second.status_code, second.headers["retry-after"]) == (503, "1")
        gate.set()


def test_shutdown_waits_for_running_streams(serve: Serve) -> None:
    gate = Gate()
    running = serve(StandinEngine(script=lambda r: ["a", gate, "b"]), ServerSettings(port=0, drain_s=30))
    with running.http.stream("POST", CHAT, json={"messages": USER, "stream": True}) as stream:
        texts = stream.iter_text()
        seen = next(texts)
        running.server.uvicorn.handle_exit(15, None)
        gate.set()
        seen += "".join(texts)
    assert '"content":"b"' in seen and "[DONE]" in seen
    assert eventually(lambda: running.engine.closed)


def test_shutdown_cancels_what_does_not_end(serve: Serve) -> None:
    gate = Gate()
    running = serve(StandinEngine(script=lambda r: ["a", gate, "b"]), ServerSettings(port=0, drain_s=0.1))
    with running.http.stream("POST", CHAT, json={"messages": USER, "stream": True}) as stream:
        texts = stream.iter_text()
        seen = next(texts)
        running.server.uvicorn.handle_exit(15, None)
        seen += "".join(texts)
    assert '"code":"cancelled"' in seen
    assert eventually(lambda: running.engine.closed)


def test_no_new_requests_while_shutting_down(serve: Serve) -> None:
    gate = Gate()
    running = serve(StandinEngine(script=lambda r: ["a", gate, "b"]), ServerSettings(port=0, drain_s=30))
    with running.http.stream("POST", CHAT, json={"messages": USER, "stream": True}) as stream:
        texts = stream.iter_text()
        next(texts)
        running.server.uvicorn.handle_exit(15, None)
        refused = httpx.post(running.url + CHAT, json={"messages": USER})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert httpx.get(running.url + "/health").status_code == 503
        gate.set()
        list(texts)
