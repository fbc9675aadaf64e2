"""Stable boundaries: how much of a prompt the next turn will send again.

    prompt            <sys> <user> <assistant opening>
    (a) no opening    <sys> <user>
    (b) next turn     <sys> <user> <assistant opening?> probe </assistant> <user> probe </user>
                      ^---------------------^
                      token-wise common prefix of (b) and the prompt

(a) always survives.  (b) can reach further (the opening is part of the history) or less far (a
template that drops past reasoning once a new user turn comes keeps it in a tool loop), so both are
boundaries.  Rejected: searching the prompt for role markers, since a template may print anything.

(a) is the prompt without ``generation_prompt``, which llama.cpp finds by that same comparison of
characters, unless the cut lies within a marker (two different ones may begin alike); so usually only
(b) has to be rendered.  Rejected: rendering (b) for the last messages alone, which is quicker still: templates
move or drop parts of what came before (tools beside the last question, thoughts from a loop's start), and a
boundary too deep is never reused.

The end of tools and system prompt is found in the same way, on a conversation's first turn: they are
printed once more, before another question, whose text is cut off again.

    prompt    <tools> <sys> <user> question </user> ...
    other     <tools> <sys> <user>|probe </user>
              ^------------------^

Tokenizing three times a prompt of 100,000 tokens would cost more than restoring it.  A tokenizer
splits the text at special tokens before anything else, so tokens before a special token that both
texts share do not depend on what follows: only the rest is tokenized.

    prompt   ......................<|im_end|>\\n<|im_start|>assistant\\n
    other    ......................<|im_end|>\\n
             taken from the prompt |--- tokenized anew ---
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gufo_gguf.cache.types import Tokens
from gufo_gguf.core.errors import RequestError

if TYPE_CHECKING:
    from gufo_gguf.backend.chat import ChatInput, Rendered


class Tokenize(Protocol):
    """Text to token ids as for a prompt: BOS if the model wants it, special tokens parsed."""

    def __call__(self, text: str, /) -> Tokens: ...


PROBE_ANSWER = {"role": "assistant", "content": "Sure."}
PROBE_QUESTION = {"role": "user", "content": "Next."}
_SYSTEM_ROLES = ("system", "developer")
_MARKER = re.compile(r"<[^<>\n]{1,48}>|\[[^\[\]\n]{1,48}\]")
_WITHIN_MARKER = re.compile(r"[<\[][^<>\[\]\s]*$")
_WINDOW_CHARS = 4096


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Number of equal leading tokens."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n


def common_chars(a: str, b: str) -> int:
    """Number of equal leading characters; by halving, since slices compare at memory speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _plain(chat: ChatInput) -> ChatInput:
    """The same history without what only shapes the answer."""
    named = not isinstance(chat.tool_choice, str)
    return replace(chat, continue_final=False, tool_choice="auto" if named else chat.tool_choice)


class StableSearch:
    """One template (``text`` renders without an opening) and one tokenizer."""

    def __init__(self, text: Callable[[ChatInput], str], tokenize: Tokenize) -> None:
        self._text = text
        self._tokenize = tokenize
        self._empty = tokenize("")  # what is added to every text: BOS, or nothing

    def boundaries(self, chat: ChatInput, rendered: Rendered, prompt_tokens: Tokens) -> tuple[int, ...]:
        """Ascending, without duplicates, each in [1, len(prompt_tokens)]; a variant that the
        template refuses is left out."""
        plain = _plain(chat)
        others = (
            self._without_opening(plain, rendered),
            self._prompt_of(replace(plain, messages=[*chat.messages, PROBE_ANSWER, PROBE_QUESTION])),
        )
        found = {self._shared_tokens(rendered.prompt, prompt_tokens, other) for other in others if other is not None}
        return tuple(sorted(found - {0}))

    def system_end(self, chat: ChatInput, rendered: Rendered, prompt_tokens: Tokens) -> int:
        """See ``ChatFormat.system_end``."""
        roles = [message.get("role") for message in chat.messages]
        if "assistant" in roles:
            return 0
        leading = list(takewhile(lambda message: message.get("role") in _SYSTEM_ROLES, chat.messages))
        other = self._prompt_of(replace(_plain(chat), messages=[*leading, PROBE_QUESTION]))
        if other is None:
            return 0
        shared = other[: max(0, other.rfind(PROBE_QUESTION["content"]))]
        return self._shared_tokens(rendered.prompt, prompt_tokens, shared)

    def _without_opening(self, chat: ChatInput, rendered: Rendered) -> str | None:
        opening = rendered.generation_prompt
        if opening and not rendered.is_continuation and rendered.prompt.endswith(opening):
            text = rendered.prompt[: -len(opening)]
            if not _WITHIN_MARKER.search(text, max(0, len(text) - 64)):
                return text
        return self._prompt_of(chat)

    def _prompt_of(self, chat: ChatInput) -> str | None:
        try:
            return self._text(chat)
        except RequestError:
            return None

    def _shared_tokens(self, prompt: str, prompt_tokens: Tokens, other: str) -> int:
        shared_chars = common_chars(prompt, other)
        cut = self._last_special(prompt, prompt_tokens, shared_chars)
        if cut is not None:
            char, token = cut
            tail = self._without_bos(self._tokenize(other[char:]))
            if tail is not None:
                return token + common_prefix(prompt_tokens[token:], tail)
        return common_prefix(prompt_tokens, self._tokenize(other))

    def _without_bos(self, tokens: Tokens) -> Tokens | None:
        n = len(self._empty)
        return tokens[n:] if n < len(tokens) and np.array_equal(tokens[:n], self._empty) else None

    def _last_special(self, prompt: str, prompt_tokens: Tokens, shared_chars: int) -> tuple[int, int] | None:
        """(character, token index) of the last special token that lies within the shared text.

        A marker counts as special if it is one token that occurs in the tokens exactly as often as
        in the text: text that the tokenizer merges with its neighbours would be missing.
        """
        start = max(0, shared_chars - _WINDOW_CHARS)
        for match in reversed(list(_MARKER.finditer(prompt, start, shared_chars))):
            marker = match.group()
            ids = self._without_bos(self._tokenize(marker))
            if ids is None or len(ids) != 1:
                continue
            places = np.flatnonzero(prompt_tokens == ids[0])
            if len(places) == prompt.count(marker):
                return match.start(), int(places[prompt.count(marker, 0, match.start())])
        return None
