"""/v1/messages with the official client, against the scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import pytest

from gufo_gguf.core.errors import BackendError
from tests.server.conftest import Running, Serve
from tests.server.standin import StandinEngine, tokens_of

PATH = "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "name": "look",
        "description": "Look.",
        "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
    }
]
CALL = [
    "<think>",
    "hm",
    "</think>",
    "Let me ",
    "look.",
    '<tool_call>{"name": "look", "arguments": ',
    '{"at": "x"}}</tool_call>',
]


@pytest.fixture
def client(serve: Serve) -> Iterator[anthropic.Anthropic]:
    running = serve(StandinEngine(script=lambda r: CALL))
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0, timeout=30) as made:
        yield made


def events_of(running: Running, **body: object) -> list[dict[str, object]]:
    text = running.post(PATH, stream=True, **body).text
    frames = [frame.split("\n") for frame in text.strip().split("\n\n")]
    events = []
    for name, data in frames:
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_whole_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="any", max_tokens=50, messages=USER, tools=TOOLS)  # type: ignore[arg-type]
    assert [b.type for b in message.content] == ["thinking", "text", "tool_use"]
    thinking, text, tool = message.content
    assert (thinking.thinking, text.text) == ("hm", "Let me look.")  # type: ignore[union-attr]
    assert (tool.name, tool.input) == ("look", {"at": "x"})  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == len(CALL)


def test_stream_builds_the_same_message(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="any", max_tokens=50, messages=USER, tools=TOOLS) as stream:  # type: ignore[arg-type]
        message = stream.get_final_message()
    assert [b.type for b in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[1].text == "Let me look."  # type: ignore[union-attr]
    assert message.content[2].input == {"at": "x"}  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use"


def test_events_come_in_order_with_one_block_open(serve: Serve) -> None:
    running = serve(StandinEngine(script=lambda r: CALL))
    events = events_of(running, max_tokens=50, messages=USER, tools=TOOLS)
    kinds = [e["type"] for e in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    open_block: int | None = None
    seen = []
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert open_block is None
                open_block = event["index"]  # type: ignore[assignment]
                seen.append(open_block)
            case "content_block_delta":
                assert event["index"] == open_block
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
    assert open_block is None and seen == [0, 1, 2]
    assert any(e.get("delta", {}).get("type") == "signature_delta" for e in events)  # type: ignore[attr-defined]


def test_first_event_says_what_was_cached(running: Running) -> None:
    body = {"max_tokens": 5, "system": "Be brief.", "messages": USER}
    first = events_of(running, **body)
    second = events_of(running, **body)
    n_prompt = len(running.engine.requests[0].tokens)
    start = [e[0]["message"]["usage"] for e in (first, second)]  # type: ignore[index]
    assert (start[0]["input_tokens"], start[0]["cache_read_input_tokens"]) == (n_prompt, 0)
    cached = start[1]["cache_read_input_tokens"]
    assert 0 < cached < n_prompt and start[1]["input_tokens"] == n_prompt - cached
    end = next(e["usage"] for e in second if e["type"] == "message_delta")
    assert end["cache_read_input_tokens"] == cached  # type: ignore[index]


def test_stop_sequence_is_reported(running: Running) -> None:
    answer = running.post(PATH, max_tokens=9, messages=USER, stop_sequences=[" wor"]).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " wor")
    assert answer["content"] == [{"type": "text", "text": "Hello"}]


def test_max_tokens_is_a_reason(running: Running) -> None:
    answer = running.post(PATH, max_tokens=1, messages=USER).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)


def test_blocks_become_messages_in_order(running: Running) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "u1", "name": "look", "input": {"at": "x"}},
                {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "u1", "content": [{"type": "text", "text": "seen"}]},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    answer = running.post(PATH, max_tokens=5, messages=messages, system=[{"type": "text", "text": "S"}], tools=TOOLS)
    assert answer.status_code == 200, answer.text
    assert running.engine.chat.inputs[0].messages == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "b",
            "reasoning_content": "t",
            "tool_calls": [{"id": "u1", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}],
        },
        {"role": "tool", "tool_call_id": "u1", "content": "seen"},
        {"role": "user", "content": "go on"},
    ]


def test_tools_and_choice(running: Running) -> None:
    tools = [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}]
    running.post(PATH, max_tokens=5, messages=USER, tools=tools, tool_choice={"type": "tool", "name": "look"})
    asked = running.engine.chat.inputs[0]
    assert [t["function"]["name"] for t in asked.tools] == ["look"]
    assert asked.tool_choice == {"type": "function", "function": {"name": "look"}}
    running.post(
        PATH, max_tokens=5, messages=USER, tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    asked = running.engine.chat.inputs[2]
    assert (asked.tool_choice, asked.parallel_tool_calls) == ("required", False)


def test_billing_nonce_does_not_break_the_prefix(running: Running) -> None:
    for nonce in ("a5145", "ef01a"):
        system = [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch={nonce};",
            },
            {"type": "text", "text": "You are a coding agent."},
        ]
        running.post(PATH, max_tokens=5, system=system, messages=USER)
    first, second = (r.tokens.tolist() for r in running.engine.requests)
    assert first == second


def test_count_tokens(running: Running, client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="any", messages=USER, system="S")  # type: ignore[arg-type]
    prompt = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert counted.input_tokens == len(tokens_of(prompt))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": "x"}, "messages"),
        ({}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": USER, "system": 5}, "system"),
        ({"messages": USER, "temperature": "hot"}, "temperature"),
        ({"messages": USER, "thinking": {"type": "deep"}}, "thinking.type"),
        ({"messages": USER, "tools": [{"input_schema": {}}]}, "tools[0]"),
        ({"messages": USER, "tool_choice": {"type": "tool", "name": "none"}}, "tool_choice"),
        ({"messages": USER, "max_tokenz": 5}, "max_tokenz"),
    ],
)
def test_errors_have_anthropics_shape(running: Running, body: dict[str, object], field: str) -> None:
    answer = running.post(PATH, **body)
    assert answer.status_code == 400
    error = answer.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert field in error["error"]["message"]


def test_error_inside_a_stream(serve: Serve) -> None:
    running = serve(StandinEngine(script=lambda r: ["Hel", BackendError("the device is gone")]))
    events = events_of(running, max_tokens=5, messages=USER)
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "the device is gone"}}


def test_head_of_the_root_answers(running: Running) -> None:
    assert running.http.head("/").status_code == 200
