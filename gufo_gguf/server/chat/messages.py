"""Messages as clients send them, checked and brought into the one form that templates take.

    role        developer → system, function → tool; others are refused
    content     text parts only; one part becomes its text; null becomes absent
    reasoning   reasoning_content, reasoning, or parts of type thinking → reasoning_content
    system      several at the head become one; a later one stays, unless the template refuses it

What is not understood is refused with the path of the field; what carries no meaning for a model
(cache_control, annotations, ids of other services) is dropped, so that it cannot change a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from gufo_gguf.core.errors import RequestError
from gufo_gguf.engine.types import ROLES
from gufo_gguf.server.chat.noise import normalise_system

Message = dict[str, Any]
T = TypeVar("T")

_TEXT_PARTS = {"text", "input_text", "output_text"}
_REASONING_PARTS = {"thinking", "reasoning"}
_MEDIA_PARTS = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "input_video": "video",
    "file": "file",
    "input_file": "file",
    "document": "document",
}


def bad(path: str, reason: str) -> RequestError:
    return RequestError(f"{path}: {reason}", param=path)


def text_parts(content: Any, path: str) -> tuple[list[str], list[str]]:
    """(texts, reasoning texts) of a content field: a string, a list of parts, or null."""
    if content is None:
        return [], []
    if isinstance(content, str):
        return [content], []
    if not isinstance(content, list):
        raise bad(path, "must be a string or a list of parts")
    texts: list[str] = []
    reasoning: list[str] = []
    for i, part in enumerate(content):
        at = f"{path}[{i}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise bad(at, "must be an object")
        kind = part.get("type")
        if not isinstance(kind, str):
            raise bad(f"{at}.type", "must be a string")
        if kind in _TEXT_PARTS:
            texts.append(_string(part.get("text"), f"{at}.text"))
        elif kind == "refusal":
            texts.append(_string(part.get("refusal"), f"{at}.refusal"))
        elif kind in _REASONING_PARTS:
            reasoning.append(_string(part.get("thinking", part.get("text", "")), f"{at}.{kind}"))
        elif kind == "redacted_thinking":
            continue
        elif kind in _MEDIA_PARTS:
            name = _MEDIA_PARTS[kind]
            raise bad(f"{at}.type", f"{name} input is not supported: no projector is loaded for this model")
        else:
            raise bad(f"{at}.type", f"there is no content part of type {kind!r}")
    return texts, reasoning


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise bad(path, "must be a string")
    return value


def _content(texts: Sequence[str]) -> Any:
    """One text as it is; several as parts, since templates decide how they join them."""
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


def _tool_calls(value: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise bad(path, "must be a list")
    out: list[dict[str, Any]] = []
    for i, call in enumerate(value):
        at = f"{path}[{i}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise bad(f"{at}.function", "must be an object")
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, (str, Mapping)):
            raise bad(f"{at}.function.arguments", "must be a string of JSON or an object")
        native = {"name": _string(function.get("name"), f"{at}.function.name"), "arguments": arguments}
        one: dict[str, Any] = {"type": "function", "function": native}
        if call.get("id") is not None:
            one["id"] = _string(call["id"], f"{at}.id")
        out.append(one)
    return out


def _assistant(message: Mapping[str, Any], reasoning: list[str], path: str) -> Message:
    out: Message = {}
    for name in ("reasoning_content", "reasoning"):
        if message.get(name):
            reasoning.insert(0, _string(message[name], f"{path}.{name}"))
            break
    if reasoning:
        out["reasoning_content"] = "".join(reasoning)
    if message.get("tool_calls"):
        out["tool_calls"] = _tool_calls(message["tool_calls"], f"{path}.tool_calls")
    elif message.get("function_call"):
        out["tool_calls"] = _tool_calls([{"function": message["function_call"]}], f"{path}.function_call")
    return out


def _message(message: Any, path: str, *, noise: bool) -> Message:
    if not isinstance(message, Mapping):
        raise bad(path, "must be an object")
    given = message.get("role")
    if not isinstance(given, str) or given not in ROLES:
        raise bad(f"{path}.role", f"must be one of {', '.join(ROLES)}")
    role = ROLES[given]
    texts, reasoning = text_parts(message.get("content"), f"{path}.content")
    out: Message = {"role": role}
    if role == "assistant":
        extra = _assistant(message, reasoning, path)
        if not texts and not extra:
            if "content" not in message:
                raise bad(f"{path}.content", "is required (or tool_calls)")
            texts = [""]
        if texts:
            out["content"] = _content(texts)
        return {**out, **extra}
    if message.get("content") is None:
        raise bad(f"{path}.content", "is required")
    if role == "system" and noise:
        texts = [normalise_system(text) for text in texts]
    out["content"] = _content(texts) if texts else ""
    if role == "tool":
        if message.get("tool_call_id") is not None:
            out["tool_call_id"] = _string(message["tool_call_id"], f"{path}.tool_call_id")
        if message.get("name") is not None:
            out["name"] = _string(message["name"], f"{path}.name")
    return out


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else "\n\n".join(part["text"] for part in content)


def _merge_head(messages: list[Message]) -> list[Message]:
    """Several system messages at the head as one: most templates know a single one."""
    n = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    if n < 2:
        return messages
    head = {"role": "system", "content": "\n\n".join(_plain(m["content"]) for m in messages[:n])}
    return [head, *messages[n:]]


def normalise(messages: Any, *, noise: bool = True, limit: int = 20_000) -> list[Message]:
    """Messages ready for a template.  Raises RequestError with the path of what is wrong."""
    if not isinstance(messages, list):
        raise bad("messages", "must be a list of messages")
    if not messages:
        raise bad("messages", "must hold at least one message")
    if len(messages) > limit:
        raise bad("messages", f"holds {len(messages)} messages, at most {limit} are taken")
    return _merge_head([_message(m, f"messages[{i}]", noise=noise) for i, m in enumerate(messages)])


def late_system_as_user(messages: Sequence[Message]) -> list[Message]:
    """For templates that refuse a system message after the first place: the same words, from the user."""
    return [{**m, "role": "user"} if i and m["role"] == "system" else m for i, m in enumerate(messages)]


def with_fallback(messages: list[Message], render: Callable[[list[Message]], T]) -> T:
    """Render as asked; once more with late system messages reshaped if the template refuses.

    The first attempt decides per conversation, not per turn: a conversation without a late system
    message renders the same either way, so one that gets its first one later keeps its prefix.
    """
    try:
        return render(messages)
    except RequestError:
        if not any(m["role"] == "system" for m in messages[1:]):
            raise
        return render(late_system_as_user(messages))
