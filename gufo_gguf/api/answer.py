"""An answer: whole, or while it is being written; to a thread or to a coroutine.

One AnswerStream serves both: ``for`` and ``async for`` give pieces of text, ``deltas`` and ``adeltas``
also reasoning and tool calls.  It is read once.  Leaving a loop early cancels the generation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from gufo_gguf.backend.message_parser import ChatMessage, MessageDelta, MessageParser, ToolCall
from gufo_gguf.cache.types import MissReason, RequestReport, ReuseSource, Tokens
from gufo_gguf.core.errors import GufoError
from gufo_gguf.engine.stream import Stream
from gufo_gguf.engine.types import Event, Finished, FinishReason, TextDelta, Timings, TokenLogprob, as_tokens


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts in tokens, times in milliseconds."""

    prompt_tokens: int
    completion_tokens: int
    timings: Timings
    """llama-server's figures; cache_n + prompt_n = prompt_tokens."""
    cache: RequestReport
    """Everything the cache did for this request."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not evaluated."""
        return self.timings.cache_n

    @property
    def reuse_source(self) -> ReuseSource:
        """Where they came from: none, live, ram or disk."""
        return self.cache.reuse_source

    @property
    def miss_reason(self) -> MissReason | None:
        """Why nothing was reused; None when something was."""
        return self.cache.miss_reason


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    """The message's content; of a completion, everything."""
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    tokens: Tokens
    """Generated token ids as a read-only int32 array, without the token that ended the answer."""
    prompt_tokens: Tokens
    """What was evaluated or reused before them."""
    finish_reason: FinishReason
    stop_text: str | None
    """The stop string that ended it, if one did."""
    logprobs: tuple[TokenLogprob, ...]
    usage: Usage

    def __str__(self) -> str:
        return self.text

    @property
    def message(self) -> dict[str, object]:
        """As OpenAI's assistant message, to be appended to the history."""
        message: dict[str, object] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class AnswerStream:
    """Made by ``Engine.stream`` and ``Conversation.stream``.  The answer is there once it was read to its end."""

    def __init__(
        self,
        stream: Stream,
        prompt_tokens: Tokens,
        parser: MessageParser | None,
        done: Callable[[Answer], None] = lambda answer: None,
    ) -> None:
        self._stream = stream
        self._prompt_tokens = prompt_tokens
        self._parser = parser
        self._done = done
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._answer: Answer | None = None
        self._taken = False

    @property
    def answer(self) -> Answer:
        """Raises GufoError before the end."""
        if self._answer is None:
            raise GufoError("the answer is not complete: read the stream to its end first")
        return self._answer

    def cancel(self) -> None:
        """Stop generating; idempotent.  What is there already becomes the answer."""
        self._stream.cancel()

    # -- threads ---------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[str]:
        """Pieces of the content, complete UTF-8."""
        for delta in self.deltas():
            if delta.content:
                yield delta.content

    def deltas(self) -> Iterator[MessageDelta]:
        """Content, reasoning and tool calls in the order in which they are written."""
        self._take()
        try:
            for event in self._stream:
                yield from self._feed(event)
        finally:
            self._leave()

    def result(self) -> Answer:
        """Read the rest; the whole answer."""
        if self._answer is None:
            for _ in self.deltas():
                pass
        return self.answer

    # -- coroutines ------------------------------------------------------------------------------
    async def __aiter__(self) -> AsyncIterator[str]:
        async for delta in self.adeltas():
            if delta.content:
                yield delta.content

    async def adeltas(self) -> AsyncIterator[MessageDelta]:
        """As ``deltas``."""
        self._take()
        try:
            async for event in self._stream:
                for delta in self._feed(event):
                    yield delta
        finally:
            self._leave()

    async def aresult(self) -> Answer:
        """As ``result``."""
        if self._answer is None:
            async for _ in self.adeltas():
                pass
        return self.answer

    # -- parts -----------------------------------------------------------------------------------
    def _take(self) -> None:
        if self._taken:
            raise GufoError("an answer can be read once; `answer` keeps the whole of it")
        self._taken = True

    def _leave(self) -> None:
        if self._answer is None:
            self._stream.cancel()
        if self._parser is not None:
            self._parser.close()

    def _feed(self, event: Event) -> list[MessageDelta]:
        if isinstance(event, TextDelta):
            self._tokens.extend(event.tokens)
            self._logprobs.extend(event.logprobs)
            if self._parser is not None:
                return self._parser.feed(event.text) if event.text else []
            self._text.append(event.text)
            return [MessageDelta(event.text)] if event.text else []
        if isinstance(event, Finished):
            return self._finish(event)
        return []

    def _finish(self, event: Finished) -> list[MessageDelta]:
        if event.error is not None:
            raise event.error
        rest: list[MessageDelta] = []
        message = ChatMessage("".join(self._text), "", (), False)
        if self._parser is not None:
            rest = self._parser.feed("", final=True)
            message = self._parser.message
        self._answer = Answer(
            text=message.content,
            reasoning=message.reasoning_content,
            tool_calls=message.tool_calls,
            tokens=as_tokens(self._tokens),
            prompt_tokens=self._prompt_tokens,
            finish_reason=event.reason,
            stop_text=event.stop_text,
            logprobs=tuple(self._logprobs),
            usage=Usage(event.n_prompt, event.n_generated, event.timings, event.report),
        )
        self._done(self._answer)
        return rest
