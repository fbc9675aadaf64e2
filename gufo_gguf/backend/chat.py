"""Chat templates: messages in, prompt and output format out (answers: message_parser.py).

Templates, tool-call formats and grammars are llama.cpp's ``common_chat_*`` (``native/src/chat.cpp``):
what llama-server's users rely on, and no second parser in Python.  This file only brings requests
into the shape that the native side accepts, without changing what a template would print.

A ChatFormat may be used from any thread: rendering changes nothing in it.
"""

from __future__ import annotations

import ctypes as ct
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gufo_gguf.backend import cabi
from gufo_gguf.backend.message_parser import MessageParser
from gufo_gguf.backend.stable import StableSearch, Tokenize
from gufo_gguf.cache.types import Tokens
from gufo_gguf.core.errors import RequestError
from gufo_gguf.engine.types import SamplingParams

Message = Mapping[str, Any]
"""One message in OpenAI's form, ``reasoning_content`` included."""


@dataclass(frozen=True, slots=True)
class ChatInput:
    """Everything a prompt is rendered from, with OpenAI's and llama-server's names."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools of other types than "function" are skipped."""
    tool_choice: str | Mapping[str, Any] = "auto"
    """auto | none | required | {"type": "function", "function": {"name": ...}}."""
    parallel_tool_calls: bool | None = None
    """None = whether the template supports it."""
    json_schema: Mapping[str, Any] | None = None
    """What the answer must match; {} = any JSON object."""
    grammar: str = ""
    reasoning_format: str = "auto"
    """auto | deepseek: reasoning apart from content; none: left in the content."""
    enable_thinking: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool | str = False
    """The last message is an assistant's, to be continued: True, "content" or "reasoning_content"."""
    now: int | None = None
    """Unix seconds that templates take for the present; pinned per conversation, or midnight would
    change the first tokens of every prompt.  None = the real clock."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt and how its answer is written and read."""

    prompt: str
    generation_prompt: str
    """The assistant opening at the end of the prompt."""
    format: int
    format_name: str
    parser: str
    """The answer's parser, serialised; for MessageParser."""
    grammar: str
    grammar_lazy: bool
    grammar_triggers: list[dict[str, Any]]
    preserved_tokens: list[str]
    additional_stops: list[str]
    supports_thinking: bool
    thinking_start_tag: str
    thinking_end_tags: list[str]
    message_delimiters: list[dict[str, str]]
    is_continuation: bool

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """``params`` with what this format asks for; a grammar of the request itself stays."""
        if self.grammar:
            params = replace(params, grammar=self.grammar, grammar_type="tool_calls", grammar_lazy=self.grammar_lazy)
        return replace(
            params,
            grammar_triggers=self.grammar_triggers,
            preserved_tokens=[*params.preserved_tokens, *self.preserved_tokens],
            generation_prompt=self.generation_prompt,
            reasoning_budget_start_tag=self.thinking_start_tag,
            reasoning_budget_end_tags=self.thinking_end_tags,
        )


@dataclass(frozen=True, slots=True)
class TemplateInfo:
    source: str
    tool_use_source: str
    """A second template for requests with tools, "" if the model has none."""
    explicit: bool
    """False: neither model nor user gave a template; ChatML is assumed."""
    caps: dict[str, bool]
    supports_thinking: bool
    bos_token: str
    eos_token: str


def _arguments(value: object, *, must_parse: bool) -> str:
    """A past call's arguments as the native side takes them.

    Templates that print arguments as objects refuse text that is no JSON; a model's broken call
    would make its whole conversation unservable, so it is shown as an object that holds the text.
    """
    if not isinstance(value, str):
        return json.dumps(value if value is not None else {}, ensure_ascii=False)
    if not value.strip():
        return "{}"
    if must_parse:
        try:
            json.loads(value)
        except ValueError:
            return json.dumps({"arguments": value}, ensure_ascii=False)
    return value


def _native_message(message: Message, *, object_arguments: bool) -> dict[str, Any]:
    """Without the fields that clients send as null or empty, and with the ones they leave out."""
    out = {name: value for name, value in message.items() if value is not None}
    calls = out.pop("tool_calls", None)
    if calls:
        native_calls = []
        for call in calls:
            function = call.get("function")
            if not isinstance(function, Mapping):
                raise RequestError("messages: a tool call has no function", param="messages")
            arguments = _arguments(function.get("arguments"), must_parse=object_arguments)
            native = {"type": "function", "function": {"name": function.get("name") or "", "arguments": arguments}}
            if call.get("id"):
                native["id"] = call["id"]
            native_calls.append(native)
        out["tool_calls"] = native_calls
    if "content" not in out and not calls:
        out["content"] = ""
    return out


_TOOLS = ({"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}},)


def _usual_talks() -> list[list[Message]]:
    """Conversations with what a format may print its own way: calls, results, reasoning, text beside calls."""

    def answer(text: str, thinks: bool, *calls: int) -> list[Message]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinks:
            message["reasoning_content"] = f"Why {text}\n"
        idents = [f"call{call:05}" for call in calls]  # nine characters, which some templates insist on
        function = {"name": "read", "arguments": '{"path": "a"}'}
        if calls:
            message["tool_calls"] = [{"id": ident, "type": "function", "function": function} for ident in idents]
        return [message, *({"role": "tool", "tool_call_id": ident, "content": f"Found {ident}.\n"} for ident in idents)]

    talks: list[list[Message]] = []
    start: list[Message] = [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": " First. "}]
    for thinks in (False, True):
        loop = [*answer("I read. ", thinks, 1), *answer("", thinks, 2)]
        past = [*answer("One.\n", thinks), {"role": "user", "content": "Second."}]
        talks += [[*start, *loop], [*start, *past, *loop, *answer("", thinks, 3, 4)]]
    return talks


class ChatFormat:
    """The chat templates of a model, or the one given instead.  ``close()`` is idempotent."""

    def __init__(self, lib: ct.CDLL, model_ptr: int | None, template_override: str | None = None) -> None:
        """Raises RequestError when the template cannot be parsed."""
        self._lib = cabi.bind(lib)
        source = template_override.encode() if template_override else None
        self._handle: int | None = cabi.made(lib, lib.gufo_chat_new(model_ptr, source))
        self.info = TemplateInfo(
            **{
                "bos_token": "",
                "eos_token": "",
                **cabi.call_for_json(lib, lib.gufo_chat_info, self._handle, model_ptr),
            }
        )

    def render(self, chat: ChatInput, *, add_generation_prompt: bool = True) -> Rendered:
        """Prompt and format.  RequestError carries the template's own message when it refuses.

        A named tool_choice constrains the answer to that tool while the prompt still shows all of
        them: another choice must not change the tokens of the history.
        """
        if isinstance(chat.tool_choice, str):
            return self._render(chat, chat.tool_choice, chat.tools, add_generation_prompt)
        name = (chat.tool_choice.get("function") or {}).get("name") or chat.tool_choice.get("name")
        named = [tool for tool in chat.tools if (tool.get("function") or {}).get("name") == name]
        if not named:
            raise RequestError(f"tool_choice: there is no tool named {name!r}", param="tool_choice")
        shown = self._render(chat, "required", chat.tools, add_generation_prompt)
        return replace(self._render(chat, "required", named, add_generation_prompt), prompt=shown.prompt)

    def history(self, chat: ChatInput) -> str:
        """The prompt of ``render`` without an opening for an answer; cheaper, since no grammar is made for one."""
        return self._printed(chat) if self._prints_all else self.render(chat, add_generation_prompt=False).prompt

    def warm_up(self) -> None:
        """Find out now what the first request would have to wait for."""
        _ = self._prints_all

    @cached_property
    def _prints_all(self) -> bool:
        """Is the template's own text the prompt?  llama.cpp adapts the messages of some formats first."""
        equal: list[bool] = []
        for messages in _usual_talks():
            for tools in (_TOOLS, ()):
                chat = ChatInput(messages=messages, tools=tools)
                try:
                    equal.append(self._printed(chat) == self.render(chat, add_generation_prompt=False).prompt)
                except RequestError:
                    continue
        return bool(equal) and all(equal)

    def _printed(self, chat: ChatInput) -> str:
        request = self._request(chat, "none", chat.tools, add_generation_prompt=False)
        return str(self._call({**request, "prompt_only": True})["prompt"])

    def _render(
        self, chat: ChatInput, tool_choice: str, tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> Rendered:
        request = self._request(chat, tool_choice, tools, add_generation_prompt=add_generation_prompt)
        return Rendered(**self._call(request))

    def _request(
        self, chat: ChatInput, tool_choice: str, tools: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> dict[str, Any]:
        object_arguments = self.info.caps.get("supports_object_arguments", False)
        parallel = chat.parallel_tool_calls
        schema = chat.json_schema
        return {
            "messages": [_native_message(m, object_arguments=object_arguments) for m in chat.messages],
            "tools": [tool for tool in tools if tool.get("type") == "function"] or None,
            "tool_choice": tool_choice,
            "parallel_tool_calls": self.info.caps["supports_parallel_tool_calls"] if parallel is None else parallel,
            "json_schema": {"type": "object"} if schema is not None and not schema else schema,
            "grammar": chat.grammar,
            "reasoning_format": chat.reasoning_format,
            "enable_thinking": chat.enable_thinking,
            "chat_template_kwargs": dict(chat.template_kwargs),
            "continue_final_message": chat.continue_final,
            "add_generation_prompt": add_generation_prompt and not chat.continue_final,
            "now": chat.now,
        }

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            text = cabi.to_json(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages: not JSON ({error})", param="messages") from None
        return cabi.call_for_json(self._lib, self._lib.gufo_chat_render, self._handle, text)

    def stable_boundaries(
        self, chat: ChatInput, rendered: Rendered, prompt_tokens: Tokens, tokenize: Tokenize
    ) -> tuple[int, ...]:
        """Lengths of the prefixes of ``prompt_tokens`` that the next turn is expected to send again.

        ``rendered`` is ``render(chat)`` and ``tokenize`` is what made ``prompt_tokens`` of its prompt.
        At most two, ascending, each in [1, len(prompt_tokens)]; see stable.py.  Costs one more
        rendering.
        """
        return StableSearch(self.history, tokenize).boundaries(chat, rendered, prompt_tokens)

    def system_end(self, chat: ChatInput, rendered: Rendered, prompt_tokens: Tokens, tokenize: Tokenize) -> int:
        """How many leading tokens any conversation with the same tools and system prompt begins with.

        In [0, len(prompt_tokens)]; 0: not a first turn, or the template refuses.  Costs a rendering of
        tools and system prompt.
        """
        return StableSearch(self.history, tokenize).system_end(chat, rendered, prompt_tokens)

    def parser(self, rendered: Rendered) -> MessageParser:
        """A parser for the answer to a rendered prompt; the caller closes it."""
        return MessageParser(self._lib, rendered)

    def schema_grammar(self, schema: Mapping[str, Any]) -> str:
        """A JSON schema as a grammar, for prompts without a template; RequestError names what cannot be expressed."""
        return cabi.call_for_text(self._lib, self._lib.gufo_schema_to_grammar, cabi.to_json(schema))

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle:
            self._lib.gufo_chat_free(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()
