"""OpenAI's chat body, with llama-server's and other services' fields, as a ``ChatAsk``."""

from __future__ import annotations

from typing import Any

from gufo_gguf.core.errors import RequestError
from gufo_gguf.server.chat.messages import bad, normalise
from gufo_gguf.server.chat.prepare import ChatAsk, check_continuation
from gufo_gguf.server.chat.tools import function_tools, response_schema, tool_choice
from gufo_gguf.server.schema.chat import ChatBody
from gufo_gguf.server.settings import ServerSettings

_REASONING_FORMATS = ("auto", "none", "deepseek", "deepseek-legacy")


def chat_ask(body: ChatBody, settings: ServerSettings) -> ChatAsk:
    """Raises RequestError with the path of the field that is wrong."""
    messages = normalise(body.messages, noise=settings.normalise_noise, limit=settings.limits.messages)
    tools = function_tools(body.tools)
    reasoning_format = body.reasoning_format or settings.reasoning_format
    if reasoning_format not in _REASONING_FORMATS:
        raise bad("reasoning_format", f"must be one of {', '.join(_REASONING_FORMATS)}")
    ask = ChatAsk(
        body=body,
        messages=messages,
        tools=tools,
        tool_choice=tool_choice(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls,
        json_schema=response_schema(body.response_format, body.json_schema),
        reasoning_format=reasoning_format,
        thinking_budget_message=body.reasoning_budget_message or "",
        template_kwargs=dict(body.chat_template_kwargs or {}),
        continue_final=check_continuation(messages, body.continue_final_message, body.add_generation_prompt),
        add_generation_prompt=body.add_generation_prompt is not False,
        n=body.n or body.n_cmpl or 1,
        n_logprobs=_logprobs(body),
        post_sampling=bool(body.post_sampling_probs),
        progress=bool((body.return_progress or body.timings_per_token) and body.stream),
    )
    _reasoning(body, ask)
    return ask


def _logprobs(body: ChatBody) -> int:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs: needs logprobs to be true", param="top_logprobs")
    return -1


def _reasoning(body: ChatBody, ask: ChatAsk) -> None:
    """Thinking or not, how hard, and for how long: the same wish under many names."""
    effort: Any = body.reasoning_effort
    budget = body.reasoning_budget_tokens if body.reasoning_budget_tokens is not None else body.thinking_budget_tokens
    ask.thinking = body.enable_thinking
    if body.reasoning:
        effort = effort or body.reasoning.get("effort")
        budget = budget if budget is not None else body.reasoning.get("max_tokens")
        if body.reasoning.get("enabled") is False:
            ask.thinking = False
    if body.thinking:
        kind = body.thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive", "auto"):
            raise bad("thinking.type", "must be enabled or disabled")
        ask.thinking = kind != "disabled"
        budget = budget if budget is not None else body.thinking.get("budget_tokens")
    if effort is not None and not isinstance(effort, str):
        raise bad("reasoning_effort", "must be a string")
    if effort == "none":
        ask.thinking = False
    elif effort:
        ask.template_kwargs.setdefault("reasoning_effort", effort)
    if budget is not None:
        if isinstance(budget, bool) or not isinstance(budget, int):
            raise bad("thinking.budget_tokens", "must be an integer")
        ask.thinking_budget = budget
