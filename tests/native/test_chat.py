"""Templates: prompts, refusals, the pinned clock, tools and output formats."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gufo_gguf.backend.chat import ChatFormat, ChatInput
from gufo_gguf.backend.llama import LlamaBackend
from gufo_gguf.backend.sampling import Sampler
from gufo_gguf.core.errors import RequestError
from gufo_gguf.engine.types import SamplingParams
from tests.native.templates import ASK, DATED, ONE_TURN, PLAIN, READ_FILE, WITH_TOOLS

pytestmark = pytest.mark.native


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
    with pytest.raises(RequestError, match=r"only one turn, please$") as caught:
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
    [
        ('{"path":"a"}', '{"path": "a"}'),
        ("", "{}"),
        (None, "{}"),
        ('{"path": "a', '{"arguments": "{\\"path\\": \\"a"}'),
    ],
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
    named = own.render(replace(WITH_TOOLS, tool_choice={"type": "function", "function": {"name": "list_dir"}}))
    assert "list_dir" in named.grammar
    assert "read_file" not in named.grammar
    assert auto.prompt == required.prompt == none.prompt == named.prompt


@pytest.mark.parametrize(
    "schema", [{}, {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}]
)
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
            except RequestError:
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
        with pytest.raises(RequestError, match="does not allow"):
            for token in vocab.tokenize("read_file", add_special=False, parse_special=True):
                sampler.accept(token)


def test_sampling_keeps_the_requests_own_grammar(own: ChatFormat) -> None:
    mine = SamplingParams(grammar='root ::= "x"', temperature=0.3)
    merged = own.render(ASK).sampling(mine)
    assert (merged.grammar, merged.grammar_type, merged.temperature) == (mine.grammar, "user", 0.3)
    assert merged.generation_prompt == "<|im_start|>assistant\n"
    assert own.render(WITH_TOOLS).sampling(SamplingParams()).grammar_lazy
