"""The generated models' chat template, rendered by Jinja itself: what it does to a prefix."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest

from gufo_gguf.models.recipe import chat_template

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "How warm is it?"}
CALL = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "I must ask.\n",
    "tool_calls": [
        {"function": {"name": "weather", "arguments": {"city": "Rome"}}},
        {"function": {"name": "clock", "arguments": "{}"}},
    ],
}
RESULT = {"role": "tool", "content": "21"}
ANSWER = {"role": "assistant", "content": "21 degrees.", "reasoning_content": "So 21."}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def render(
    *messages: dict[str, Any], tools: list[dict[str, Any]] | None = None, opening: bool = False, **more: Any
) -> str:
    environment = jinja2.Environment()
    environment.filters["tojson"] = json.dumps
    template = environment.from_string(chat_template())
    return template.render(messages=list(messages), tools=tools, add_generation_prompt=opening, **more)


def test_turns() -> None:
    assert render(SYSTEM, USER, opening=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow warm is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(USER, opening=True, enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")
    assert render(USER, opening=True, enable_thinking=True) == render(USER, opening=True)


def test_tools_stand_in_the_system_message_with_and_without_one() -> None:
    with_system = render(SYSTEM, USER, tools=TOOLS)
    assert with_system.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert render(USER, tools=TOOLS).startswith("<|im_start|>system\n# Tools\n")
    assert with_system.count(json.dumps(TOOLS[0])) == 1


def test_an_answer_is_rendered_as_it_was_generated() -> None:
    prompt = render(USER, tools=TOOLS, opening=True)
    generated = (
        "<think>\nI must ask.\n</think>\n\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    )
    assert render(USER, CALL, tools=TOOLS) == prompt + generated + "<|im_end|>\n"
    spoken = CALL | {"content": "One moment.\n"}
    assert "</think>\n\nOne moment.\n<tool_call>" in render(USER, spoken)


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_reasoning_lasts_as_long_as_the_tool_loop(tools: list[dict[str, Any]] | None) -> None:
    loop = render(SYSTEM, USER, CALL, RESULT, tools=tools, opening=True)
    assert loop.startswith(render(SYSTEM, USER, CALL, tools=tools)), "a tool loop only ever appends"
    done = render(SYSTEM, USER, CALL, RESULT, ANSWER, tools=tools)
    assert done.count("<think>") == 2
    next_turn = render(SYSTEM, USER, CALL, RESULT, ANSWER, USER, tools=tools, opening=True)
    assert "<think>" not in next_turn
    assert next_turn.startswith(render(SYSTEM, USER, tools=tools))
    assert not next_turn.startswith(done), "the next turn re-renders the answers before it"
