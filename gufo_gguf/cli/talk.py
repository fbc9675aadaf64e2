"""Who ``gufo chat`` talks to: a model in this process, or a server; the same few calls for both.

A *place* is where a conversation stood before a turn, so that a turn can be taken back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gufo_gguf.cli.client import Client

if TYPE_CHECKING:
    from gufo_gguf.api import Answer, Conversation


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Figures:
    """What the line under an answer says; counts in tokens, times in milliseconds."""

    prompt_n: int
    cached_n: int
    source: str
    miss_reason: str | None
    restore_ms: float
    prompt_ms: float
    generated_n: int
    generated_ms: float
    captured: tuple[int, ...]


class Talker(Protocol):
    name: str

    def ask(self, text: str) -> Iterator[Piece]:
        """The answer, piece by piece; message and answer join the conversation at its end."""
        ...

    @property
    def figures(self) -> Figures | None:
        """Of the last answer that was read to its end; None where the other side gives none."""
        ...

    def place(self) -> object: ...

    def keep(self) -> tuple[object, str]:
        """A place whose state is kept where that is possible, and a word about it."""
        ...

    def go_back(self, place: object) -> None: ...

    def last_question(self) -> str | None: ...

    def cache(self) -> dict[str, Any]: ...


class LocalTalker:
    def __init__(self, conversation: Conversation, name: str) -> None:
        self.name = name
        self.figures: Figures | None = None
        self._conversation = conversation

    def ask(self, text: str) -> Iterator[Piece]:
        self.figures = None
        stream = self._conversation.stream(text)
        for delta in stream.deltas():
            if delta.reasoning_content:
                yield Piece(delta.reasoning_content, reasoning=True)
            if delta.content:
                yield Piece(delta.content)
        self.figures = figures_of(stream.answer)

    def place(self) -> object:
        return self._conversation.fork(keep=False)

    def keep(self) -> tuple[object, str]:
        made = self._conversation.checkpoint()
        cost = f", {made.evaluated_tokens:,} evaluated for it" if made.evaluated_tokens else ""
        return made, f"kept {made.boundary:,} of {len(made.tokens):,} tokens{cost}"

    def go_back(self, place: object) -> None:
        from gufo_gguf.api import Checkpoint, Conversation

        if isinstance(place, Checkpoint):
            self._conversation.restore(place)
        elif isinstance(place, Conversation):
            self._conversation = place.fork(keep=False)

    def last_question(self) -> str | None:
        return _last_question(self._conversation.messages)

    def cache(self) -> dict[str, Any]:
        return self._conversation.engine.cache_status()


class RemoteTalker:
    def __init__(self, client: Client, name: str, messages: list[dict[str, str]], options: dict[str, Any]) -> None:
        self.name = name
        self.figures: Figures | None = None
        self._client = client
        self._messages = messages
        self._options = options

    def ask(self, text: str) -> Iterator[Piece]:
        self.figures = None
        messages = [*self._messages, {"role": "user", "content": text}]
        body = {"model": self.name, "messages": messages, "stream": True, **self._options}
        body["stream_options"] = {"include_usage": True}
        content, reasoning = "", ""
        usage: dict[str, Any] = {}
        timings: dict[str, Any] = {}
        for event in self._client.stream("/v1/chat/completions", body):
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                if delta.get("reasoning_content"):
                    reasoning += delta["reasoning_content"]
                    yield Piece(delta["reasoning_content"], reasoning=True)
                if delta.get("content"):
                    content += delta["content"]
                    yield Piece(delta["content"])
            usage = event.get("usage") or usage
            timings = event.get("timings") or timings
        answer = {"role": "assistant", "content": content}
        if reasoning:
            answer["reasoning_content"] = reasoning
        self._messages = [*messages, answer]
        self.figures = figures_from(usage, timings)

    def place(self) -> object:
        return list(self._messages)

    def keep(self) -> tuple[object, str]:
        return self.place(), "remembered; what the server keeps of it is up to its cache"

    def go_back(self, place: object) -> None:
        assert isinstance(place, list)
        self._messages = list(place)

    def last_question(self) -> str | None:
        return _last_question(self._messages)

    def cache(self) -> dict[str, Any]:
        found: dict[str, Any] = self._client.get("/v1/cache")
        return found


def _last_question(messages: Any) -> str | None:
    return next((str(m["content"]) for m in reversed(messages) if m["role"] == "user"), None)


def figures_of(answer: Answer) -> Figures:
    usage, timings, report = answer.usage, answer.usage.timings, answer.usage.cache
    return Figures(
        prompt_n=usage.prompt_tokens,
        cached_n=timings.cache_n,
        source=str(report.reuse_source),
        miss_reason=None if report.miss_reason is None else str(report.miss_reason),
        restore_ms=report.restore_ms,
        prompt_ms=timings.prompt_ms,
        generated_n=timings.predicted_n,
        generated_ms=timings.predicted_ms,
        captured=tuple(boundary for boundary, _ in report.captured),
    )


def figures_from(usage: dict[str, Any], timings: dict[str, Any]) -> Figures | None:
    """From a server's own words; None when it says nothing."""
    if not usage:
        return None
    gufo = usage.get("gufo") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Figures(
        prompt_n=usage.get("prompt_tokens", 0),
        cached_n=details.get("cached_tokens") or 0,
        source=gufo.get("reuse_source") or "cache",
        miss_reason=gufo.get("miss_reason"),
        restore_ms=gufo.get("restore_ms") or 0.0,
        prompt_ms=timings.get("prompt_ms") or 0.0,
        generated_n=usage.get("completion_tokens", 0),
        generated_ms=timings.get("predicted_ms") or 0.0,
        captured=tuple(c["boundary"] for c in gufo.get("captured") or ()),
    )


def cache_line(f: Figures) -> str:
    """One line: what was reused and from where, what was computed, what was left for the next turn."""
    computed = f.prompt_n - f.cached_n
    parts = [f"{f.prompt_n:,} prompt tokens"]
    if f.cached_n:
        took = f" in {f.restore_ms:.0f} ms" if f.restore_ms >= 0.5 else ""
        parts.append(f"{f.cached_n:,} from {f.source}{took}")
    elif f.miss_reason:
        parts.append(f"none reused ({f.miss_reason.replace('_', ' ')})")
    parts.append(f"{computed:,} computed" + (f" in {_time(f.prompt_ms)}" if f.prompt_ms else ""))
    if f.captured:
        parts.append("kept at " + ", ".join(f"{b:,}" for b in f.captured))
    rate = f" at {1e3 * f.generated_n / f.generated_ms:.1f}/s" if f.generated_ms > 0 else ""
    parts.append(f"{f.generated_n:,} generated{rate}")
    return " · ".join(parts)


def _time(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1e3:.1f} s"
