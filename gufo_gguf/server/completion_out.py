"""The answer of /v1/completions, whole and as a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gufo_gguf.engine.types import Event, Finished, PrefillProgress, TextDelta, TokenLogprob
from gufo_gguf.server.errors import Problem, openai_body
from gufo_gguf.server.ids import new_id
from gufo_gguf.server.logprobs import completion_logprobs
from gufo_gguf.server.usage import LiveTimings, Usage
from gufo_gguf.server.wire import DONE_FRAME, data_frame


def progress_dict(event: PrefillProgress) -> dict[str, Any]:
    """``prompt_progress`` as llama-server names it."""
    return {
        "total": event.n_total,
        "cache": event.n_cached,
        "processed": event.n_processed,
        "time_ms": round(event.time_ms, 3),
    }


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every object of one answer carries."""

    id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def new(cls, prefix: str, model: str, fingerprint: str) -> Envelope:
        return cls(new_id(prefix), int(time.time()), model, fingerprint)

    def wrap(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(choices),
        }


@dataclass(frozen=True, slots=True)
class CompletionStyle:
    envelope: Envelope
    n: int
    n_logprobs: int
    """-1 = none."""
    echo: tuple[str, ...] = ()
    """Texts to put before each choice; empty = none."""
    post_sampling: bool = False
    include_usage: bool = False
    return_progress: bool = False
    timings_per_token: bool = False


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}


def whole_completion(style: CompletionStyle, events: Sequence[Sequence[Event]]) -> dict[str, Any]:
    """``events`` of each choice, prompt-major; the last of each is ``Finished``."""
    choices: list[dict[str, Any]] = []
    finished: list[Finished] = []
    for index, stream in enumerate(events):
        text = style.echo[index] if style.echo else ""
        tokens: list[TokenLogprob] = []
        for event in stream:
            if isinstance(event, TextDelta):
                text += event.text
                tokens.extend(event.logprobs)
            elif isinstance(event, Finished):
                finished.append(event)
        logprobs = (
            completion_logprobs(tokens, style.n_logprobs, post_sampling=style.post_sampling)
            if style.n_logprobs >= 0
            else None
        )
        choices.append(_choice(index, text, logprobs, str(finished[-1].reason)))
    usage = Usage(finished, style.n)
    return {
        **style.envelope.wrap("text_completion", choices),
        "usage": usage.openai(),
        "timings": usage.timings,
    }


class CompletionWriter:
    """See ``sse.FrameWriter``."""

    def __init__(self, style: CompletionStyle, n_streams: int) -> None:
        self._style = style
        self._finished: list[Finished | None] = [None] * n_streams
        self._live = [LiveTimings() for _ in range(n_streams)] if style.timings_per_token else []
        self._offsets = [len(text) for text in style.echo] or [0] * n_streams

    def _chunk(self, choices: Sequence[dict[str, Any]], **more: Any) -> bytes:
        return data_frame({**self._style.envelope.wrap("text_completion", choices), **more})

    def start(self) -> bytes:
        return b"".join(self._chunk([_choice(i, text, None, None)]) for i, text in enumerate(self._style.echo) if text)

    def event(self, index: int, event: Event) -> bytes:
        style = self._style
        more: dict[str, Any] = {"timings": self._live[index].see(event)} if self._live else {}
        if isinstance(event, TextDelta):
            logprobs = None
            if style.n_logprobs >= 0:
                logprobs = completion_logprobs(
                    event.logprobs, style.n_logprobs, self._offsets[index], post_sampling=style.post_sampling
                )
                self._offsets[index] += len(event.text)
            elif not event.text:
                return b""
            return self._chunk([_choice(index, event.text, logprobs, None)], **more)
        if isinstance(event, PrefillProgress):
            if not style.return_progress:
                return b""
            return self._chunk([_choice(index, "", None, None)], prompt_progress=progress_dict(event), **more)
        self._finished[index] = event
        return self._last(index, event)

    def _last(self, index: int, event: Finished) -> bytes:
        more: dict[str, Any] = {}
        if all(self._finished) and not self._style.include_usage:
            more["timings"] = self._usage().timings
        return self._chunk([_choice(index, "", None, str(event.reason))], **more)

    def _usage(self) -> Usage:
        return Usage([f for f in self._finished if f is not None], self._style.n)

    def end(self) -> bytes:
        if not self._style.include_usage:
            return DONE_FRAME
        usage = self._usage()
        return self._chunk([], usage=usage.openai(), timings=usage.timings) + DONE_FRAME

    def keepalive(self) -> bytes:
        return self._chunk([_choice(0, "", None, None)])

    def error(self, problem: Problem) -> bytes:
        return data_frame(openai_body(problem)) + DONE_FRAME

    def close(self) -> None:
        pass
