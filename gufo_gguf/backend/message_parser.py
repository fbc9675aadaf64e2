"""A model's answer as a message, while it grows: content, reasoning and tool calls.

The parser of each template's output format is llama.cpp's (``native/src/chat_parser.cpp``); this adds
the ids of tool calls whose format has none.
"""

from __future__ import annotations

import ctypes as ct
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gufo_gguf.backend import cabi

if TYPE_CHECKING:
    from gufo_gguf.backend.chat import Rendered


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON, or its beginning while it streams."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    content: str
    reasoning_content: str
    tool_calls: tuple[ToolCall, ...]
    unparsed: bool
    """The text was not in the template's output format, so (some of) it came back as content."""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """One of the three; a tool call's first delta carries id and name, later ones arguments only."""

    content: str = ""
    reasoning_content: str = ""
    tool_index: int | None = None
    tool_id: str = ""
    tool_name: str = ""
    arguments: str = ""


def new_tool_call_id() -> str:
    return "call_" + secrets.token_hex(12)


class MessageParser:
    """An answer's text as a message, piece by piece.

    The concatenated deltas are the final message; nothing sent is taken back.  ``feed`` never fails
    on what a model writes: text out of format comes back as content.
    """

    def __init__(
        self, lib: ct.CDLL, rendered: Rendered, *, echo: bool = False, new_id: Callable[[], str] = new_tool_call_id
    ) -> None:
        """``echo``: a continued message's beginning is part of the result.  ``new_id`` names tool
        calls for which the format has no ids."""
        self._lib = cabi.bind(lib)
        self._new_id = new_id
        self._ids: list[str] = []
        params = {
            "format": rendered.format,
            "generation_prompt": rendered.generation_prompt,
            "parser": rendered.parser,
            "is_continuation": rendered.is_continuation,
            "echo": echo,
            "thinking_end_tags": rendered.thinking_end_tags,
        }
        self._handle: int | None = cabi.made(lib, lib.gufo_chat_parser_new(cabi.to_json(params)))

    def _id(self, index: int, given: str) -> str:
        while len(self._ids) <= index:
            self._ids.append("")
        if not self._ids[index]:
            self._ids[index] = given or self._new_id()
        return self._ids[index]

    def feed(self, text: str, *, final: bool = False) -> list[MessageDelta]:
        """Append text (complete UTF-8); ``final`` once, with the last piece."""
        raw = text.encode("utf-8", "replace")
        out: list[MessageDelta] = []
        for delta in cabi.call_for_json(
            self._lib, self._lib.gufo_chat_parser_feed, self._handle, raw, len(raw), int(final)
        ):
            call = delta.get("tool_call")
            if call is None:
                out.append(MessageDelta(delta.get("content", ""), delta.get("reasoning_content", "")))
                continue
            index = call["index"]
            tool_id = self._id(index, call["id"]) if call["name"] else ""
            out.append(
                MessageDelta(tool_index=index, tool_id=tool_id, tool_name=call["name"], arguments=call["arguments"])
            )
        return out

    @property
    def message(self) -> ChatMessage:
        """The whole so far."""
        raw = cabi.call_for_json(self._lib, self._lib.gufo_chat_parser_message, self._handle)
        calls = tuple(
            ToolCall(self._id(i, call["id"]), call["name"], call["arguments"])
            for i, call in enumerate(raw["tool_calls"])
        )
        return ChatMessage(raw["content"], raw["reasoning_content"], calls, raw["unparsed"])

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle:
            self._lib.gufo_chat_parser_free(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def parse_message(lib: ct.CDLL, rendered: Rendered, text: str, *, partial: bool = False) -> ChatMessage:
    """The message of a whole text, or of its beginning."""
    parser = MessageParser(lib, rendered)
    try:
        parser.feed(text, final=not partial)
        return parser.message
    finally:
        parser.close()
