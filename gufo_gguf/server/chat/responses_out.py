"""The answer of /v1/responses, whole and as its stream of numbered events.

One output item is open at a time (reasoning, message, or a function call); it is announced, filled by
deltas, and closed with its whole content, in the order the model wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gufo_gguf.backend.message_parser import MessageDelta
from gufo_gguf.engine.types import Event, Finished, FinishReason, PrefillProgress
from gufo_gguf.server.chat.answer import Answer
from gufo_gguf.server.completion_out import progress_dict
from gufo_gguf.server.errors import Problem
from gufo_gguf.server.ids import new_id
from gufo_gguf.server.logprobs import chat_logprobs
from gufo_gguf.server.usage import LiveTimings, Usage
from gufo_gguf.server.wire import named_frame

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResponsesStyle:
    id: str
    model: str
    created: int
    asked: dict[str, Any]
    """Fields of the request that a response repeats."""
    n_logprobs: int = -1
    return_progress: bool = False
    timings_per_token: bool = False


def response_object(
    style: ResponsesStyle, status: str, output: list[Item], usage: Usage | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "id": style.id,
        "object": "response",
        "created_at": style.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": style.model,
        "output": output,
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
        **style.asked,
        "usage": None if usage is None else usage.responses(),
        **more,
    }


def reasoning_item(text: str, status: str = "completed", item_id: str = "") -> Item:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": item_id or new_id("rs_"), "type": "reasoning", "summary": [], "content": content, "status": status}


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def message_item(parts: list[dict[str, Any]], status: str = "completed", item_id: str = "") -> Item:
    return {"id": item_id or new_id("msg_"), "type": "message", "role": "assistant", "content": parts, "status": status}


def call_item(call_id: str, name: str, arguments: str, status: str = "completed", item_id: str = "") -> Item:
    return {
        "id": item_id or new_id("fc_"),
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def _ending(finished: Finished) -> tuple[str, dict[str, Any]]:
    """(status, more fields)."""
    if finished.reason is FinishReason.LENGTH:
        return "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}
    return "completed", {}


def whole_response(style: ResponsesStyle, answer: Answer) -> dict[str, Any]:
    assert answer.finished is not None
    message = answer.message
    output: list[Item] = []
    if message.reasoning_content:
        output.append(reasoning_item(message.reasoning_content))
    if message.content or not message.tool_calls:
        logprobs = chat_logprobs(answer.take_logprobs(), style.n_logprobs)["content"] if style.n_logprobs >= 0 else []
        output.append(message_item([text_part(message.content, logprobs)]))
    output += [call_item(call.id, call.name, call.arguments) for call in message.tool_calls]
    usage = Usage([answer.finished], reasoning_tokens=answer.reasoning_tokens)
    status, more = _ending(answer.finished)
    return {**response_object(style, status, output, usage, **more), "timings": usage.timings}


@dataclass(slots=True)
class _Open:
    """The output item that is being written."""

    name: str
    item: Item
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class ResponsesWriter:
    """See ``sse.FrameWriter``; one answer per request."""

    def __init__(self, style: ResponsesStyle, answer: Answer) -> None:
        self._style = style
        self._answer = answer
        self._number = 0
        self._output: list[Item] = []
        self._open: _Open | None = None
        self._live = LiveTimings() if style.timings_per_token else None

    def _frame(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_frame(kind, event)

    def _in_progress(self, **more: Any) -> bytes:
        response = response_object(self._style, "in_progress", [])
        return self._frame("response.in_progress", response=response, **more)

    def start(self) -> bytes:
        response = response_object(self._style, "in_progress", [])
        return self._frame("response.created", response=response) + self._in_progress()

    def event(self, index: int, event: Event) -> bytes:
        more: dict[str, Any] = {"timings": self._live.see(event)} if self._live else {}
        if isinstance(event, PrefillProgress):
            if not self._style.return_progress:
                return b""
            return self._in_progress(prompt_progress=progress_dict(event), **more)
        deltas = self._answer.feed(event)
        frames = b"".join(self._delta(delta, more) for delta in deltas)
        if isinstance(event, Finished):
            frames += self._finish(event)
        return frames

    # -- items -----------------------------------------------------------------------------------
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open.item["id"], "output_index": len(self._output)}

    def _begin(self, name: str, make: Callable[[], Item]) -> bytes:
        if self._open is not None and self._open.name == name:
            return b""
        frames = self._close()
        self._open = _Open(name, make())
        frames += self._frame("response.output_item.added", output_index=len(self._output), item=self._open.item)
        if name == "message":
            frames += self._frame(
                "response.content_part.added", **self._place(), content_index=0, part=text_part("", [])
            )
        return frames

    def _delta(self, delta: MessageDelta, more: dict[str, Any]) -> bytes:
        if delta.tool_index is not None:
            frames = self._begin(
                f"call:{delta.tool_index}", lambda: call_item(delta.tool_id, delta.tool_name, "", "in_progress")
            )
            return frames + self._add("response.function_call_arguments.delta", delta.arguments, more)
        if delta.reasoning_content:
            frames = self._begin("reasoning", lambda: reasoning_item("", "in_progress"))
            return frames + self._add(
                "response.reasoning_text.delta", delta.reasoning_content, {"content_index": 0, **more}
            )
        frames = self._begin("message", lambda: message_item([], "in_progress"))
        assert self._open is not None
        shown: list[dict[str, Any]] = []
        if self._style.n_logprobs >= 0:
            shown = chat_logprobs(self._answer.take_logprobs(), self._style.n_logprobs)["content"]
            self._open.logprobs += shown
        return frames + self._add(
            "response.output_text.delta", delta.content, {"content_index": 0, "logprobs": shown, **more}
        )

    def _add(self, kind: str, text: str, more: dict[str, Any]) -> bytes:
        assert self._open is not None
        self._open.text += text
        return self._frame(kind, **self._place(), delta=text, **more) if text else b""

    def _close(self) -> bytes:
        """The open item's closing events; it joins the output."""
        if self._open is None:
            return b""
        opened, place = self._open, self._place()
        item_id, text = opened.item["id"], opened.text
        if opened.name == "reasoning":
            item = reasoning_item(text, item_id=item_id)
            frames = self._frame("response.reasoning_text.done", **place, content_index=0, text=text)
        elif opened.name == "message":
            part = text_part(text, opened.logprobs)
            item = message_item([part], item_id=item_id)
            frames = self._frame(
                "response.output_text.done", **place, content_index=0, text=text, logprobs=opened.logprobs
            )
            frames += self._frame("response.content_part.done", **place, content_index=0, part=part)
        else:
            name = opened.item["name"]
            item = call_item(opened.item["call_id"], name, text, item_id=item_id)
            frames = self._frame("response.function_call_arguments.done", **place, name=name, arguments=text)
        frames += self._frame("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None
        return frames

    # -- the end ---------------------------------------------------------------------------------
    def _finish(self, event: Finished) -> bytes:
        frames = b""
        if self._open is None and not self._output:  # an answer without a word still is a message
            frames = self._begin("message", lambda: message_item([], "in_progress"))
        frames += self._close()
        usage = Usage([event], reasoning_tokens=self._answer.reasoning_tokens)
        status, more = _ending(event)
        response = response_object(self._style, status, self._output, usage, **more)
        return frames + self._frame(f"response.{status}", response=response, timings=usage.timings)

    def keepalive(self) -> bytes:
        return self._in_progress()

    def error(self, problem: Problem) -> bytes:
        error = {"code": problem.code or "server_error", "message": problem.message}
        response = response_object(self._style, "failed", self._output, error=error)
        return self._frame("response.failed", response=response)

    def end(self) -> bytes:
        return b""

    def close(self) -> None:
        self._answer.close()
