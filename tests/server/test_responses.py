"""/v1/responses with the official client, against the scripted engine."""

from __future__ import annotations

import json

import pytest

from gufo_gguf.core.errors import BackendError
from tests.server.conftest import Running, Serve
from tests.server.standin import StandinEngine

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "look", "description": "Look.", "parameters": {"type": "object"}, "strict": True}]
CALL = ["<think>", "hm", "</think>", "On it.", '<tool_call>{"name": "look", "arguments": ', '{"at": "x"}}</tool_call>']


def events_of(running: Running, **body: object) -> list[dict[str, object]]:
    events = []
    for frame in running.post(PATH, stream=True, **body).text.strip().split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_whole_response(running: Running) -> None:
    response = running.openai.responses.create(model="any", input="hi", instructions="Be brief.")
    assert response.output_text == "Hello world!"
    assert response.status == "completed"
    assert response.id.startswith("resp_") and response.output[0].id.startswith("msg_")  # type: ignore[union-attr]
    assert response.usage is not None and response.usage.output_tokens == 3
    assert running.engine.chat.inputs[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_second_turn_reports_what_was_cached(running: Running) -> None:
    items: list[dict[str, object]] = [{"role": "user", "content": "one"}]
    first = running.post(PATH, input=items).json()
    items += [*first["output"], {"role": "user", "content": [{"type": "input_text", "text": "two"}]}]
    second = running.post(PATH, input=items).json()
    assert first["usage"]["input_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == running.engine.requests[0].stable[-1]


def test_reasoning_text_and_calls(serve: Serve) -> None:
    running = serve(StandinEngine(script=lambda r: CALL))
    response = running.openai.responses.create(model="any", input="hi", tools=TOOLS)  # type: ignore[arg-type]
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = response.output
    assert reasoning.content[0].text == "hm"  # type: ignore[union-attr, index]
    assert message.content[0].text == "On it."  # type: ignore[union-attr, index]
    assert (call.name, json.loads(call.arguments)) == ("look", {"at": "x"})  # type: ignore[union-attr]
    assert running.engine.chat.inputs[0].tools[0]["function"]["name"] == "look"


def test_stream_builds_the_same_response(serve: Serve) -> None:
    running = serve(StandinEngine(script=lambda r: CALL))
    with running.openai.responses.stream(model="any", input="hi", tools=TOOLS) as stream:  # type: ignore[arg-type]
        response = stream.get_final_response()
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output_text == "On it."
    assert response.output[2].arguments == '{"at": "x"}'  # type: ignore[union-attr]
    assert response.usage is not None and response.usage.output_tokens == len(CALL)


def test_events_are_numbered_and_one_item_is_open(serve: Serve) -> None:
    running = serve(StandinEngine(script=lambda r: CALL))
    events = events_of(running, input="hi", tools=TOOLS)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    kinds = [str(e["type"]) for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    open_item: object = None
    done = []
    for event in events:
        if event["type"] == "response.output_item.added":
            assert open_item is None
            open_item = event["item"]["id"]  # type: ignore[index]
        elif event["type"] == "response.output_item.done":
            assert event["item"]["id"] == open_item  # type: ignore[index]
            done.append(event["item"])
            open_item = None
        elif "item_id" in event:
            assert event["item_id"] == open_item
    assert events[-1]["response"]["output"] == done  # type: ignore[index]


def test_items_of_one_turn_become_one_message(running: Running) -> None:
    items = [
        {"type": "message", "role": "developer", "content": "S"},
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "message", "role": "assistant", "content": "done"},
        {"role": "user", "content": "more"},
    ]
    assert running.post(PATH, input=items, tools=TOOLS).status_code == 200
    function = {"name": "look", "arguments": "{}"}
    assert running.engine.chat.inputs[0].messages == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "t",
            "tool_calls": [{"type": "function", "function": function, "id": i} for i in ("c1", "c2")],
        },
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "tool", "content": "two", "tool_call_id": "c2"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "more"},
    ]


def test_limit_ends_incomplete(running: Running) -> None:
    response = running.openai.responses.create(model="any", input="hi", max_output_tokens=1)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert events_of(running, input="hi", max_output_tokens=1)[-1]["type"] == "response.incomplete"


def test_structured_output_and_effort(running: Running) -> None:
    format_ = {"type": "json_schema", "name": "x", "schema": {"const": 1}}
    running.post(PATH, input="hi", text={"format": format_, "verbosity": "low"}, reasoning={"effort": "high"})
    asked = running.engine.chat.inputs[0]
    assert asked.json_schema == {"const": 1}
    assert asked.template_kwargs["reasoning_effort"] == "high"


def test_progress_and_timings(running: Running) -> None:
    events = events_of(running, input="hi", return_progress=True, timings_per_token=True)
    assert any("prompt_progress" in e for e in events if e["type"] == "response.in_progress")
    assert all("timings" in e for e in events if e["type"] == "response.output_text.delta")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "messages"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "hi", "background": True}, "background"),
        ({"input": "hi", "max_output_tokens": "5"}, "max_output_tokens"),
        ({"input": "hi", "max_output_tokenz": 5}, "max_output_tokenz"),
    ],
)
def test_errors_name_the_field(running: Running, body: dict[str, object], param: str) -> None:
    assert running.error(PATH, **body)["param"] == param


def test_failure_inside_a_stream(serve: Serve) -> None:
    running = serve(StandinEngine(script=lambda r: ["Hel", BackendError("the device is gone")]))
    last = events_of(running, input="hi")[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["message"] == "the device is gone"  # type: ignore[index]


def test_input_tokens(running: Running) -> None:
    counted = running.post(PATH + "/input_tokens", input="hi").json()["input_tokens"]
    running.post(PATH, input="hi")
    assert counted == len(running.engine.requests[0].tokens)
