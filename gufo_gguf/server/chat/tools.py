"""Tools, tool_choice and response_format, checked and in the form that ``ChatInput`` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gufo_gguf.server.chat.messages import bad

Tool = dict[str, Any]
ToolChoice = str | dict[str, Any]


def function_tools(value: Any) -> list[Tool]:
    """Function tools in OpenAI's nested form.  Tools of other types (web search, code interpreter, …)
    run on other people's servers: they are skipped, so that an agent's request still works."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad("tools", "must be a list of tools")
    out: list[Tool] = []
    for i, tool in enumerate(value):
        at = f"tools[{i}]"
        if not isinstance(tool, Mapping):
            raise bad(at, "must be an object")
        if tool.get("type", "function") != "function":
            continue
        function = tool.get("function", tool if "name" in tool else None)
        if not isinstance(function, Mapping):
            raise bad(f"{at}.function", "must be an object")
        out.append({"type": "function", "function": _function(function, f"{at}.function")})
    return out


def _function(function: Mapping[str, Any], path: str) -> dict[str, Any]:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise bad(f"{path}.name", "must be a non-empty string")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise bad(f"{path}.description", "must be a string")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise bad(f"{path}.parameters", "must be a JSON schema object")
    return {
        "name": name,
        "description": description or "",
        "parameters": dict(parameters) if parameters else {"type": "object", "properties": {}},
    }


def tool_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """auto | none | required | a named function.  Without tools there is nothing to choose."""
    if value is None:
        return "auto"
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise bad("tool_choice", f"must be auto, none, required or a function, but is {value!r}")
        if value == "required" and not tools:
            raise bad("tool_choice", "required, but there are no tools")
        return value
    if not isinstance(value, Mapping):
        raise bad("tool_choice", "must be a string or an object")
    kind = value.get("type", "function")
    if kind == "allowed_tools":
        allowed = value.get("allowed_tools") or value
        if not isinstance(allowed, Mapping):
            raise bad("tool_choice.allowed_tools", "must be an object")
        mode = allowed.get("mode", "auto")
        return "required" if mode == "required" and tools else "auto"
    if kind != "function":
        return "auto"  # a choice of a tool that was skipped
    function = value.get("function", value)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not any(tool["function"]["name"] == name for tool in tools):
        raise bad("tool_choice", f"there is no tool named {name!r}")
    return {"type": "function", "function": {"name": name}}


def response_schema(response_format: Any, json_schema: Any) -> Mapping[str, Any] | None:
    """What the answer must match: None = anything, {} = any JSON object."""
    if response_format is None:
        return _schema(json_schema, "json_schema")
    if not isinstance(response_format, Mapping):
        raise bad("response_format", "must be an object")
    kind = response_format.get("type")
    match kind:
        case "text" | None:
            return _schema(json_schema, "json_schema")
        case "json_object":
            given = response_format.get("schema", json_schema)
            return {} if given is None else _schema(given, "response_format.schema")
        case "json_schema":
            wrapper = response_format.get("json_schema", response_format)
            if not isinstance(wrapper, Mapping):
                raise bad("response_format.json_schema", "must be an object")
            given = wrapper.get("schema")
            return {} if given is None else _schema(given, "response_format.json_schema.schema")
        case _:
            raise bad("response_format.type", f"must be text, json_object or json_schema, but is {kind!r}")


def _schema(value: Any, path: str) -> Mapping[str, Any] | None:
    if value is not None and not isinstance(value, Mapping):
        raise bad(path, "must be a JSON schema object")
    return value
