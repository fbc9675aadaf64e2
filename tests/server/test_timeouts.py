"""Time limits of requests and cancelling by id: what the client sees, and that the slot is let go."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from gufo_gguf.server.settings import ServerSettings
from tests.server.conftest import Running, Serve
from tests.server.standin import Gate, StandinEngine
from tests.server.test_streams import eventually

USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
    "/v1/responses": {"input": "x"},
    "/completion": {"prompt": "x"},
}


def hangs(serve: Serve, **settings: Any) -> Running:
    """A server whose answers never end."""
    engine = StandinEngine(script=lambda r: ["Hello", Gate(), "never"])
    return serve(engine, ServerSettings(port=0, drain_s=0.2, **settings) if settings else None)


def cancelled(running: Running) -> bool:
    return eventually(
        lambda: bool(running.engine.streams) and all(s.cancelled.is_set() for s in running.engine.streams)
    )


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_that_takes_too_long_is_504(serve: Serve, path: str) -> None:
    running = hangs(serve)
    answer = running.post(path, **BODIES[path], timeout=0.1)
    assert answer.status_code == 504 and answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert error["type"] == "timeout_error" and "0.1 s" in error["message"]
    if path != "/v1/messages":
        assert error["code"] == "timeout"
    assert cancelled(running)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_takes_too_long_ends_with_an_error(serve: Serve, path: str) -> None:
    running = hangs(serve)
    answer = running.post(path, **BODIES[path], timeout=0.1, stream=True)
    assert answer.status_code == 200
    data = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "Hello" in answer.text and "never" not in answer.text
    last = data[-1]
    error = last["response"]["error"] if path == "/v1/responses" else last["error"]
    assert "0.1 s" in error["message"]
    assert cancelled(running)


def test_the_servers_limit_holds_for_all_and_a_request_can_only_ask_for_less(serve: Serve) -> None:
    running = hangs(serve, timeout_s=0.1)
    for body in ({}, {"timeout": 500}, {"timeout": 0}):
        assert running.post("/v1/chat/completions", messages=USER, **body).status_code == 504


def test_in_time_is_in_time(serve: Serve) -> None:
    running = serve(StandinEngine(), ServerSettings(port=0, drain_s=0.2, timeout_s=30))
    for path, body in BODIES.items():
        assert running.post(path, **body, timeout=20).status_code == 200
    assert running.error("/v1/completions", prompt="x", timeout=-1)["param"] == "timeout"


def test_official_clients_do_not_ask_again(serve: Serve) -> None:
    running = hangs(serve)
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=3)
    with pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(model="any", messages=USER, extra_body={"timeout": 0.1})  # type: ignore[arg-type]
    assert failed.value.status_code == 504 and len(running.engine.requests) == 1
    other = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=3)
    with pytest.raises(anthropic.InternalServerError):
        other.messages.create(model="any", max_tokens=9, messages=USER, extra_body={"timeout": 0.1})  # type: ignore[arg-type]
    assert len(running.engine.requests) == 2


# -- by id -----------------------------------------------------------------------------------------
def begun(running: Running, path: str) -> tuple[Any, str]:
    """A stream that has begun, and its id."""
    context = running.http.stream("POST", path, json={**BODIES[path], "stream": True})
    stream = context.__enter__()
    lines = stream.iter_lines()
    for line in lines:
        if line.startswith("data: "):
            first = json.loads(line[6:])
            break
    return (context, lines), str(first["response"]["id"] if "response" in first else first["id"])


@pytest.mark.parametrize("how", ["delete", "cancel", "requests"])
def test_a_response_can_be_cancelled_as_openais_client_does_it(serve: Serve, how: str) -> None:
    running = hangs(serve)
    (context, lines), answer_id = begun(running, "/v1/responses")
    if how == "delete":
        running.openai.responses.delete(answer_id)
    elif how == "cancel":
        assert running.openai.responses.cancel(answer_id).status == "cancelled"
    else:
        assert httpx.delete(f"{running.url}/v1/requests/{answer_id}").json()["cancelled"] is True
    rest = "\n".join(lines)
    context.__exit__(None, None, None)
    assert "response.failed" in rest and '"code":"cancelled"' in rest and "never" not in rest
    assert cancelled(running)
    with pytest.raises(openai.NotFoundError):
        running.openai.responses.cancel(answer_id)


def test_a_chat_completion_can_be_deleted_while_it_is_written(serve: Serve) -> None:
    running = hangs(serve)
    (context, lines), answer_id = begun(running, "/v1/chat/completions")
    assert running.openai.chat.completions.delete(answer_id).deleted is True
    assert '"code":"cancelled"' in "\n".join(lines)
    context.__exit__(None, None, None)
    with pytest.raises(openai.NotFoundError):
        running.openai.chat.completions.delete(answer_id)
