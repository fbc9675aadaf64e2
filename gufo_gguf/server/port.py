"""What the server needs of an engine, as protocols.

``engine.Engine`` is one; the tests bring a scripted one.  The server knows tokens, text and events,
never a context, a slot's state or the cache's tables.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from gufo_gguf.backend.base import BackendInfo
from gufo_gguf.backend.chat import ChatInput, Rendered, TemplateInfo
from gufo_gguf.backend.message_parser import ChatMessage, MessageDelta
from gufo_gguf.cache.types import Tokens
from gufo_gguf.engine.prefetch import Prefetched
from gufo_gguf.engine.types import Event, GenerateRequest


class StreamPort(Protocol):
    @property
    def request_id(self) -> str: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def cancel(self) -> None: ...


class ParserPort(Protocol):
    """One answer's text to its message; see ``backend.chat.MessageParser``."""

    def feed(self, text: str, *, final: bool = False) -> list[MessageDelta]: ...

    @property
    def message(self) -> ChatMessage: ...

    def close(self) -> None: ...


class ChatPort(Protocol):
    @property
    def info(self) -> TemplateInfo: ...

    def render(self, chat: ChatInput, *, add_generation_prompt: bool = True) -> Rendered: ...

    def stable_boundaries(
        self, chat: ChatInput, rendered: Rendered, prompt_tokens: Tokens, tokenize: Callable[[str], Tokens]
    ) -> tuple[int, ...]: ...

    def system_end(
        self, chat: ChatInput, rendered: Rendered, prompt_tokens: Tokens, tokenize: Callable[[str], Tokens]
    ) -> int: ...

    def schema_grammar(self, schema: dict[str, Any]) -> str:
        """A JSON schema as a grammar; RequestError says what cannot be expressed."""
        ...

    def parser(self, rendered: Rendered) -> ParserPort:
        """A parser for the answer to a rendered prompt; the caller closes it."""
        ...


class VocabPort(Protocol):
    @property
    def n_vocab(self) -> int: ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    def piece(self, token: int) -> bytes: ...

    def detokenize(self, tokens: Any) -> bytes: ...

    def is_eog(self, token: int) -> bool: ...


class EnginePort(Protocol):
    """All methods may be called from any thread; those that ask the owner thread may block."""

    @property
    def info(self) -> BackendInfo: ...

    @property
    def model_id(self) -> str: ...

    @property
    def chat(self) -> ChatPort: ...

    @property
    def vocab(self) -> VocabPort: ...

    def submit(self, request: GenerateRequest) -> StreamPort: ...

    def prefetch(self, request: GenerateRequest) -> Prefetched:
        """Disk to RAM for a prompt; may raise Overloaded."""
        ...

    def cache_status(self) -> dict[str, Any]: ...

    def cache_events(self, since: int = 0, limit: int = 1000) -> list[dict[str, Any]]: ...

    def check(self) -> list[str]:
        """What does not add up in the cache's books; empty = sound."""
        ...

    def slots(self) -> list[dict[str, Any]]: ...

    def counters(self) -> dict[str, float]: ...

    def close(self, drain_s: float = 5.0) -> None: ...
