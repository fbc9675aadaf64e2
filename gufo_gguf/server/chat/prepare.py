"""From a chat request of any API to what the engine runs.

    ChatAsk ── render ── tokens ── stable boundaries ── GenerateRequest × n
               (template)          (what the next turn sends again: where the cache puts a checkpoint)

Runs in a worker thread: rendering and tokenizing a long conversation takes tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gufo_gguf.backend.chat import ChatInput, Rendered
from gufo_gguf.cache.types import Tokens
from gufo_gguf.core.errors import RequestError
from gufo_gguf.engine.types import GenerateRequest, as_tokens
from gufo_gguf.server.chat.messages import Message, bad, with_fallback
from gufo_gguf.server.chat.tools import Tool, ToolChoice
from gufo_gguf.server.requests import Prepared, bias_tokenizer, check_length, check_limits, choices_of
from gufo_gguf.server.schema.sampling import SamplingFields
from gufo_gguf.server.state import State


@dataclass(slots=True)
class ChatAsk:
    """What is asked, whatever API asked it."""

    body: SamplingFields
    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = None
    json_schema: Mapping[str, Any] | None = None
    reasoning_format: str = "auto"
    thinking: bool | None = None
    """None = as the template does by itself."""
    thinking_budget: int = -1
    thinking_budget_message: str = ""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    continue_final: bool | str = False
    add_generation_prompt: bool = True
    n: int = 1
    n_logprobs: int = -1
    """Alternatives per token; -1 = no log-probabilities."""
    post_sampling: bool = False
    progress: bool = False


@dataclass(frozen=True, slots=True)
class PreparedChat:
    prepared: Prepared
    rendered: Rendered


def thinking_of(ask: ChatAsk, default: bool | None) -> bool:
    """A template's ``enable_thinking`` wins, since clients of llama-server set it there."""
    value = ask.template_kwargs.get("enable_thinking", default if ask.thinking is None else ask.thinking)
    if value is not None and not isinstance(value, bool):
        raise bad("chat_template_kwargs.enable_thinking", "must be true or false")
    return value is not False


def check_continuation(
    messages: list[Message], asked: bool | str | None, add_generation_prompt: bool | None
) -> bool | str:
    """Is the last message an assistant's beginning, to be continued?  Without a word about it, yes."""
    if asked and add_generation_prompt:
        raise bad("continue_final_message", "cannot be combined with add_generation_prompt")
    last = messages[-1]
    if last["role"] != "assistant":
        if asked:
            raise bad("continue_final_message", "the last message is not an assistant's")
        return False
    if asked is None and add_generation_prompt:
        return False
    if asked is False:
        return False
    if last.get("tool_calls"):
        raise bad("messages", "an assistant message with tool calls cannot be continued: their results are missing")
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise bad("messages", "two assistant messages at the end cannot be continued")
    return asked or True


def chat_input(ask: ChatAsk, state: State) -> ChatInput:
    return ChatInput(
        messages=ask.messages,
        tools=ask.tools,
        tool_choice=ask.tool_choice,
        parallel_tool_calls=ask.parallel_tool_calls,
        json_schema=ask.json_schema,
        grammar=ask.body.grammar or "",
        reasoning_format=ask.reasoning_format,
        enable_thinking=thinking_of(ask, state.settings.thinking),
        template_kwargs=ask.template_kwargs,
        continue_final=ask.continue_final,
        now=state.clock.for_messages(ask.messages),
    )


def render(ask: ChatAsk, state: State) -> tuple[ChatInput, Rendered]:
    """The input as the template took it, and what it made of it."""
    if ask.body.grammar and ask.json_schema is not None:
        raise RequestError("grammar: cannot be combined with a JSON schema", param="grammar")
    if ask.body.grammar and ask.tools and ask.tool_choice != "none":
        raise RequestError("grammar: cannot be combined with tools", param="grammar")
    chat = state.engine.chat

    def with_messages(messages: list[Message]) -> tuple[ChatInput, Rendered]:
        ask.messages = messages
        given = chat_input(ask, state)
        return given, chat.render(given, add_generation_prompt=ask.add_generation_prompt)

    return with_fallback(ask.messages, with_messages)


def tokenizer(state: State) -> Any:
    """Text as a prompt's tokens: BOS where the model wants one, special tokens understood."""

    def tokenize(text: str) -> Tokens:
        return as_tokens(state.engine.vocab.tokenize(text, add_special=True, parse_special=True))

    return tokenize


def prepare_chat(ask: ChatAsk, state: State, scope: str) -> PreparedChat:
    """Raises RequestError and ContextLengthExceeded."""
    engine, settings = state.engine, state.settings
    check_limits(ask.body, settings.limits, choices=ask.n, n_logprobs=ask.n_logprobs)
    given, rendered = render(ask, state)
    tokenize = tokenizer(state)
    tokens = tokenize(rendered.prompt)
    check_length(engine, settings.limits, len(tokens))
    body = ask.body
    cache_prompt = body.cache_prompt is not False
    sampling = rendered.sampling(body.sampling(settings.sampling, bias_tokenizer(engine.vocab)))
    sampling.reasoning_budget_tokens = ask.thinking_budget
    sampling.reasoning_budget_message = ask.thinking_budget_message
    request = GenerateRequest(
        tokens=tokens,
        sampling=sampling,
        max_tokens=body.token_limit(settings.max_tokens),
        stop=tuple(dict.fromkeys((*body.stop, *rendered.additional_stops))),
        stable=engine.chat.stable_boundaries(given, rendered, tokens, tokenize) if cache_prompt else (),
        system_end=engine.chat.system_end(given, rendered, tokens, tokenize) if cache_prompt else 0,
        n_logprobs=max(1, ask.n_logprobs) if ask.n_logprobs >= 0 else 0,
        post_sampling=ask.post_sampling,
        cache_prompt=cache_prompt,
        scope=scope,
        progress=ask.progress,
    )
    return PreparedChat(Prepared(choices_of(request, ask.n), ask.n, ask.n_logprobs), rendered)


def count_tokens(ask: ChatAsk, state: State) -> int:
    """Prompt tokens the request would have."""
    _, rendered = render(ask, state)
    return len(tokenizer(state)(rendered.prompt))
