"""Stable boundaries: token-wise prefixes that the next turn sends again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gufo_gguf.backend.chat import ChatFormat, ChatInput, Rendered
from gufo_gguf.backend.llama import LlamaBackend
from gufo_gguf.backend.stable import PROBE_ANSWER, PROBE_QUESTION, StableSearch, common_prefix
from gufo_gguf.cache.types import Tokens
from gufo_gguf.core.errors import RequestError
from gufo_gguf.engine.types import as_tokens
from tests.native.templates import (
    BESIDE_CALLS,
    CHANNELS,
    EMPTY_THOUGHTS,
    ENDS_WITH_MARKER,
    FORGETS_REASONING,
    ONE_TURN,
    PLAIN,
)

pytestmark = pytest.mark.native

ASK = ChatInput(messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Read a.txt"}])
TOOL_LOOP = ChatInput(
    messages=[
        {"role": "user", "content": "Read a.txt"},
        {
            "role": "assistant",
            "reasoning_content": "I should read it.",
            "content": "",
            "tool_calls": [{"id": "1", "function": {"name": "read_file", "arguments": '{"path":"a.txt"}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "data"},
    ]
)

USER_ASKS = {"role": "user", "content": "And then?"}

Tokenizer = Callable[[str], Tokens]


@pytest.fixture(scope="package")
def tokenize(backend: LlamaBackend) -> Tokenizer:
    vocab = backend.vocab()
    return lambda text: as_tokens(vocab.tokenize(text, add_special=True, parse_special=True))


def texts_at(chat: ChatFormat, conversation: ChatInput, tokenize: Tokenizer, backend: LlamaBackend) -> list[str]:
    rendered = chat.render(conversation)
    tokens = tokenize(rendered.prompt)
    ends = chat.stable_boundaries(conversation, rendered, tokens, tokenize)
    assert list(ends) == sorted(set(ends))
    assert all(0 < n <= len(tokens) for n in ends)
    return [backend.vocab().detokenize(tokens[:n]).decode() for n in ends]


def next_turn(conversation: ChatInput, answer: dict[str, Any], *more: dict[str, Any]) -> ChatInput:
    return replace(conversation, messages=[*conversation.messages, answer, *more])


def by_definition(chat: ChatFormat, conversation: ChatInput, tokens: Tokens, tokenize: Tokenizer) -> tuple[int, ...]:
    """Both variants rendered and tokenized whole."""
    found = set()
    for messages in (conversation.messages, [*conversation.messages, PROBE_ANSWER, PROBE_QUESTION]):
        try:
            other = chat.render(replace(conversation, messages=messages), add_generation_prompt=False).prompt
        except RequestError:
            continue
        found.add(common_prefix(tokens, tokenize(other)))
    return tuple(sorted(found - {0}))


def test_plain_template_keeps_the_whole_prompt(
    of: Callable[[str], ChatFormat], tokenize: Tokenizer, backend: LlamaBackend
) -> None:
    chat = of(PLAIN)
    opened = chat.render(ASK).prompt
    assert texts_at(chat, ASK, tokenize, backend) == [opened.removesuffix("<|im_start|>assistant\n"), opened]
    follow = chat.render(next_turn(ASK, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "ok"}))
    assert follow.prompt.startswith(opened)


def test_opening_that_is_not_sent_again(
    of: Callable[[str], ChatFormat], tokenize: Tokenizer, backend: LlamaBackend
) -> None:
    chat = of(FORGETS_REASONING)
    opened = chat.render(ASK).prompt
    assert opened.endswith("<|im_start|>assistant\n<think>\n")
    bare = opened.removesuffix("<|im_start|>assistant\n<think>\n")
    assert texts_at(chat, ASK, tokenize, backend) == [bare, bare + "<|im_start|>assistant\n"]


def test_markers_that_begin_alike_are_told_apart(of: Callable[[str], ChatFormat], tokenize: Tokenizer) -> None:
    chat = of(ENDS_WITH_MARKER)
    rendered = chat.render(ASK)
    assert rendered.generation_prompt == "assistant|>\n"
    tokens = tokenize(rendered.prompt)
    assert chat.stable_boundaries(ASK, rendered, tokens, tokenize) == by_definition(chat, ASK, tokens, tokenize)


@pytest.mark.parametrize("source", ["own", FORGETS_REASONING])
def test_in_a_tool_loop_the_reasoning_is_a_boundary(
    of: Callable[[str], ChatFormat], own: ChatFormat, tokenize: Tokenizer, backend: LlamaBackend, source: str
) -> None:
    chat = own if source == "own" else of(source)
    before, after = texts_at(chat, TOOL_LOOP, tokenize, backend)
    assert "I should read it." not in before, "dropped as soon as a new user turn comes"
    assert "I should read it." in after, "kept while the loop runs"
    assert after.endswith("<|im_end|>\n")
    loop_goes_on = next_turn(
        TOOL_LOOP,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "read_file", "arguments": "{}"}}]},
        {"role": "tool", "content": "more"},
    )
    user_comes = next_turn(TOOL_LOOP, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "ok"})
    assert chat.render(loop_goes_on).prompt.startswith(after)
    assert not chat.render(user_comes).prompt.startswith(after)
    assert chat.render(user_comes).prompt.startswith(before)


def test_a_refused_probe_is_skipped(
    of: Callable[[str], ChatFormat], tokenize: Tokenizer, backend: LlamaBackend
) -> None:
    chat = of(ONE_TURN)
    opened = chat.render(ASK).prompt
    assert texts_at(chat, ASK, tokenize, backend) == [opened.removesuffix("<|im_start|>assistant\n")]


def test_nothing_shared_is_no_boundary(of: Callable[[str], ChatFormat], tokenize: Tokenizer) -> None:
    chat = of("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    rendered = chat.render(ASK)
    tokens = tokenize(rendered.prompt)
    assert chat.stable_boundaries(ASK, rendered, tokens, tokenize) == by_definition(chat, ASK, tokens, tokenize)


def test_named_tool_and_continuation(own: ChatFormat, tokenize: Tokenizer, backend: LlamaBackend) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    named = replace(ASK, tools=[tool], tool_choice={"type": "function", "function": {"name": "f"}})
    auto = replace(ASK, tools=[tool])
    assert texts_at(own, named, tokenize, backend) == texts_at(own, auto, tokenize, backend)
    going_on = replace(ASK, messages=[*ASK.messages, {"role": "assistant", "content": "I will"}], continue_final=True)
    found = texts_at(own, going_on, tokenize, backend)
    assert found
    assert all(own.render(going_on).prompt.startswith(text) for text in found)


# -- the end of tools and system prompt --------------------------------------------------------------
TOOLS = [{"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}]


def system_text(chat: ChatFormat, conversation: ChatInput, tokenize: Tokenizer, backend: LlamaBackend) -> str:
    rendered = chat.render(conversation)
    tokens = tokenize(rendered.prompt)
    n = chat.system_end(conversation, rendered, tokens, tokenize)
    assert 0 <= n <= len(tokens)
    return backend.vocab().detokenize(tokens[:n]).decode()


@pytest.mark.parametrize("tools", [(), TOOLS])
@pytest.mark.parametrize("question", ["Read a.txt", "Next. Go on.", "<|im_start|>user\n", ""])
def test_where_another_first_question_would_begin(
    own: ChatFormat, tokenize: Tokenizer, backend: LlamaBackend, tools: list[Any], question: str
) -> None:
    messages = [ASK.messages[0], {"role": "user", "content": question}]
    ask = ChatInput(messages=messages, tools=tools)
    shared = system_text(own, ask, tokenize, backend)
    assert shared.endswith("<|im_start|>user\n") and "Be brief." in shared and "assistant" not in shared
    assert ("read_file" in shared) == bool(tools)
    assert own.render(ask).prompt.startswith(shared)
    assert own.render(replace(ask, messages=[messages[0], {"role": "user", "content": "Other"}])).prompt.startswith(
        shared
    )


def test_a_later_turn_and_a_refusal_have_no_end_of_a_system_prompt(
    own: ChatFormat, of: Callable[[str], ChatFormat], tokenize: Tokenizer, backend: LlamaBackend
) -> None:
    later = next_turn(ASK, {"role": "assistant", "content": "Done."}, USER_ASKS)
    assert system_text(own, later, tokenize, backend) == ""
    refuses = of("{% if messages[-1].content == 'Next.' %}{{ raise_exception('no') }}{% endif %}" + PLAIN)
    assert system_text(refuses, ASK, tokenize, backend) == ""
    only = replace(ASK, messages=ASK.messages[:1])
    assert system_text(of(PLAIN), only, tokenize, backend).endswith("Be brief.<|im_end|>\n<|im_start|>")
    tools_last = of("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}")
    assert system_text(tools_last, replace(ASK, tools=TOOLS), tokenize, backend) == "Be brief."


def test_only_the_end_is_tokenized_anew(own: ChatFormat, tokenize: Tokenizer) -> None:
    history = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i} " * 40} for i in range(31)]
    conversation = ChatInput(messages=history)
    rendered = own.render(conversation)
    tokens = tokenize(rendered.prompt)
    seen: list[int] = []

    def counting(text: str) -> Tokens:
        seen.append(len(text))
        return tokenize(text)

    found = StableSearch(own.history, counting).boundaries(conversation, rendered, tokens)
    assert found == by_definition(own, conversation, tokens, tokenize)
    assert sum(seen) < len(rendered.prompt) / 20


def test_no_grammar_is_made_for_an_answer_that_nobody_gives(
    own: ChatFormat, tokenize: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = own.render(ASK)
    tokens = tokenize(rendered.prompt)
    expected = by_definition(own, ASK, tokens, tokenize)
    assert own.stable_boundaries(ASK, rendered, tokens, tokenize) == expected
    monkeypatch.setattr(ChatFormat, "render", None)
    assert own.stable_boundaries(ASK, rendered, tokens, tokenize) == expected


def test_messages_that_llama_cpp_adapts_first(of: Callable[[str], ChatFormat], tokenize: Tokenizer) -> None:
    chat = of(CHANNELS)
    rendered = chat.render(TOOL_LOOP)
    assert "I should read it." in rendered.prompt
    assert chat.history(TOOL_LOOP) == rendered.prompt.removesuffix(rendered.generation_prompt)
    tokens = tokenize(rendered.prompt)
    found = chat.stable_boundaries(TOOL_LOOP, rendered, tokens, tokenize)
    assert found == by_definition(chat, TOOL_LOOP, tokens, tokenize)
    assert found[-1] == len(tokens), "all of it comes back"


@pytest.mark.parametrize("source", [EMPTY_THOUGHTS, BESIDE_CALLS])
@pytest.mark.parametrize("said", [("", "", ""), ("I read.", "", ""), ("", "", "I read.")])
@pytest.mark.parametrize("past", [0, 1])
def test_a_long_loop_that_changes_from_its_start(
    of: Callable[[str], ChatFormat], tokenize: Tokenizer, source: str, said: tuple[str, ...], past: int
) -> None:
    chat = of(source)
    steps = loop_of([(text, "", f"result {i}") for i, text in enumerate(said)])
    conversation = ChatInput(
        messages=[*ASK.messages, *([{"role": "assistant", "content": "x"}, USER_ASKS] * past), *steps]
    )
    rendered = chat.render(conversation)
    tokens = tokenize(rendered.prompt)
    found = chat.stable_boundaries(conversation, rendered, tokens, tokenize)
    assert found == by_definition(chat, conversation, tokens, tokenize)


CONTENT = st.lists(
    st.sampled_from(
        (
            *("<|im_end|>", "<|im_start|>", "<think>", "</think>", "<b>", "[x]"),
            *("word", "é", "1", "<", "a.b", " ", "\n", "\n\n"),
        )
    ),
    max_size=8,
).map("".join)


Loop = list[tuple[str, str, str]]
"""Content, reasoning and result of each step."""


def loop_of(steps: Loop) -> list[dict[str, Any]]:
    call = {"id": "1", "function": {"name": "read_file", "arguments": "{}"}}
    out: list[dict[str, Any]] = []
    for content, reasoning, result in steps:
        out.append({"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": [call]})
        out.append({"role": "tool", "tool_call_id": "1", "content": result})
    return out


@settings(max_examples=100, deadline=None)
@given(
    turns=st.lists(st.tuples(CONTENT, st.lists(st.tuples(CONTENT, CONTENT, CONTENT), max_size=3), CONTENT), max_size=3),
    question=CONTENT,
    loop=st.lists(st.tuples(CONTENT, CONTENT | st.just(""), CONTENT), max_size=4),
    source=st.sampled_from(["own", PLAIN, FORGETS_REASONING, CHANNELS, EMPTY_THOUGHTS, BESIDE_CALLS]),
)
def test_the_short_way_agrees_with_the_definition(
    own: ChatFormat,
    of: Callable[[str], ChatFormat],
    tokenize: Tokenizer,
    turns: list[tuple[str, Loop, str]],
    question: str,
    loop: Loop,
    source: str,
) -> None:
    """Turns with tool loops, reasoning here and there; also when the messages contain the text of special tokens."""
    chat = own if source == "own" else of(source)
    messages: list[dict[str, Any]] = []
    for asked, steps, answered in turns:
        messages += [{"role": "user", "content": asked}, *loop_of(steps), {"role": "assistant", "content": answered}]
    messages += [{"role": "user", "content": question}, *loop_of(loop)]
    conversation = ChatInput(messages=messages)
    rendered: Rendered = chat.render(conversation)
    tokens = tokenize(rendered.prompt)
    assert chat.stable_boundaries(conversation, rendered, tokens, tokenize) == by_definition(
        chat, conversation, tokens, tokenize
    )


@pytest.mark.parametrize("bos", [(), (1,)])
def test_added_bos_counts_once(own: ChatFormat, tokenize: Tokenizer, bos: tuple[int, ...]) -> None:
    def with_bos(text: str) -> Tokens:
        return as_tokens([*bos, *tokenize(text).tolist()])

    rendered = own.render(ASK)
    tokens = with_bos(rendered.prompt)
    plain = own.stable_boundaries(ASK, rendered, tokenize(rendered.prompt), tokenize)
    assert own.stable_boundaries(ASK, rendered, tokens, with_bos) == tuple(n + len(bos) for n in plain)


def test_common_prefix() -> None:
    empty = np.empty(0, np.int32)
    assert common_prefix(empty, empty) == 0
    assert common_prefix(as_tokens([1, 2]), as_tokens([1, 2, 3])) == 2
    assert common_prefix(as_tokens([1, 2]), as_tokens([1, 3])) == 1
    assert common_prefix(as_tokens([4]), as_tokens([1])) == 0
