"""Answers read back: whole, while they stream, and when they are not in the template's format."""

from __future__ import annotations

import ctypes
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gufo_gguf.backend.chat import ChatFormat, ChatInput, Rendered
from gufo_gguf.backend.message_parser import MessageParser, parse_message
from gufo_gguf.core.errors import RequestError
from tests.native.templates import ANSWER, ASK, FORGETS_REASONING, PLAIN, TAGGED_CALLS, WITH_TOOLS

pytestmark = pytest.mark.native


def counted_ids() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"call_{next(numbers)}"


def streamed(lib: ctypes.CDLL, rendered: Rendered, pieces: list[str]) -> tuple[dict[str, Any], MessageParser]:
    """What a client would put together from the deltas."""
    parser = MessageParser(lib, rendered, new_id=counted_ids())
    content = reasoning = ""
    calls: list[list[str]] = []
    for i, piece in enumerate([*pieces, ""]):
        for delta in parser.feed(piece, final=i == len(pieces)):
            content += delta.content
            reasoning += delta.reasoning_content
            if delta.tool_index is None:
                assert delta.content or delta.reasoning_content, "an empty delta"
            elif delta.tool_name:
                assert delta.tool_index == len(calls), "a call is announced once, in order"
                calls.append([delta.tool_id, delta.tool_name, delta.arguments])
            else:
                assert not delta.tool_id
                calls[delta.tool_index][2] += delta.arguments
    return {"content": content, "reasoning": reasoning, "calls": calls}, parser


def test_continue_final_message(own: ChatFormat, lib: ctypes.CDLL) -> None:
    chat = ChatInput(
        messages=[{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two"}],
        continue_final=True,
    )
    rendered = own.render(chat)
    assert rendered.prompt.endswith("one, two")
    assert rendered.is_continuation
    got, parser = streamed(lib, rendered, [", three", ", four"])
    assert got["content"] == parser.message.content == ", three, four"
    echo = MessageParser(lib, rendered, echo=True)
    echo.feed(", three", final=True)
    assert echo.message.content == "one, two, three"


def test_whole_answer(own: ChatFormat, lib: ctypes.CDLL) -> None:
    message = parse_message(lib, own.render(WITH_TOOLS), ANSWER)
    assert message.reasoning_content.strip() == "I should read it."
    assert message.content.strip() == "Let me see."
    assert [call.name for call in message.tool_calls] == ["read_file", "list_dir"]
    assert json.loads(message.tool_calls[0].arguments) == {"path": "a.txt", "lines": 3}
    assert len({call.id for call in message.tool_calls}) == 2
    assert not message.unparsed


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, len(ANSWER)), max_size=40))
def test_deltas_add_up_however_the_text_is_cut(own: ChatFormat, lib: ctypes.CDLL, cuts: list[int]) -> None:
    rendered = own.render(WITH_TOOLS)
    places = sorted({0, len(ANSWER), *cuts})
    pieces = [ANSWER[a:b] for a, b in itertools.pairwise(places)]
    got, parser = streamed(lib, rendered, pieces)
    message = parser.message
    assert got["content"] == message.content
    assert got["reasoning"] == message.reasoning_content
    assert got["calls"] == [[call.id, call.name, call.arguments] for call in message.tool_calls]
    whole = parse_message(lib, rendered, ANSWER)
    assert (message.content, message.reasoning_content) == (whole.content, whole.reasoning_content)
    assert [(c.name, c.arguments) for c in message.tool_calls] == [(c.name, c.arguments) for c in whole.tool_calls]


def test_name_and_id_come_once_and_whole(own: ChatFormat, lib: ctypes.CDLL) -> None:
    got, parser = streamed(lib, own.render(WITH_TOOLS), list(ANSWER))
    assert [call[:2] for call in got["calls"]] == [["call_0", "read_file"], ["call_1", "list_dir"]]
    assert [call.id for call in parser.message.tool_calls] == ["call_0", "call_1"]


@pytest.mark.parametrize("reasoning_format", ["auto", "deepseek"])
def test_reasoning_apart(own: ChatFormat, lib: ctypes.CDLL, reasoning_format: str) -> None:
    rendered = own.render(replace(ASK, reasoning_format=reasoning_format))
    message = parse_message(lib, rendered, "<think>\nhm\n</think>\n\nyes")
    assert (message.reasoning_content.strip(), message.content) == ("hm", "yes")


def test_reasoning_format_none_leaves_it_in_the_content(own: ChatFormat, lib: ctypes.CDLL) -> None:
    rendered = own.render(replace(ASK, reasoning_format="none"))
    message = parse_message(lib, rendered, "<think>\nhm\n</think>\n\nyes")
    assert (message.reasoning_content, message.content) == ("", "<think>\nhm\n</think>\n\nyes")


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "unknown_tool", "arguments": {}}\n</tool_call>',
        "<tool_call>\nhello",
        '<tool_call>\n{"name": "read_file", "arguments": {"path": 3x}}',
        'Look: <tool_call>\n{"nome": 1}\n</tool_call> and more',
        "a </tool_call> b",
    ],
)
def test_a_call_that_cannot_be_parsed_comes_back_as_text(own: ChatFormat, lib: ctypes.CDLL, text: str) -> None:
    message = parse_message(lib, own.render(WITH_TOOLS), text)
    assert message.tool_calls == ()
    assert message.content == text


def test_unparsed_text_keeps_the_reasoning_apart(own: ChatFormat, lib: ctypes.CDLL) -> None:
    message = parse_message(lib, own.render(WITH_TOOLS), "<think>\nhm\n</think>\n\nNow: <tool_call>\nhello")
    assert message.unparsed
    assert message.reasoning_content.strip() == "hm"
    assert message.content.strip() == "Now: <tool_call>\nhello"


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(
            (
                *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", '{"path": "a"}', "<|im_end|>", "é😀"),
                *('{"name": "read_file", "arguments": ', "}", "text", " ", "<", '"'),
            )
        ),
        max_size=12,
    )
)
def test_no_output_makes_it_fail_or_take_back(own: ChatFormat, lib: ctypes.CDLL, parts: list[str]) -> None:
    got, parser = streamed(lib, own.render(WITH_TOOLS), parts)
    message = parser.message
    assert message.content.startswith(got["content"])
    assert message.reasoning_content.startswith(got["reasoning"])
    assert [call[1] for call in got["calls"]] == [call.name for call in message.tool_calls]
    if not message.unparsed:
        assert got["content"] == message.content


def test_plain_format_passes_everything_through(of: Callable[[str], ChatFormat], lib: ctypes.CDLL) -> None:
    rendered = of(PLAIN).render(ASK)
    got, parser = streamed(lib, rendered, ["<think>", "x</th", "ink>", ' {"name": 1}', "\n<tool_call>"])
    assert got["content"] == parser.message.content == '<think>x</think> {"name": 1}\n<tool_call>'


def test_partial_text(own: ChatFormat, lib: ctypes.CDLL) -> None:
    message = parse_message(lib, own.render(WITH_TOOLS), ANSWER[:70], partial=True)
    assert message.reasoning_content.strip() == "I should read it."
    assert not message.tool_calls
    cut = parse_message(lib, own.render(WITH_TOOLS), ANSWER[: ANSWER.index('"lines"')], partial=True)
    assert [call.name for call in cut.tool_calls] == ["read_file"]


def test_close_is_idempotent(of: Callable[[str], ChatFormat], lib: ctypes.CDLL) -> None:
    chat = of(PLAIN)
    parser = MessageParser(lib, chat.render(ASK))
    for closable in (parser, chat):
        closable.close()
        closable.close()
    with pytest.raises(RequestError, match="null"):
        chat.render(ASK)
    with pytest.raises(RequestError, match="null"):
        parser.feed("x")


def test_forgets_reasoning_template(of: Callable[[str], ChatFormat], lib: ctypes.CDLL) -> None:
    rendered = of(FORGETS_REASONING).render(ASK)
    assert rendered.generation_prompt == "<|im_start|>assistant\n<think>\n"
    message = parse_message(lib, rendered, "hm\n</think>\n\nyes")
    assert (message.reasoning_content.strip(), message.content) == ("hm", "yes")


def test_calls_in_tags(of: Callable[[str], ChatFormat], lib: ctypes.CDLL) -> None:
    rendered = of(TAGGED_CALLS).render(WITH_TOOLS)
    text = "<tool_call>\n<function=read_file>\n<parameter=path>\na.txt\n</parameter>\n</function>\n</tool_call>"
    got, parser = streamed(lib, rendered, list(text))
    assert [(name, json.loads(arguments)) for _, name, arguments in got["calls"]] == [("read_file", {"path": "a.txt"})]
    assert parser.message.content == ""


def test_a_call_that_turns_out_to_be_none_is_not_taken_back(of: Callable[[str], ChatFormat], lib: ctypes.CDLL) -> None:
    """The parser first sees a call and then, with more text, none: what was sent stays."""
    rendered = of(TAGGED_CALLS).render(WITH_TOOLS)
    pieces = ["<function=read_file>", "\n", "\n", "</tool_call>", "and", " more"]
    got, parser = streamed(lib, rendered, pieces)
    assert [call[1] for call in got["calls"]] == ["read_file"]
    assert [call.name for call in parser.message.tool_calls] == ["read_file"]
    assert parser.message.unparsed
