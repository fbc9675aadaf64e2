"""The answer of /v1/chat/completions, whole and as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gufo_gguf.backend.message_parser import ChatMessage, MessageDelta
from gufo_gguf.engine.types import Event, Finished, PrefillProgress
from gufo_gguf.server.chat.answer import Answer
from gufo_gguf.server.completion_out import Envelope, progress_dict
from gufo_gguf.server.errors import Problem, openai_body
from gufo_gguf.server.logprobs import chat_logprobs
from gufo_gguf.server.usage import LiveTimings, Usage
from gufo_gguf.server.wire import DONE_FRAME, data_frame


@dataclass(frozen=True, slots=True)
class ChatStyle:
    envelope: Envelope
    n_logprobs: int
    """-1 = none."""
    post_sampling: bool = False
    """Chances after the sampler's chain, in llama-server's form."""
    include_usage: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    verbose_prompt: str | None = None
    """Shown as ``__verbose.prompt`` when asked for."""


def message_dict(message: ChatMessage) -> dict[str, Any]:
    """``choices[].message``.  Never an empty ``tool_calls``: clients take its presence for a call."""
    out: dict[str, Any] = {"role": "assistant", "content": message.content or (None if message.tool_calls else "")}
    if message.reasoning_content:
        out["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return out


def finish_reason(answer: Answer) -> str:
    assert answer.finished is not None
    if answer.stopped and answer.called_tools:
        return "tool_calls"
    return str(answer.finished.reason)


def usage_of(answers: Sequence[Answer]) -> Usage:
    """Of the choices of one request, all finished."""
    finished = [a.finished for a in answers if a.finished is not None]
    return Usage(finished, len(answers), sum(a.reasoning_tokens for a in answers))


def whole_chat(style: ChatStyle, answers: Sequence[Answer]) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for index, answer in enumerate(answers):
        choice: dict[str, Any] = {
            "index": index,
            "message": message_dict(answer.message),
            "finish_reason": finish_reason(answer),
            "logprobs": chat_logprobs(answer.take_logprobs(), style.n_logprobs, post_sampling=style.post_sampling)
            if style.n_logprobs >= 0
            else None,
        }
        choices.append(choice)
    usage = usage_of(answers)
    out = {
        **style.envelope.wrap("chat.completion", choices),
        "usage": usage.openai(),
        "timings": usage.timings,
    }
    if style.verbose_prompt is not None:
        out["__verbose"] = {"prompt": style.verbose_prompt}
    return out


def delta_dict(delta: MessageDelta) -> dict[str, Any]:
    """``choices[].delta``; a tool call's first delta carries its id, type and name."""
    if delta.tool_index is None:
        if delta.reasoning_content:
            return {"reasoning_content": delta.reasoning_content}
        return {"content": delta.content}
    call: dict[str, Any] = {"index": delta.tool_index}
    function: dict[str, Any] = {"arguments": delta.arguments}
    if delta.tool_name:
        call |= {"id": delta.tool_id, "type": "function"}
        function = {"name": delta.tool_name, "arguments": delta.arguments}
    return {"tool_calls": [{**call, "function": function}]}


class ChatWriter:
    """See ``sse.FrameWriter``."""

    def __init__(self, style: ChatStyle, answers: Sequence[Answer]) -> None:
        self._style = style
        self._answers = answers
        self._live = [LiveTimings() for _ in answers] if style.timings_per_token else []

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": reason}
        if "logprobs" in more:
            choice["logprobs"] = more.pop("logprobs")
        return data_frame({**self._style.envelope.wrap("chat.completion.chunk", [choice]), **more})

    def start(self) -> bytes:
        return b"".join(self._chunk(i, {"role": "assistant", "content": None}) for i in range(len(self._answers)))

    def event(self, index: int, event: Event) -> bytes:
        more: dict[str, Any] = {"timings": self._live[index].see(event)} if self._live else {}
        if isinstance(event, PrefillProgress):
            if not self._style.return_progress:
                return b""
            return self._chunk(index, {}, prompt_progress=progress_dict(event), **more)
        answer = self._answers[index]
        frames = self._deltas(index, answer, answer.feed(event), more)
        if isinstance(event, Finished):
            frames += self._last(index, answer)
        return frames

    def _deltas(self, index: int, answer: Answer, deltas: list[MessageDelta], more: dict[str, Any]) -> bytes:
        parts = [delta_dict(delta) for delta in deltas]
        style = self._style
        if style.n_logprobs < 0:
            return b"".join(self._chunk(index, part, **more) for part in parts)
        if not parts:
            if answer.finished is None or not answer.logprobs:
                return b""
            parts = [{"content": ""}]  # tokens without text of their own still have probabilities
        shown = chat_logprobs(answer.take_logprobs(), style.n_logprobs, post_sampling=style.post_sampling)
        head = b"".join(self._chunk(index, part) for part in parts[:-1])
        return head + self._chunk(index, parts[-1], logprobs=shown, **more)

    def _last(self, index: int, answer: Answer) -> bytes:
        more: dict[str, Any] = {}
        if not self._style.include_usage and all(a.finished for a in self._answers):
            more["timings"] = self._usage().timings
        if self._style.verbose_prompt is not None:
            more["__verbose"] = {"prompt": self._style.verbose_prompt}
        return self._chunk(index, {}, finish_reason(answer), **more)

    def _usage(self) -> Usage:
        return usage_of(self._answers)

    def end(self) -> bytes:
        if not self._style.include_usage:
            return DONE_FRAME
        usage = self._usage()
        last = self._style.envelope.wrap("chat.completion.chunk", [])
        return data_frame({**last, "usage": usage.openai(), "timings": usage.timings}) + DONE_FRAME

    def keepalive(self) -> bytes:
        return self._chunk(0, {})

    def error(self, problem: Problem) -> bytes:
        return data_frame(openai_body(problem)) + DONE_FRAME

    def close(self) -> None:
        for answer in self._answers:
            answer.close()
