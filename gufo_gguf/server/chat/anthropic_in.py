"""Anthropic's messages as a ``ChatAsk``: blocks become OpenAI's fields, in the order they came.

text, document of text          content
thinking                        reasoning_content
tool_use                        tool_calls
tool_result                     a message of role tool; text after it starts a new user message
server tools and their results  skipped: they ran elsewhere
image, document of other kinds  refused, no projector is loaded
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gufo_gguf.server.chat.messages import Message, bad, normalise
from gufo_gguf.server.chat.prepare import ChatAsk, check_continuation
from gufo_gguf.server.chat.tools import Tool, ToolChoice, function_tools
from gufo_gguf.server.errors import Problem, ProblemError
from gufo_gguf.server.schema.anthropic import AnthropicBody
from gufo_gguf.server.settings import ServerSettings

# In the words that the official client falls back on: it then sends the whole history with each request.
_NO_THREADS = Problem(
    400,
    "thread: nothing is stored here between requests; send all messages",
    code="unsupported_field",
    param="thread",
    extra={"details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}},
)
_SKIPPED = (
    "server_tool",
    "web_",
    "mcp_",
    "code_execution",
    "bash_code",
    "text_editor",
    "container",
    "redacted",
    "tool_search",
)


def anthropic_ask(body: AnthropicBody, settings: ServerSettings) -> ChatAsk:
    """Raises RequestError with the path of the field that is wrong."""
    if body.thread is not None:
        raise ProblemError(_NO_THREADS)
    tools = anthropic_tools(body.tools)
    messages = normalise(
        [*_system(body.system), *_messages(body.messages)],
        noise=settings.normalise_noise,
        limit=settings.limits.messages,
    )
    choice, parallel = _tool_choice(body.tool_choice, tools)
    body.stop = (*body.stop, *body.stop_sequences)
    ask = ChatAsk(
        body=body,
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        json_schema=_schema(body),
        reasoning_format=settings.reasoning_format,
        template_kwargs=dict(body.chat_template_kwargs or {}),
        continue_final=check_continuation(messages, None, None),
        progress=True,  # the first event must say how much of the prompt was cached
    )
    _thinking(body, ask)
    return ask


def _system(value: Any) -> list[Message]:
    """One system message per block; ``normalise`` joins them."""
    if value is None or value == "" or value == []:
        return []
    if isinstance(value, str):
        return [{"role": "system", "content": value}]
    if not isinstance(value, list):
        raise bad("system", "must be a string or a list of text blocks")
    out: list[Message] = []
    for i, block in enumerate(value):
        if not isinstance(block, Mapping) or not isinstance(block.get("text"), str):
            raise bad(f"system[{i}]", "must be a text block")
        out.append({"role": "system", "content": block["text"]})
    return out


def _messages(value: Any) -> Iterator[Message]:
    if not isinstance(value, list):
        raise bad("messages", "must be a list of messages")
    for i, message in enumerate(value):
        at = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise bad(at, "must be an object")
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise bad(f"{at}.role", "must be one of user, assistant, system")
        content = message.get("content")
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif not isinstance(content, list):
            raise bad(f"{at}.content", "must be a string or a list of blocks")
        elif role == "assistant":
            yield _assistant(content, f"{at}.content")
        else:
            yield from _user(role, content, f"{at}.content")


def _blocks(content: list[Any], path: str) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    for i, block in enumerate(content):
        at = f"{path}[{i}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str):
            raise bad(at, "must be a block with a type")
        if not kind.startswith(_SKIPPED):
            yield kind, block, at


def _text(block: Mapping[str, Any], name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad(f"{at}.{name}", "must be a string")
    return value


def _assistant(content: list[Any], path: str) -> Message:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning = ""
    for kind, block, at in _blocks(content, path):
        if kind == "text":
            parts.append({"type": "text", "text": _text(block, "text", at)})
        elif kind == "thinking":
            reasoning += _text(block, "thinking", at)
        elif kind == "tool_use":
            function = {"name": _text(block, "name", at), "arguments": block.get("input") or {}}
            calls.append({"id": _text(block, "id", at), "type": "function", "function": function})
        else:
            raise bad(f"{at}.type", f"there is no assistant block of type {kind!r}")
    out: Message = {"role": "assistant", "content": parts or ""}
    if calls:
        out["tool_calls"] = calls
    if reasoning:
        out["reasoning_content"] = reasoning
    return out


def _user(role: str, content: list[Any], path: str) -> Iterator[Message]:
    parts: list[dict[str, Any]] = []
    for kind, block, at in _blocks(content, path):
        if kind == "tool_result":
            if parts:
                yield {"role": role, "content": parts}
                parts = []
            yield _tool_result(block, at)
        else:
            parts.append(_part(kind, block, at))
    if parts:
        yield {"role": role, "content": parts}


def _part(kind: str, block: Mapping[str, Any], at: str) -> dict[str, Any]:
    source = block.get("source")
    if kind == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        return {"type": "text", "text": _text(source, "data", f"{at}.source")}
    return {"type": kind, "text": block.get("text")}  # media and unknown kinds are refused by ``normalise``


def _tool_result(block: Mapping[str, Any], at: str) -> Message:
    content = block.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        texts = []
        for kind, inner, place in _blocks(content, f"{at}.content"):
            if kind == "image":
                raise bad(f"{place}.type", "image input is not supported: no projector is loaded for this model")
            texts.append(_text(inner, "text", place) if kind == "text" else "")
        content = "".join(texts)
    if not isinstance(content, str):
        raise bad(f"{at}.content", "must be a string or a list of blocks")
    if block.get("is_error") and not content:
        content = "error"
    return {"role": "tool", "tool_call_id": _text(block, "tool_use_id", at), "content": content}


def anthropic_tools(value: Any) -> list[Tool]:
    """Client tools; those that Anthropic runs itself (typed, such as web_search_…) are skipped."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad("tools", "must be a list of tools")
    tools: list[dict[str, Any]] = []
    for i, tool in enumerate(value):
        if not isinstance(tool, Mapping):
            raise bad(f"tools[{i}]", "must be an object")
        if tool.get("type") not in (None, "custom"):
            tools.append({"type": "skipped"})
            continue
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
        }
        tools.append({"type": "function", "function": function})
    return function_tools(tools)


def _tool_choice(value: Any, tools: list[Tool]) -> tuple[ToolChoice, bool | None]:
    """(choice, parallel calls); None = as the template does by itself."""
    if value is None:
        return "auto", None
    if not isinstance(value, Mapping):
        raise bad("tool_choice", "must be an object")
    parallel = False if value.get("disable_parallel_tool_use") is True else None
    kind = value.get("type")
    if kind in ("auto", "none"):
        return kind, parallel
    if kind == "any":
        if not tools:
            raise bad("tool_choice", "any, but there are no tools")
        return "required", parallel
    if kind == "tool":
        name = value.get("name")
        if not any(tool["function"]["name"] == name for tool in tools):
            raise bad("tool_choice.name", f"there is no tool named {name!r}")
        return {"type": "function", "function": {"name": name}}, parallel
    raise bad("tool_choice.type", f"must be auto, any, tool or none, but is {kind!r}")


def _schema(body: AnthropicBody) -> Mapping[str, Any] | None:
    given = body.output_format or (body.output_config or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, Mapping) or not isinstance(given.get("schema"), Mapping):
        raise bad("output_format", "must be an object with a schema")
    schema: Mapping[str, Any] = given["schema"]
    return schema


def _thinking(body: AnthropicBody, ask: ChatAsk) -> None:
    effort = (body.output_config or {}).get("effort")
    if isinstance(effort, str):
        ask.template_kwargs.setdefault("reasoning_effort", effort)
    if body.thinking is None:
        return
    kind = body.thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise bad("thinking.type", "must be enabled, disabled or adaptive")
    ask.thinking = kind != "disabled"
    budget = body.thinking.get("budget_tokens")
    if kind == "enabled" and budget is not None:
        if isinstance(budget, bool) or not isinstance(budget, int):
            raise bad("thinking.budget_tokens", "must be an integer")
        ask.thinking_budget = budget
