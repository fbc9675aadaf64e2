"""Requests that cannot be served as asked: the right status, the field's name, OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import openai
import pytest

from gufo_gguf.core.errors import BackendError, RequestError
from gufo_gguf.server.schema.ignored import IGNORED
from gufo_gguf.server.settings import Limits, ServerSettings
from tests.server.conftest import Running, Serve
from tests.server.standin import StandinEngine

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", "0.5"),
        ("temperature", -1),
        ("temperature", True),
        ("top_p", 1.5),
        ("top_k", 1.5),
        ("min_p", []),
        ("seed", "1"),
        ("max_tokens", "100"),
        ("max_completion_tokens", -2),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stream", "yes"),
        ("n", 0),
        ("n", 1000),
        ("cache_prompt", 1),
        ("logit_bias", "x"),
        ("logit_bias", {"1": "x"}),
        ("logit_bias", [[1]]),
        ("logit_bias", {"99999999999": 1}),
        ("stream_options", 5),
        ("mirostat", 3),
        ("samplers", "top_k"),
        ("dry_sequence_breakers", []),
        ("tools", 5),
        ("tool_choice", "sometimes"),
        ("response_format", "json"),
        ("top_logprobs", 500),
        ("chat_template_kwargs", []),
        ("reasoning_format", "loud"),
        ("messages", "hello"),
        ("messages", []),
        ("messages", None),
    ],
)
def test_wrong_values_name_the_field(running: Running, field: str, value: object) -> None:
    body = {"messages": USER, "logprobs": True, field: value}
    error = running.error(CHAT, **body)
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert field in str(error["message"])
    assert running.engine.requests == []


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([5], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([*USER, {"role": "assistant"}], "messages[1].content"),
        ([{"role": "usr", "content": "x"}], "messages[0].role"),
        ([{"role": "User", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": ["text"], "text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": {}, "text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "smell"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([*USER, {"role": "assistant", "tool_calls": 5}], "messages[1].tool_calls"),
        ([*USER, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0].function"),
        ([*USER, {"role": "tool", "content": "x", "tool_call_id": 5}], "messages[1].tool_call_id"),
        ([*USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], "messages"),
    ],
)
def test_wrong_messages_name_the_place(running: Running, messages: list[object], param: str) -> None:
    assert running.error(CHAT, messages=messages)["param"] == param


@pytest.mark.parametrize(
    ("path", "wrong", "param", "allowed"),
    [
        (
            CHAT,
            {"messages": [*USER, {"role": "usr", "content": "x"}]},
            "messages[1].role",
            ("system", "developer", "user", "assistant", "tool", "function"),
        ),
        ("/v1/messages", {"messages": [{"role": "usr", "content": "x"}]}, None, ("user", "assistant")),
        (
            "/v1/responses",
            {"input": [{"role": "usr", "content": "x"}]},
            "input[0].role",
            ("user", "assistant", "system", "developer"),
        ),
    ],
)
def test_a_role_that_is_none_is_refused_with_those_there_are(
    running: Running, path: str, wrong: dict[str, object], param: str | None, allowed: tuple[str, ...]
) -> None:
    error = running.error(path, **wrong)
    assert error.get("param") == param
    said = str(error["message"])
    assert "role: must be one of " in said and all(role in said for role in allowed)
    assert running.engine.requests == []


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_every_role_that_there_is_is_taken(running: Running, role: str) -> None:
    assert running.post(CHAT, messages=[*USER, {"role": role, "content": "x"}, *USER]).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/completion", "/v1/messages", "/v1/responses"])
def test_any_model_name_means_the_one_that_is_loaded(running: Running, path: str) -> None:
    prompt = {"messages": USER} if path in (CHAT, "/v1/messages") else {"prompt": "x", "input": "x"}
    prompt.pop("input" if "complet" in path else "prompt", None)
    for name in ("gpt-4o", "", "claude-sonnet-4-5", None):
        answer = running.post(path, model=name, max_tokens=4, **prompt)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "standin"
    missing = running.http.get("/v1/models/gpt-4o")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("choice", [{"type": "allowed_tools", "allowed_tools": 5}, {"type": "function", "function": 5}])
def test_a_tool_choice_of_the_wrong_shape(running: Running, choice: object) -> None:
    assert str(running.error(CHAT, messages=USER, tool_choice=choice)["param"]).startswith("tool_choice")


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"type": "array", "items": value}
    return value


DEEP = [
    (CHAT, "response_format", lambda v: {"type": "json_schema", "json_schema": {"schema": v}}),
    (CHAT, "json_schema", lambda v: v),
    (CHAT, "chat_template_kwargs", lambda v: {"x": v}),
    (CHAT, "tools", lambda v: [{"type": "function", "function": {"name": "f", "parameters": v}}]),
    (CHAT, "messages", lambda v: [{"role": "user", "content": "x", "extra": v}]),
    ("/v1/completions", "json_schema", lambda v: v),
    ("/completion", "json_schema", lambda v: v),
    ("/v1/messages", "tools", lambda v: [{"name": "f", "input_schema": v}]),
    ("/v1/responses", "tools", lambda v: [{"type": "function", "name": "f", "parameters": v}]),
    ("/apply-template", "tools", lambda v: [{"type": "function", "function": {"name": "f", "parameters": v}}]),
]


@pytest.mark.parametrize(("path", "field", "make"), DEEP)
def test_what_goes_to_native_code_is_neither_deep_nor_infinite(
    running: Running, path: str, field: str, make: Callable[[object], object]
) -> None:
    prompt: dict[str, object] = {"prompt": "x"} if path in ("/v1/completions", "/completion") else {"messages": USER}
    prompt = {"input": "x"} if path == "/v1/responses" else prompt

    def send(value: object) -> httpx.Response:
        body = json.dumps({**prompt, field: make(value)})
        return running.http.post(path, content=body, headers={"content-type": "application/json"})

    for value, word in (
        (nested(120), "levels deep"),
        ({"default": float("nan")}, "NaN"),
        ({"enum": [float("-inf")]}, "Infinity"),
    ):
        reply = send(value)
        assert reply.status_code == 400 and reply.json()["error"]["message"].startswith(f"{field}: "), reply.text
        assert word in reply.json()["error"]["message"]
    assert send(nested(90)).status_code == 200


def test_image_without_projector_says_so(running: Running) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error = running.error(CHAT, messages=[{"role": "user", "content": [part]}])
    assert "no projector is loaded" in str(error["message"])


def test_unknown_field_is_named_with_a_suggestion(running: Running) -> None:
    error = running.error(CHAT, messages=USER, temprature=0.5)
    assert error["param"] == "temprature"
    assert error["code"] == "unknown_field"
    assert "temperature" in str(error["message"])


def test_fields_without_effect_are_accepted(running: Running) -> None:
    fields = {name: {"any": ["thing"]} for name in sorted(IGNORED)}
    assert running.post(CHAT, messages=USER, **fields, **{"speculative.n_max": 4, "x_mine": 1}).status_code == 200
    assert running.post("/v1/completions", prompt="x", **fields).status_code == 200


def test_null_means_absent(running: Running) -> None:
    names = (
        "temperature",
        "top_p",
        "seed",
        "stop",
        "max_tokens",
        "tools",
        "tool_choice",
        "response_format",
        "logit_bias",
    )
    names += (
        "stream",
        "stream_options",
        "n",
        "logprobs",
        "top_logprobs",
        "user",
        "reasoning_effort",
        "parallel_tool_calls",
    )
    assert running.post(CHAT, messages=USER, **dict.fromkeys(names)).status_code == 200
    assert running.engine.requests[0].sampling.temperature == 0.8


def test_understood_but_not_built_is_refused_unless_it_asks_for_nothing(running: Running) -> None:
    assert running.post(CHAT, messages=USER, lora=[], post_sampling_probs=False).status_code == 200
    error = running.error(CHAT, messages=USER, lora=[{"id": 0, "scale": 1}])
    assert (error["param"], error["code"]) == ("lora", "unsupported_field")


@pytest.mark.parametrize("body", [b"", b"{", b"[1, 2", b'{"a": }', b"\xff\xfe", b'{"messages": "\xff"}'])
def test_malformed_json(running: Running, body: bytes) -> None:
    answer = running.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "error" in answer.json()


@pytest.mark.parametrize("body", ["[]", '"text"', "5", "null"])
def test_body_that_is_no_object(running: Running, body: str) -> None:
    answer = running.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400


def test_nesting_without_end_is_refused(running: Running) -> None:
    deep = '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}"
    answer = running.http.post(CHAT, content=deep, headers={"content-type": "application/json"})
    assert answer.status_code == 400


def test_half_a_surrogate_pair(running: Running) -> None:
    body = json.dumps({"prompt": "\ud800"})
    answer = running.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "Unicode" in answer.json()["error"]["message"]


def test_nan_is_not_a_number(running: Running) -> None:
    answer = running.http.post(
        CHAT, content='{"messages": [], "temperature": NaN}', headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400


def test_curl_without_content_type(running: Running) -> None:
    body = json.dumps({"messages": USER})
    answer = running.http.post(CHAT, content=body, headers={"content-type": "application/x-www-form-urlencoded"})
    assert answer.status_code == 200


def test_paths_and_methods(running: Running) -> None:
    missing = running.http.get("/v2/chat")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    wrong = running.http.get(CHAT)
    assert wrong.status_code == 405 and "error" in wrong.json()
    assert "POST" in wrong.headers["allow"]


def test_prompt_longer_than_the_context(serve: Serve) -> None:
    running = serve(StandinEngine(n_ctx=64))
    error = running.error(CHAT, messages=[{"role": "user", "content": "x" * 500}])
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "exceed_context_size_error"
    assert error["n_ctx"] == 64 and isinstance(error["n_prompt_tokens"], int) and error["n_prompt_tokens"] > 500
    assert "64" in str(error["message"]) and str(error["n_prompt_tokens"]) in str(error["message"])
    with pytest.raises(openai.BadRequestError) as caught:
        running.openai.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "x" * 500}], stream=True
        )
    assert caught.value.code == "context_length_exceeded"


def test_full_queue_is_503_with_retry_after(serve: Serve) -> None:
    running = serve(StandinEngine(full=True))
    answer = running.post(CHAT, messages=USER)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "3"
    assert answer.json()["error"]["code"] == "overloaded"


def test_a_choice_that_does_not_fit_the_queue_takes_the_others_back(serve: Serve) -> None:
    class Small(StandinEngine):
        def submit(self, request):  # type: ignore[no-untyped-def]
            self.full = len(self.requests) >= 2
            return super().submit(request)

    running = serve(Small())
    assert running.post(CHAT, messages=USER, n=3).status_code == 503
    assert [s.cancelled.is_set() for s in running.engine.streams] == [True, True]


@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_is_an_http_error(serve: Serve, stream: bool) -> None:
    running = serve(StandinEngine(script=lambda r: [RequestError("grammar: does not parse", param="grammar")]))
    answer = running.post(CHAT, messages=USER, stream=stream, grammar="root ::=")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "grammar"


def test_failure_inside_a_stream_is_an_error_event(serve: Serve) -> None:
    running = serve(StandinEngine(script=lambda r: ["Hel", BackendError("the device is gone")]))
    with pytest.raises(openai.APIError, match="the device is gone"):
        list(running.openai.chat.completions.create(model="any", messages=USER, stream=True))  # type: ignore[arg-type]


def test_internal_errors_say_nothing_of_their_insides(serve: Serve) -> None:
    running = serve(StandinEngine(script=lambda r: [KeyError("secret prompt text")]))
    answer = running.post(CHAT, messages=USER)
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_limits(serve: Serve) -> None:
    limits = Limits(body_bytes=2000, choices=2, stop_strings=2, stop_chars=10, prompt_tokens=100, logprobs=3)
    running = serve(settings=ServerSettings(port=0, drain_s=0.2, limits=limits))
    assert running.post(CHAT, messages=USER, pad="x" * 3000).status_code == 413
    chunked = running.http.post(CHAT, content=iter([b'{"a": "', b"x" * 3000, b'"}']))
    assert chunked.status_code == 413
    assert running.error(CHAT, messages=USER, n=3)["param"] == "n"
    assert running.error(CHAT, messages=USER, stop=["a", "b", "c"])["param"] == "stop"
    assert running.error(CHAT, messages=USER, stop="x" * 11)["param"] == "stop"
    assert running.error(CHAT, messages=USER, logprobs=True, top_logprobs=4)["param"] == "top_logprobs"
    assert running.error("/v1/completions", prompt="x" * 200)["param"] == "prompt"


@pytest.mark.native
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": [1_000_000_000], "n_predict": 2}),
        ("/v1/completions", {"prompt": [1_000_000_000], "echo": True, "max_tokens": 1}),
        ("/v1/completions", '{"prompt": "a", "max_tokens": 1, "logit_bias": {"10": 1e999}}'),
        ("/v1/completions", '{"prompt": "a", "max_tokens": 1, "logit_bias": {"10": 1' + "0" * 400 + "}}"),
    ],
)
def test_what_once_ended_the_process_is_an_error_of_its_request(path: str, body: object) -> None:
    from tests.conftest import tiny_model_path
    from tests.server.test_native import native_server

    for running, _ in native_server(tiny_model_path("llama"), 1):
        content = body if isinstance(body, str) else json.dumps(body)
        reply = httpx.post(running.url + path, content=content, headers={"content-type": "application/json"})
        assert reply.status_code == 400, reply.text
        after = httpx.post(running.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=60)
        assert after.status_code == 200
