"""What one call may say, checked and turned into what the engine runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypedDict

from gufo_gguf.backend.chat import ChatInput
from gufo_gguf.cache.types import Tokens
from gufo_gguf.core.errors import RequestError
from gufo_gguf.engine.types import ROLES, GenerateRequest, SamplingParams


class Options(TypedDict, total=False):
    """Of every call that generates.  Names and defaults as llama-server's; see ``SamplingParams``."""

    max_tokens: int | None
    """None = until the model ends its answer or the context is full; 0 = only evaluate the prompt."""
    stop: str | Sequence[str]
    temperature: float
    """0 = always the most likely token."""
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    ignore_eos: bool
    grammar: str
    """GBNF."""
    json_schema: Mapping[str, Any]
    """What the answer must match."""
    logprobs: int
    """k > 0: the k most likely tokens with each generated one."""
    sampling: SamplingParams
    """Everything at once; the single fields above win."""
    cache: bool
    """False: nothing is read from the cache or left in it."""
    request_id: str
    """Stands in the cache's decision log."""


class ChatOptions(Options, total=False):
    """Of calls that take messages, besides ``Options``."""

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool | None
    thinking: bool
    """False: ask the template for an answer without reasoning."""
    template_kwargs: Mapping[str, Any]
    now: int | None
    """Unix seconds that the template takes for the present; a Conversation keeps its own."""


_SAMPLING = {f.name for f in fields(SamplingParams)} & Options.__annotations__.keys()
_COMMON = Options.__annotations__.keys()
_CHAT = ChatOptions.__annotations__.keys()


def check_names(options: Mapping[str, Any], *, chat: bool) -> None:
    """Raise RequestError for an option that does not exist: a typing mistake must not go unseen."""
    known = _CHAT if chat else _COMMON
    unknown = sorted(options.keys() - known)
    if unknown:
        only = " (it belongs to chat)" if unknown[0] in _CHAT else ""
        raise RequestError(
            f"{unknown[0]}: no such option{only}; there are {', '.join(sorted(known))}", param=unknown[0]
        )


def sampling_of(options: Mapping[str, Any]) -> SamplingParams:
    """A fresh SamplingParams: ``sampling``, or the defaults, with the single fields on top."""
    given = {name: options[name] for name in options.keys() & _SAMPLING}
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): float(bias) for token, bias in given["logit_bias"].items()}
    return replace(options.get("sampling") or SamplingParams(), **given)


def request_of(options: Mapping[str, Any], tokens: Tokens, sampling: SamplingParams) -> GenerateRequest:
    """The request without what only chat knows (stable boundaries, the format's stop strings)."""
    stop = options.get("stop") or ()
    max_tokens = options.get("max_tokens")
    if max_tokens is not None and max_tokens < 0:
        raise RequestError(f"max_tokens: {max_tokens} is negative; None = no limit", param="max_tokens")
    return GenerateRequest(
        tokens=tokens,
        sampling=sampling,
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        n_logprobs=options.get("logprobs", 0),
        cache_prompt=options.get("cache", True),
        request_id=options.get("request_id", ""),
    )


def chat_input(options: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> ChatInput:
    """What the template is given."""
    if not messages:
        raise RequestError("messages: at least one is needed", param="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise RequestError(f"messages[{i}]: a message is a mapping with a role", param="messages")
        if not isinstance(message["role"], str) or message["role"] not in ROLES:
            raise RequestError(f"messages[{i}].role: must be one of {', '.join(ROLES)}", param="messages")
    return ChatInput(
        messages=[{**message, "role": ROLES[message["role"]]} for message in messages],
        tools=options.get("tools", ()),
        tool_choice=options.get("tool_choice", "auto"),
        parallel_tool_calls=options.get("parallel_tool_calls"),
        json_schema=options.get("json_schema"),
        grammar=options.get("grammar", ""),
        enable_thinking=options.get("thinking", True),
        template_kwargs=options.get("template_kwargs", {}),
        now=options.get("now"),
    )
