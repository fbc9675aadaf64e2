"""Tool loops as programs write them with the official clients: ask, run the tool, send its result, go on.

The engine answers with a call until a result is in the prompt.  What counts: the client's own objects
can be sent back as they are, each turn extends the one before, and streams build the same messages.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import anthropic
import openai
import pytest

from gufo_gguf.engine.types import GenerateRequest
from tests.server.conftest import Running, Serve
from tests.server.standin import StandinEngine, StandinVocab, Step

CALL = [
    "<think>",
    "look",
    "</think>",
    "I look.",
    '<tool_call>{"name": "look", "arguments": ',
    '{"at": "x"}}</tool_call>',
]
RESULT = "There are 12 owls."
PARAMETERS = {
    "type": "object",
    "properties": {"at": {"type": "string"}},
    "required": ["at"],
    "additionalProperties": False,
}


def _script(request: GenerateRequest) -> list[Step]:
    prompt = StandinVocab().detokenize(request.tokens.tolist()).decode()
    return ["Twelve", " owls."] if RESULT in prompt else [*CALL]


@pytest.fixture
def looped(serve: Serve) -> Running:
    return serve(StandinEngine(script=_script))


def each_turn_extends_the_last(running: Running, n: int) -> None:
    requests = running.engine.requests
    assert len(requests) == n
    for earlier, later in pairwise(requests):
        stable = earlier.stable[-1]
        assert later.tokens[:stable].tolist() == earlier.tokens[:stable].tolist() and stable > 20


@pytest.mark.parametrize("streamed", [False, True])
def test_chat_completions(looped: Running, streamed: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": "look", "strict": True, "parameters": PARAMETERS}}]
    messages: list[Any] = [{"role": "user", "content": "How many owls?"}]

    def ask() -> Any:
        if not streamed:
            return looped.openai.chat.completions.create(model="any", messages=messages, tools=tools).choices[0]
        with looped.openai.chat.completions.stream(model="any", messages=messages, tools=tools) as stream:
            return stream.get_final_completion().choices[0]

    choice = ask()
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    [call] = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"at": "x"}
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    last = ask()
    assert (last.finish_reason, last.message.content, last.message.tool_calls) in (
        ("stop", "Twelve owls.", None),
        ("stop", "Twelve owls.", []),
    )
    each_turn_extends_the_last(looped, 2)
    roles = [m["role"] for m in looped.engine.chat.inputs[-1].messages]
    assert roles == ["user", "assistant", "tool"]


@pytest.mark.parametrize("streamed", [False, True])
def test_responses(looped: Running, streamed: bool) -> None:
    tools: Any = [{"type": "function", "name": "look", "strict": True, "parameters": PARAMETERS}]
    items: list[Any] = [{"role": "user", "content": "How many owls?"}]

    def ask() -> Any:
        if not streamed:
            return looped.openai.responses.create(model="any", input=items, tools=tools)
        with looped.openai.responses.stream(model="any", input=items, tools=tools) as stream:
            for event in stream:
                if event.type == "response.function_call_arguments.done":
                    assert json.loads(event.arguments) == {"at": "x"}
            return stream.get_final_response()

    response = ask()
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    items += response.output
    items.append({"type": "function_call_output", "call_id": response.output[-1].call_id, "output": RESULT})
    assert ask().output_text == "Twelve owls."
    each_turn_extends_the_last(looped, 2)
    assistant = looped.engine.chat.inputs[-1].messages[1]
    assert assistant["reasoning_content"] == "look" and assistant["content"] == "I look."
    assert assistant["tool_calls"][0]["function"]["name"] == "look"


@pytest.mark.parametrize("streamed", [False, True])
def test_messages(looped: Running, streamed: bool) -> None:
    client = anthropic.Anthropic(base_url=looped.url, api_key="none", max_retries=0, timeout=30)
    tools: Any = [{"name": "look", "description": "Look.", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": "How many owls?"}]

    def ask() -> Any:
        body: dict[str, Any] = {"model": "any", "max_tokens": 99, "messages": messages, "tools": tools}
        if not streamed:
            return client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            assert "".join(e.partial_json for e in stream if e.type == "input_json") in ('{"at": "x"}', "")
            return stream.get_final_message()

    message = ask()
    assert message.stop_reason == "tool_use"
    use = message.content[-1]
    assert use.input == {"at": "x"}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": RESULT}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    last = ask()
    assert (last.stop_reason, last.content[0].text) == ("end_turn", "Twelve owls.")
    each_turn_extends_the_last(looped, 2)


def test_anthropics_own_tool_runner(looped: Running) -> None:
    runner = getattr(anthropic.Anthropic(base_url=looped.url, api_key="none").beta.messages, "tool_runner", None)
    if runner is None:
        pytest.skip("this release of the client has no tool runner")

    @anthropic.beta_tool
    def look(at: str) -> str:
        """Look.

        Args:
            at: Where.
        """
        assert at == "x"
        return RESULT

    user = {"role": "user", "content": "How many owls?"}
    last = runner(model="any", max_tokens=99, tools=[look], messages=[user]).until_done()
    assert last.content[0].text == "Twelve owls."
    each_turn_extends_the_last(looped, 2)


def test_openais_client_parses_its_own_tools(looped: Running) -> None:
    import pydantic

    class Look(pydantic.BaseModel):
        at: str

    tool = openai.pydantic_function_tool(Look, name="look")
    user: Any = [{"role": "user", "content": "How many owls?"}]
    parsed = looped.openai.chat.completions.parse(model="any", messages=user, tools=[tool])
    [call] = parsed.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Look(at="x")
