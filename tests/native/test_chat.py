"""Templates: prompts, refusals, the pinned clock, tools, and answers read back while they stream."""

from __future__ import annotations

import ctypes
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.native.templates import DATED, FORGETS_REASONING, ONE_TURN, PLAIN

from gufo_gguf.backend.chat import ChatFormat, ChatInput, MessageParser, Rendered, parse_message
from gufo_gguf.backend.llama import LlamaBackend
from gufo_gguf.backend.sampling import Sampler
from gufo_gguf.core.errors import RequestError
from gufo_gguf.engine.types import SamplingParams

pytestmark = pytest.mark.native

READ_FILE = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
            "required": ["path"],
        },
    },
}
LIST_DIR = {
    "type": "function",
    "function": {"name": "list_dir", "parameters": {"type": "object", "properties": {"dir": {"type": "string"}}}},
}
ASK = ChatInput(messages=[{"role": "user", "content": "read a.txt"}])
WITH_TOOLS = replace(ASK, tools=[READ_FILE, LIST_DIR])
ANSWER = (
    "<think>\nI should read it.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.txt", "lines": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "list_dir", "arguments": {"dir": "."}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def own(backend: LlamaBackend) -> Iterator[ChatFormat]:
    """The generated models' own template: ChatML with tools and reasoning."""
    from gufo_gguf.backend import native

    chat = ChatFormat(native.library(), backend.model_ptr)
    yield chat
    chat.close()


@pytest.fixture
def of(lib: ctypes.CDLL, backend: LlamaBackend) -> Callable[[str], ChatFormat]:
    return lambda source: ChatFormat(lib, backend.model_ptr, source)


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


# -- rendering ---------------------------------------------------------------------------------------
def test_plain_prompt(of: Callable[[str], ChatFormat]) -> None:
    chat = of(PLAIN)
    conversation = ChatInput(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "bye"},
        ]
    )
    without = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"
    )
    rendered = chat.render(conversation)
    assert rendered.prompt == without + "<|im_start|>assistant\n"
    assert rendered.generation_prompt == "<|im_start|>assistant\n"
    assert not rendered.supports_thinking
    assert not rendered.grammar
    assert chat.render(conversation, add_generation_prompt=False).prompt == without


def test_info(own: ChatFormat, of: Callable[[str], ChatFormat]) -> None:
    assert own.info.explicit
    assert own.info.supports_thinking
    assert own.info.caps["supports_tool_calls"]
    assert own.info.eos_token == "<|im_end|>"
    plain = of(PLAIN)
    assert plain.info.source.strip() == PLAIN.strip()
    assert plain.info.supports_thinking is False
    assert not plain.info.caps["supports_tools"]


def test_chatml_by_name_needs_no_template(lib: ctypes.CDLL) -> None:
    chat = ChatFormat(lib, None, "chatml")
    assert chat.render(ASK).prompt == "<|im_start|>user\nread a.txt<|im_end|>\n<|im_start|>assistant\n"


def test_refusal_carries_the_templates_own_words(of: Callable[[str], ChatFormat]) -> None:
    with pytest.raises(RequestError, match="only one turn, please$") as caught:
        of(ONE_TURN).render(ChatInput(messages=[{"role": "assistant", "content": "x"}]))
    assert caught.value.param == "messages"
    assert "While executing" not in str(caught.value)


@pytest.mark.parametrize("source", ["{% if %}", "{{ foo( }}", "{% for x in y %}"])
def test_broken_template_says_why(of: Callable[[str], ChatFormat], source: str) -> None:
    with pytest.raises(RequestError, match="chat_template: ") as caught:
        of(source)
    assert caught.value.param == "chat_template"
    assert "std::exception" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "function"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": float("nan")}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"reasoning_format": "loud"}, "reasoning_format"),
        ({"now": 1.5}, "now"),
    ],
)
def test_errors_name_the_field(own: ChatFormat, change: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        own.render(replace(ASK, **change))
    assert caught.value.param == param


def test_what_clients_leave_out_or_send_as_null(own: ChatFormat) -> None:
    sent = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "read"}, {"type": "text", "text": "it"}], "name": None},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": None,
            "refusal": None,
            "tool_calls": [{"id": "1", "function": {"name": "read_file", "arguments": {"path": "a"}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": None},
        {"role": "assistant", "content": "done", "tool_calls": []},
        {"role": "user", "content": "thanks \ud83d"},
    ]
    prompt = own.render(ChatInput(messages=sent, tools=[READ_FILE, {"type": "web_search"}])).prompt
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert "read\nit<|im_end|>" in prompt
    assert '{"name": "read_file", "arguments": {"path": "a"}}' in prompt
    assert "web_search" not in prompt
    assert "thanks \ufffd<|im_end|>" in prompt


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [('{"path":"a"}', '{"path": "a"}'), ("", "{}"), (None, "{}"), ('{"path": "a', '{"arguments": "{\\"path\\": \\"a"}')],
)
def test_a_models_broken_call_does_not_break_its_conversation(
    own: ChatFormat, arguments: str | None, shown: str
) -> None:
    past = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "read_file", "arguments": arguments}}]},
        {"role": "tool", "content": "y"},
    ]
    assert f'"arguments": {shown}}}' in own.render(ChatInput(messages=past)).prompt


def test_enable_thinking_and_template_kwargs(own: ChatFormat, of: Callable[[str], ChatFormat]) -> None:
    assert own.render(ASK).prompt.endswith("<|im_start|>assistant\n")
    assert own.render(replace(ASK, enable_thinking=False)).prompt.endswith("<think>\n\n</think>\n\n")
    chat = of("{{ mood }} {{ count + 1 }} {% for m in messages %}{{ m.content }}{% endfor %}")
    assert chat.render(replace(ASK, template_kwargs={"mood": "calm", "count": 2})).prompt == "calm 3 read a.txt"


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


# -- the clock ---------------------------------------------------------------------------------------
def test_the_clock_is_pinned(of: Callable[[str], ChatFormat]) -> None:
    chat = of(DATED)
    noon = 1_700_049_600  # 15 November 2023, noon UTC: the same day in nearly every time zone
    first = chat.render(replace(ASK, now=noon)).prompt
    assert "15 November 2023" in first
    assert "/ 15 Nov 2023 / Nov 15 2023<|im_end|>" in first
    assert chat.render(replace(ASK, now=noon)).prompt == first
    assert "14 November 2024" in chat.render(replace(ASK, now=noon + 365 * 86_400)).prompt
    assert "2023" not in chat.render(ASK).prompt, "without a pin it is the real clock"
    own_date = chat.render(replace(ASK, now=noon, template_kwargs={"date_string": "mine"})).prompt
    assert "/ mine / Nov 15 2023" in own_date


def test_clocks_of_threads_do_not_mix(of: Callable[[str], ChatFormat]) -> None:
    chat = of(DATED)
    years = {year: 1_700_049_600 + (year - 2023) * 365 * 86_400 for year in range(2023, 2027)}
    wrong: list[str] = []

    def work(year: int) -> None:
        for _ in range(15):
            prompt = chat.render(replace(ASK, now=years[year])).prompt
            if prompt.count(str(year)) != 3:
                wrong.append(prompt)

    threads = [threading.Thread(target=work, args=(year,)) for year in years]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- tools and formats -------------------------------------------------------------------------------
def test_tool_choice_never_changes_the_prompt(own: ChatFormat) -> None:
    auto = own.render(WITH_TOOLS)
    assert auto.grammar_lazy
    assert auto.grammar_triggers
    assert "<tool_call>" in auto.preserved_tokens
    required = own.render(replace(WITH_TOOLS, tool_choice="required"))
    assert not required.grammar_lazy
    none = own.render(replace(WITH_TOOLS, tool_choice="none"))
    assert not none.grammar
    named = own.render(
        replace(WITH_TOOLS, tool_choice={"type": "function", "function": {"name": "list_dir"}})
    )
    assert "list_dir" in named.grammar
    assert "read_file" not in named.grammar
    assert auto.prompt == required.prompt == none.prompt == named.prompt


@pytest.mark.parametrize("schema", [{}, {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}])
def test_json_schema_constrains_the_answer(
    own: ChatFormat, backend: LlamaBackend, lib: ctypes.CDLL, schema: dict[str, Any]
) -> None:
    rendered = own.render(replace(ASK, json_schema=schema, enable_thinking=False))
    params = rendered.sampling(SamplingParams(temperature=0.0))
    vocab = backend.vocab()

    def accepts(text: str) -> bool:
        with Sampler(lib, backend.model_ptr, params) as sampler:
            try:
                for token in vocab.tokenize(text, add_special=False, parse_special=True):
                    sampler.accept(token)
                sampler.accept(vocab.eos)
            except Exception:
                return False
        return True

    assert accepts('{"n": 1}')
    assert not accepts("[1]")
    assert not accepts("n = 1")
    assert accepts('{"other": true}') == (not schema)


def test_named_tool_constrains_the_answer(own: ChatFormat, backend: LlamaBackend, lib: ctypes.CDLL) -> None:
    choice = {"type": "function", "function": {"name": "list_dir"}}
    rendered = own.render(replace(WITH_TOOLS, tool_choice=choice, enable_thinking=False))
    params = rendered.sampling(SamplingParams(temperature=0.0))
    assert params.grammar_type == "tool_calls"
    vocab = backend.vocab()
    with Sampler(lib, backend.model_ptr, params) as sampler:
        for token in vocab.tokenize('<tool_call>\n{"name": "', add_special=False, parse_special=True):
            sampler.accept(token)
        with pytest.raises(Exception, match="rammar"):
            for token in vocab.tokenize("read_file", add_special=False, parse_special=True):
                sampler.accept(token)


def test_sampling_keeps_the_requests_own_grammar(own: ChatFormat) -> None:
    mine = SamplingParams(grammar='root ::= "x"', temperature=0.3)
    merged = own.render(ASK).sampling(mine)
    assert (merged.grammar, merged.grammar_type, merged.temperature) == (mine.grammar, "user", 0.3)
    assert merged.generation_prompt == "<|im_start|>assistant\n"
    assert own.render(WITH_TOOLS).sampling(SamplingParams()).grammar_lazy


# -- answers -----------------------------------------------------------------------------------------
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
def test_deltas_add_up_however_the_text_is_cut(own: ChatFormat, backend: LlamaBackend, cuts: list[int]) -> None:
    from gufo_gguf.backend import native

    rendered = own.render(WITH_TOOLS)
    places = sorted({0, len(ANSWER), *cuts})
    pieces = [ANSWER[a:b] for a, b in itertools.pairwise(places)]
    got, parser = streamed(native.library(), rendered, pieces)
    message = parser.message
    assert got["content"] == message.content
    assert got["reasoning"] == message.reasoning_content
    assert got["calls"] == [[call.id, call.name, call.arguments] for call in message.tool_calls]
    whole = parse_message(native.library(), rendered, ANSWER)
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
            ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", '{"name": "read_file", "arguments": ', '{"path": "a"}']
            + ["}", "text", " ", "<", '"', "<|im_end|>", "é😀"]
        ),
        max_size=12,
    )
)
def test_no_output_makes_it_fail_or_take_back(own: ChatFormat, backend: LlamaBackend, parts: list[str]) -> None:
    from gufo_gguf.backend import native

    got, parser = streamed(native.library(), own.render(WITH_TOOLS), parts)
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
