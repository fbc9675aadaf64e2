"""OpenAI's responses input as a ``ChatAsk``: items become messages.

    message                one message
    reasoning              reasoning_content  ┐ of one assistant message, with the text
    function_call          tool_calls         ┘ between them
    function_call_output   a message of role tool

Nothing is stored here (``store`` has no effect), so ``previous_response_id`` is refused: a client that
relies on it must send the items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gufo_gguf.server.chat.messages import Message, bad, normalise, text_parts
from gufo_gguf.server.chat.prepare import ChatAsk, check_continuation
from gufo_gguf.server.chat.tools import function_tools, response_schema, tool_choice
from gufo_gguf.server.schema.responses import ResponsesBody
from gufo_gguf.server.settings import ServerSettings

_FOREIGN_CALLS = ("_call", "_call_result", "_call_output")
"""Calls of tools that run on other people's servers, in a history that began there: skipped."""


def responses_ask(body: ResponsesBody, settings: ServerSettings) -> ChatAsk:
    """Raises RequestError with the path of the field that is wrong."""
    if body.previous_response_id:
        raise bad("previous_response_id", "responses are not stored here; send the items of the conversation instead")
    head: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if not isinstance(items, list):
        raise bad("input", "must be a string or a list of items")
    messages = normalise([*head, *_messages(items)], noise=settings.normalise_noise, limit=settings.limits.messages)
    if body.max_output_tokens is not None and body.max_tokens is None:
        body.max_tokens = body.max_output_tokens
    tools = function_tools(body.tools)
    wants_progress = body.stream and (body.return_progress or body.timings_per_token)
    ask = ChatAsk(
        body=body,
        messages=messages,
        tools=tools,
        tool_choice=tool_choice(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls,
        json_schema=response_schema((body.text or {}).get("format"), None),
        reasoning_format=settings.reasoning_format,
        template_kwargs=dict(body.chat_template_kwargs or {}),
        continue_final=check_continuation(messages, None, None),
        n_logprobs=body.top_logprobs if body.top_logprobs is not None else -1,
        progress=bool(wants_progress),
    )
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise bad("reasoning.effort", "must be a string")
    if effort == "none":
        ask.thinking = False
    elif effort:
        ask.template_kwargs.setdefault("reasoning_effort", effort)
    return ask


def _messages(items: list[Any]) -> Iterator[Message]:
    """Items of one assistant turn are gathered until something else comes."""
    turn: Message | None = None
    for i, item in enumerate(items):
        at = f"input[{i}]"
        if not isinstance(item, Mapping):
            raise bad(at, "must be an object")
        kind = str(item.get("type") or "message")
        if kind.endswith(_FOREIGN_CALLS) and not kind.startswith("function_call"):
            continue
        assistant = kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")
        if assistant:
            if turn is not None and kind != "function_call" and ("tool_calls" in turn or "content" in turn):
                yield turn  # what comes next was a turn of its own
                turn = None
            turn = {"role": "assistant"} if turn is None else turn
            _into_turn(turn, kind, item, at)
            continue
        if turn is not None:
            yield turn
            turn = None
        yield _other(kind, item, at)
    if turn is not None:
        yield turn


def _into_turn(turn: Message, kind: str, item: Mapping[str, Any], at: str) -> None:
    if kind == "reasoning":
        texts = _reasoning_texts(item, at)
        if texts:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + "".join(texts)
    elif kind == "function_call":
        function = {"name": _string(item, "name", at), "arguments": _string(item, "arguments", at)}
        call = {"id": _string(item, "call_id", at), "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    else:
        texts, reasoning = text_parts(item.get("content"), f"{at}.content")
        turn["content"] = "".join(texts)
        if reasoning:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + "".join(reasoning)


def _reasoning_texts(item: Mapping[str, Any], at: str) -> list[str]:
    """The thoughts themselves; a summary only where there are none."""
    out: list[str] = []
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise bad(f"{at}.{name}", "must be a list of parts")
        for j, part in enumerate(parts):
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise bad(f"{at}.{name}[{j}]", "must be a part with a text")
            out.append(part["text"])
        if out:
            break
    return out


def _other(kind: str, item: Mapping[str, Any], at: str) -> Message:
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise bad(f"{at}.role", "must be one of user, assistant, system, developer")
        texts, _ = text_parts(item.get("content"), f"{at}.content")
        return {"role": role, "content": [{"type": "text", "text": text} for text in texts] or ""}
    if kind == "function_call_output":
        output = item.get("output")
        texts, _ = text_parts(output, f"{at}.output")
        return {"role": "tool", "tool_call_id": _string(item, "call_id", at), "content": "".join(texts)}
    raise bad(f"{at}.type", f"items of type {kind!r} are not supported")


def _string(item: Mapping[str, Any], name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad(f"{at}.{name}", "must be a string")
    return value
