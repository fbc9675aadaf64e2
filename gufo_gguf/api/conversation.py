"""A conversation by its exact tokens, with places to come back to.

Clients of the HTTP API send text, and the tokens of re-tokenised text need not be those that were
sampled.  A Conversation keeps the tokens, so that the next turn goes on behind them:

    turn 1   [ prompt )[ answer, as sampled )
    turn 2   [ same tokens                  )[ what the template puts after it: <|im_end|> user … )

That holds while the template prints the answer as it was written.  Where it does not (reasoning is
dropped, white space trimmed), the turn is tokenised anew and reuse ends at the stable boundary, as
over HTTP.  The tokens are a promise about *what* is evaluated; that the state for them is still
somewhere is the cache's business, and ``usage`` says whether it was.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from gufo_gguf.api.answer import Answer, AnswerStream
from gufo_gguf.api.options import ChatOptions, check_names
from gufo_gguf.backend.chat import Rendered
from gufo_gguf.cache.types import Tokens
from gufo_gguf.core.errors import RequestError
from gufo_gguf.engine.types import ROLES, FinishReason, GenerateRequest, as_tokens

if TYPE_CHECKING:
    from gufo_gguf.api.facade import Engine

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A place in a conversation.  Holds tokens, not state: it stays usable when the state was evicted."""

    messages: tuple[Message, ...]
    tokens: Tokens
    """Everything up to here as token ids, read-only int32."""
    text: str
    """Their text; "" where the next turn must be tokenised anew."""
    now: int
    boundary: int
    """Tokens whose state was kept; 0 = none (the cache is off or had no room)."""
    evaluated_tokens: int
    """Tokens that had to be evaluated for it: 0 when the state still lay in a slot or in the cache."""


class Conversation:
    """Made by ``Engine.conversation``.  One call at a time.

    >>> with Engine(MODEL, ctx_size=2048) as engine:
    ...     talk = engine.conversation([{"role": "system", "content": "Be brief."}], temperature=0, max_tokens=8)
    ...     _ = talk.ask("Name a bird.")
    ...     here = talk.checkpoint()
    ...     first = talk.ask("Another one?")
    ...     talk.restore(here)
    ...     second = talk.ask("Another one?")
    >>> first.tokens.tolist() == second.tokens.tolist()
    True
    >>> second.usage.cached_tokens >= here.boundary > 0
    True

    A call that is cancelled or fails leaves the conversation as it was.
    """

    def __init__(self, engine: Engine, messages: Sequence[Message], options: Mapping[str, Any]) -> None:
        self._engine = engine
        self._options = dict(options)
        self._messages = list(messages)
        self._tokens: Tokens = as_tokens([])
        self._text = ""
        now = options.get("now")
        self.now: int = int(time.time()) if now is None else now
        """What the template takes for the present: pinned, or midnight would change the first tokens."""

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    @property
    def tokens(self) -> Tokens:
        """Every token evaluated or sampled so far, read-only; empty before the first answer."""
        return self._tokens

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    # -- turns -----------------------------------------------------------------------------------
    def ask(self, message: str | Message | None = None, **options: Unpack[ChatOptions]) -> Answer:
        """Add a message (a string is the user's; None: answer what was added) and the answer to it."""
        return self.stream(message, **options).result()

    async def aask(self, message: str | Message | None = None, **options: Unpack[ChatOptions]) -> Answer:
        """``ask`` for coroutines."""
        return await self.stream(message, **options).aresult()

    def stream(self, message: str | Message | None = None, **options: Unpack[ChatOptions]) -> AnswerStream:
        """``ask``, piece by piece; message and answer join the conversation when the stream has ended."""
        check_names(options, chat=True)
        merged: dict[str, Any] = {**self._options, **options}
        merged["now"] = self.now
        messages = list(self._messages)
        if message is not None:
            messages.append(_message(message))

        def done(answer: Answer, rendered: Rendered) -> None:
            if answer.finish_reason is not FinishReason.CANCELLED:
                self._advance(messages, answer, rendered)

        return self._engine.start_chat(messages, merged, self._next_tokens, done)

    def add(self, *messages: str | Message) -> None:
        """Append messages without asking for an answer, such as the results of tool calls."""
        self._messages.extend(_message(m) for m in messages)

    # -- places to come back to ------------------------------------------------------------------
    def checkpoint(self) -> Checkpoint:
        """Keep the state at the conversation's end, and the way back to it.

        The state is taken from the slot as it lies there.  When another conversation has the slot by
        now, the missing tokens are evaluated again (``evaluated_tokens`` says how many).
        """
        n = len(self._tokens)
        boundary = evaluated = 0
        if n and self._engine.core.ram_bytes:
            kept = self._engine.core.keep(self._tokens)
            if kept is None:
                evaluated = self._evaluate()
                kept = self._kept()
            boundary = kept
        return Checkpoint(tuple(self._messages), self._tokens, self._text, self.now, boundary, evaluated)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back (or over) to a checkpoint; the next call continues from there.

        Of this or another conversation, also of an earlier process with the same model.
        """
        self._messages = list(checkpoint.messages)
        self._tokens, self._text, self.now = checkpoint.tokens, checkpoint.text, checkpoint.now

    def fork(self, *, keep: bool = True) -> Conversation:
        """A second conversation with the same past.  ``keep``: take a checkpoint for both to start from."""
        place = Checkpoint(tuple(self._messages), self._tokens, self._text, self.now, 0, 0)
        other = Conversation(self._engine, (), self._options)
        other.restore(self.checkpoint() if keep else place)
        return other

    # -- parts -----------------------------------------------------------------------------------
    def _next_tokens(self, rendered: Rendered) -> Tokens:
        """The exact tokens so far and what the template adds, or the whole prompt tokenised anew."""
        if self._text and rendered.prompt.startswith(self._text):
            rest = rendered.prompt[len(self._text) :]
            added = self._engine.tokenize(rest)
            # some tokenizers put a space before a text of its own
            if self._engine.detokenize(added) == rest:
                return as_tokens(np.concatenate([self._tokens, added]))
        return self._engine.prompt_tokens(rendered.prompt)

    def _advance(self, messages: list[Message], answer: Answer, rendered: Rendered) -> None:
        self._messages = [*messages, answer.message]
        self._tokens = as_tokens(np.concatenate([answer.prompt_tokens, answer.tokens]))
        written = self._engine.core.vocab.detokenize(answer.tokens)
        try:
            self._text = rendered.prompt + written.decode("utf-8")
        except UnicodeDecodeError:  # a limit cut a character
            self._text = ""

    def _evaluate(self) -> int:
        """Compute the conversation's tokens from the deepest kept state on, leaving a checkpoint at their end."""
        n = len(self._tokens)
        request = GenerateRequest(tokens=self._tokens, max_tokens=0, stable=(n,))
        stream = AnswerStream(self._engine.core.submit(request), self._tokens, None)
        return stream.result().usage.timings.prompt_n

    def _kept(self) -> int:
        """The deepest boundary of the conversation that the cache holds, in tokens."""
        best = self._engine.core.lookup(self._tokens).best
        return 0 if best is None else min(best.n_tokens, len(self._tokens))


def _message(message: str | Message) -> Message:
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if not isinstance(message, Mapping) or "role" not in message:
        raise RequestError("message: a string, or a mapping with role and content", param="message")
    if message["role"] not in (*ROLES,):
        raise RequestError(f"message.role: must be one of {', '.join(ROLES)}", param="message")
    return message
