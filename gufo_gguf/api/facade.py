"""``Engine``: a loaded model for programs, over the same engine that ``gufo serve`` runs.

Rejected: exporting ``gufo_gguf.engine.Engine`` itself.  It takes tokens and gives events, which is
what a server needs; a program wants text, messages and answers, and conversations by exact tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from gufo_gguf.api.answer import Answer, AnswerStream
from gufo_gguf.api.conversation import Conversation
from gufo_gguf.api.options import ChatOptions, Options, chat_input, check_names, request_of, sampling_of
from gufo_gguf.backend.base import BackendInfo
from gufo_gguf.backend.chat import Rendered
from gufo_gguf.cache.types import Tokens
from gufo_gguf.core.errors import GufoError, RequestError
from gufo_gguf.engine.engine import Engine as Core
from gufo_gguf.engine.flags import EngineFlags, engine_options
from gufo_gguf.engine.prefetch import Prefetched
from gufo_gguf.engine.types import as_tokens
from gufo_gguf.models.default import find_model

Message = Mapping[str, Any]
Messages = str | Sequence[Message]
"""A conversation in OpenAI's form; a string stands for one message of the user."""
Prompt = str | Sequence[int] | Tokens
"""Text (BOS is added where the model wants one), or token ids as they are."""


class Engine:
    """A model and its cache.  All methods may be called from any thread.

    >>> with Engine(MODEL, ctx_size=2048) as engine:
    ...     answer = engine.chat("Name a bird.", max_tokens=8, temperature=0)
    ...     again = engine.chat("Name a bird.", max_tokens=8, temperature=0)
    >>> answer.text == again.text
    True
    >>> again.usage.cached_tokens == again.usage.prompt_tokens, str(again.usage.reuse_source)
    (True, 'ram')

    Several engines may live in one process.  ``close`` (or leaving the ``with`` block) frees the
    model; what is called afterwards raises GufoError.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        hf_repo: str | None = None,
        progress: Callable[[float], None] | None = None,
        **flags: Unpack[EngineFlags],
    ) -> None:
        """Load a model: a GGUF file, a name (``owlet``, the default, or ``smollm2``), or ``hf_repo``.

        ``hf_repo`` is ORG/REPO[:QUANT] of the Hugging Face hub, fetched when it is not here.  ``flags``
        have the names and defaults of ``gufo serve``'s flags, see EngineFlags; sizes are in bytes.
        ``progress`` is called with fractions of 1 while the model loads.  Raises ModelError or
        ConfigError, each naming what is wrong and the remedy.
        """
        self.options = engine_options(**flags)
        self._core: Core | None = Core.load(find_model(path, hf_repo), self.options, progress)

    @property
    def core(self) -> Core:
        """The engine itself: tokens in, events out.  Raises GufoError after ``close``."""
        if self._core is None:
            raise GufoError("the engine is closed")
        return self._core

    @property
    def info(self) -> BackendInfo:
        """Architecture, context, memory kind, and whether its state can be cached."""
        return self.core.info

    @property
    def model_id(self) -> str:
        return self.core.model_id

    # -- messages --------------------------------------------------------------------------------
    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> Answer:
        """Answer a conversation.  The template is the model's; see ``ChatOptions``.

        >>> with Engine(MODEL, ctx_size=2048) as engine:
        ...     answer = engine.chat(
        ...         [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}], max_tokens=4
        ...     )
        >>> answer.message["role"], answer.usage.completion_tokens <= 4
        ('assistant', True)
        """
        return self._chat(messages, options).result()

    async def achat(self, messages: Messages, **options: Unpack[ChatOptions]) -> Answer:
        """``chat`` for coroutines."""
        return await self._chat(messages, options).aresult()

    def conversation(self, messages: Messages = (), **options: Unpack[ChatOptions]) -> Conversation:
        """A conversation that keeps its exact tokens; ``options`` are the defaults of its calls."""
        check_names(options, chat=True)
        return Conversation(self, as_messages(messages), options)

    # -- text and tokens -------------------------------------------------------------------------
    def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """Continue a text, or token ids, without a template.

        >>> with Engine(MODEL, ctx_size=512) as engine:
        ...     text = engine.complete("Once upon a time", max_tokens=5, temperature=0)
        ...     ids = engine.tokenize("Once upon a time", bos=True)
        ...     tokens = engine.complete(ids, max_tokens=5, temperature=0)
        >>> text.tokens.tolist() == tokens.tokens.tolist()
        True
        """
        return self._complete(prompt, options).result()

    async def acomplete(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """``complete`` for coroutines."""
        return await self._complete(prompt, options).aresult()

    def stream(self, prompt_or_messages: Prompt | Messages, **options: Unpack[ChatOptions]) -> AnswerStream:
        """The same, piece by piece: messages are answered, a text or token ids are continued.

        >>> with Engine(MODEL, ctx_size=512) as engine:
        ...     stream = engine.stream([{"role": "user", "content": "Hi"}], max_tokens=5, temperature=0)
        ...     pieces = list(stream)
        >>> "".join(pieces) == stream.answer.text
        True

        Use ``async for`` in a coroutine.  Leaving the loop early stops the generation.
        """
        if is_messages(prompt_or_messages):
            return self._chat(prompt_or_messages, options)  # type: ignore[arg-type]
        return self._complete(prompt_or_messages, options)  # type: ignore[arg-type]

    def tokenize(self, text: str, *, bos: bool = False, special: bool = True) -> Tokens:
        """Token ids of a text.  ``bos``: as at a prompt's start; ``special``: understand special tokens."""
        return as_tokens(self.core.vocab.tokenize(text, add_special=bos, parse_special=special))

    def detokenize(self, tokens: Sequence[int] | Tokens) -> str:
        """Text of token ids, special tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self.core.vocab.detokenize(tokens).decode("utf-8", "replace")

    def render(self, messages: Messages, **options: Unpack[ChatOptions]) -> str:
        """The prompt that ``chat`` would evaluate, as text.

        >>> with Engine(MODEL, ctx_size=512) as engine:
        ...     text = engine.render("Hello")
        >>> "Hello" in text
        True
        """
        check_names(options, chat=True)
        return self.core.chat.render(chat_input(options, as_messages(messages))).prompt

    # -- the cache -------------------------------------------------------------------------------
    def prefetch(self, messages: Messages, **options: Unpack[ChatOptions]) -> Prefetched:
        """Have what a coming ``chat`` can start from in RAM, loading it from disk if it lies there.

        Computes nothing; goes through an idle session.  Raises Overloaded when there is none.

        >>> with Engine(MODEL, ctx_size=512) as engine:
        ...     _ = engine.chat("Hello", max_tokens=4)
        ...     found = engine.prefetch("Hello")
        >>> found.boundary > 0, found.loaded_tokens
        (True, 0)
        """
        check_names(options, chat=True)
        given = chat_input(options, as_messages(messages))
        tokens = self.prompt_tokens(self.core.chat.render(given).prompt)
        return self.core.prefetch(request_of(options, tokens, sampling_of(options)))

    def cache_status(self) -> dict[str, Any]:
        """Budgets, checkpoints, chunks and tiers; sizes in bytes, boundaries in tokens."""
        return self.core.cache_status()

    def cache_events(self, since: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """The cache's decisions with a number above ``since``, oldest first."""
        return self.core.cache_events(since, limit)

    def check(self) -> list[str]:
        """Recount every reference and byte of the cache; an empty list is the only good answer."""
        return self.core.check()

    def close(self) -> None:
        """Free the model; idempotent.  Running requests end with an error."""
        core, self._core = self._core, None
        if core is not None:
            core.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- parts -----------------------------------------------------------------------------------
    def prompt_tokens(self, text: str) -> Tokens:
        """A rendered prompt's tokens, BOS where the model wants one."""
        return as_tokens(self.core.vocab.tokenize(text, add_special=True, parse_special=True))

    def start_chat(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        tokens_of: Callable[[Rendered], Tokens],
        done: Callable[[Answer, Rendered], None] = lambda answer, rendered: None,
    ) -> AnswerStream:
        """Render, then generate from the tokens that ``tokens_of`` makes of the prompt."""
        core = self.core
        given = chat_input(options, messages)
        if given.grammar and given.json_schema is not None:
            raise RequestError("grammar: cannot be combined with json_schema", param="grammar")
        rendered = core.chat.render(given)
        tokens = tokens_of(rendered)
        request = request_of(options, tokens, rendered.sampling(sampling_of(options)))
        request.stop = tuple(dict.fromkeys((*request.stop, *rendered.additional_stops)))
        if request.cache_prompt:
            request.stable = core.chat.stable_boundaries(given, rendered, tokens, self.prompt_tokens)
            request.system_end = core.chat.system_end(given, rendered, tokens, self.prompt_tokens)
        return AnswerStream(
            core.submit(request), tokens, core.chat.parser(rendered), lambda answer: done(answer, rendered)
        )

    def _chat(self, messages: Messages, options: Mapping[str, Any]) -> AnswerStream:
        check_names(options, chat=True)
        return self.start_chat(as_messages(messages), options, lambda rendered: self.prompt_tokens(rendered.prompt))

    def _complete(self, prompt: Prompt, options: Mapping[str, Any]) -> AnswerStream:
        check_names(options, chat=False)
        core = self.core
        tokens = self.prompt_tokens(prompt) if isinstance(prompt, str) else as_tokens(prompt)
        sampling = sampling_of(options)
        if "json_schema" in options:
            if sampling.grammar:
                raise RequestError("grammar: cannot be combined with json_schema", param="grammar")
            try:
                grammar = core.chat.schema_grammar(options["json_schema"])
            except (TypeError, ValueError, RecursionError) as error:
                raise RequestError(f"json_schema: not JSON ({error})", param="json_schema") from None
            sampling = replace(sampling, grammar=grammar, grammar_type="output_format")
        return AnswerStream(core.submit(request_of(options, tokens, sampling)), tokens, None)


def is_messages(value: object) -> bool:
    """A sequence of mappings; text and token ids are prompts."""
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], Mapping)


def as_messages(messages: Messages) -> list[Message]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, np.ndarray | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages: a string, or a list of mappings with role and content", param="messages")
    return [*messages]
