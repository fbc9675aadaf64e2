"""The answer of /v1/messages, whole and as a stream of named events.

    message_start, (content_block_start, content_block_delta*, content_block_stop)*, message_delta, message_stop

Blocks follow the text: thinking, text and tool use in the order the model wrote them, one open at a
time.  ``message_start`` waits for the first word of the engine, which says how much of the prompt
was cached: clients show that number and never look again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gufo_gguf.backend.message_parser import ChatMessage, MessageDelta
from gufo_gguf.engine.types import Event, Finished, FinishReason, PrefillProgress
from gufo_gguf.server.chat.answer import Answer
from gufo_gguf.server.errors import Problem, anthropic_body
from gufo_gguf.server.usage import Usage, report_dict
from gufo_gguf.server.wire import named_frame


@dataclass(frozen=True, slots=True)
class AnthropicStyle:
    id: str
    model: str
    n_prompt: int
    stop_sequences: tuple[str, ...]


def tool_input(arguments: str) -> dict[str, Any]:
    """Arguments as the object Anthropic's clients expect; text that is none stays visible."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def content_blocks(message: ChatMessage) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning_content:
        # nothing here signs thoughts; clients want the field
        blocks.append({"type": "thinking", "thinking": message.reasoning_content, "signature": ""})
    if message.content or not (message.tool_calls or blocks):
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": tool_input(call.arguments)})
    return blocks


def stop_reason(style: AnthropicStyle, answer: Answer) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)."""
    finished = answer.finished
    assert finished is not None
    if finished.reason is FinishReason.LENGTH:
        return "max_tokens", None
    if finished.stop_text in style.stop_sequences:
        return "stop_sequence", finished.stop_text
    return ("tool_use" if answer.called_tools else "end_turn"), None


def whole_message(style: AnthropicStyle, answer: Answer) -> dict[str, Any]:
    assert answer.finished is not None
    reason, sequence = stop_reason(style, answer)
    return {
        "id": style.id,
        "type": "message",
        "role": "assistant",
        "model": style.model,
        "content": content_blocks(answer.message),
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": {**Usage([answer.finished]).anthropic(), "gufo": report_dict(answer.finished.report)},
    }


class AnthropicWriter:
    """See ``sse.FrameWriter``; one answer per request."""

    def __init__(self, style: AnthropicStyle, answer: Answer) -> None:
        self._style = style
        self._answer = answer
        self._begun = False
        self._index = -1
        self._open: str | None = None
        """What block is open: thinking, text, or tool:N."""

    def start(self) -> bytes:
        return b""

    def event(self, index: int, event: Event) -> bytes:
        frames = self._begin(event)
        for delta in self._answer.feed(event):
            frames += self._delta(delta)
        if isinstance(event, Finished):
            frames += self._finish(event)
        return frames

    def _begin(self, event: Event) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        cached = 0
        if isinstance(event, PrefillProgress):
            cached = event.n_cached
        elif isinstance(event, Finished):
            cached = event.timings.cache_n
        message: dict[str, Any] = {
            "id": self._style.id,
            "type": "message",
            "role": "assistant",
            "model": self._style.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": self._style.n_prompt - cached,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": 0,
            },
        }
        return named_frame("message_start", {"type": "message_start", "message": message})

    def _delta(self, delta: MessageDelta) -> bytes:
        if delta.tool_index is not None:
            block = {"type": "tool_use", "id": delta.tool_id, "name": delta.tool_name, "input": {}}
            frames = self._block(f"tool:{delta.tool_index}", block)
            return frames + self._change({"type": "input_json_delta", "partial_json": delta.arguments}, delta.arguments)
        if delta.reasoning_content:
            frames = self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return frames + self._change({"type": "thinking_delta", "thinking": delta.reasoning_content}, "x")
        frames = self._block("text", {"type": "text", "text": ""})
        return frames + self._change({"type": "text_delta", "text": delta.content}, delta.content)

    def _change(self, change: dict[str, Any], content: str) -> bytes:
        if not content:
            return b""
        return named_frame(
            "content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": change}
        )

    def _block(self, name: str, block: dict[str, Any]) -> bytes:
        if self._open == name:
            return b""
        frames = self._close()
        self._open = name
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return frames + named_frame("content_block_start", start)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        frames = b""
        if self._open == "thinking":
            frames = self._change({"type": "signature_delta", "signature": ""}, "x")
        self._open = None
        return frames + named_frame("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _finish(self, event: Finished) -> bytes:
        frames = b""
        if self._index < 0:  # an answer without a word still has one block
            frames = self._block("text", {"type": "text", "text": ""})
        frames += self._close()
        reason, sequence = stop_reason(self._style, self._answer)
        usage = {**Usage([event]).anthropic(), "gufo": report_dict(event.report)}
        change = {"stop_reason": reason, "stop_sequence": sequence}
        return frames + named_frame("message_delta", {"type": "message_delta", "delta": change, "usage": usage})

    def end(self) -> bytes:
        return named_frame("message_stop", {"type": "message_stop"})

    def keepalive(self) -> bytes:
        return named_frame("ping", {"type": "ping"})

    def error(self, problem: Problem) -> bytes:
        return named_frame("error", anthropic_body(problem))

    def close(self) -> None:
        self._answer.close()
