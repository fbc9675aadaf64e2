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
(b) has to be rendered.  A template runs over all messages, several times for one prompt, and makes the
grammar of an answer that nobody will give, so (b) is made of what the prompt has already:

    prompt            <sys> <user> … <user> <call> <result> <opening>
    recent messages                  <user> <call> <result>
    the same + probe                 <user> <call> <result> <opening?> probe …

The recent messages begin at the last question: what a template drops depends on where that is.  If
their text is not how the prompt ends, all messages are rendered; and always with templates for which
the two ways disagree on conversations of the usual kinds (``short_way_holds``).

Tokenizing three times a prompt of 100,000 tokens would cost more than restoring it.  A tokenizer
splits the text at special tokens before anything else, so tokens before a special token that both
texts share do not depend on what follows: only the rest is tokenized.

    prompt   ......................<|im_end|>\\n<|im_start|>assistant\\n
    other    ......................<|im_end|>\\n
             taken from the prompt |--- tokenized anew ---
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gufo_gguf.cache.types import Tokens
from gufo_gguf.core.errors import RequestError

if TYPE_CHECKING:
    from gufo_gguf.backend.chat import ChatInput, Message, Rendered


class Tokenize(Protocol):
    """Text to token ids as for a prompt: BOS if the model wants it, special tokens parsed."""

    def __call__(self, text: str, /) -> Tokens: ...


PROBE_ANSWER = {"role": "assistant", "content": "Sure."}
PROBE_QUESTION = {"role": "user", "content": "Next."}
USUAL_TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}]
_MARKER = re.compile(r"<[^<>\n]{1,48}>|\[[^\[\]\n]{1,48}\]")
_WITHIN_MARKER = re.compile(r"[<\[][^<>\[\]\s]*$")
_WINDOW_CHARS = 4096
_MANY = 8
"""Messages from which the short way is taken: it renders up to twice as often."""


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


def common_end(a: str, b: str) -> int:
    """Number of equal trailing characters."""
    return common_chars(a[::-1], b[len(b) - min(len(a), len(b)) :][::-1])


def recent_messages(messages: Sequence[Message], thinking_end_tags: Sequence[str] = ()) -> list[list[Message]]:
    """Short conversations whose text ends as that of all messages does, shortest first.

    Each has the system messages, since templates may print them beside the last question, and that question;
    the first only the newest call of the tool loop after it, with its results, the second all of the loop.
    If the loop has reasoning there is no first: a template that drops reasoning drops it from the loop's start.
    """
    first = next((i for i, m in enumerate(messages) if m.get("role") not in ("system", "developer")), 0)
    question = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=first)
    loop = messages[question + 1 :]
    call = max((i for i, m in enumerate(loop) if m.get("role") == "assistant"), default=0)
    shortest = 0 if any(_thinks(m, thinking_end_tags) for m in loop) else call
    head = [*messages[:first], *messages[question : question + 1]]
    found = [[*head, *loop[start:]] for start in sorted({shortest, 0}, reverse=True)]
    return [short for short in found if len(short) < len(messages)]


def _thinks(message: Message, end_tags: Sequence[str]) -> bool:
    content = message.get("content")
    if message.get("role") != "assistant":
        return False
    return bool(message.get("reasoning_content")) or any(tag in str(content) for tag in end_tags)


def _continued(chat: ChatInput, messages: Sequence[Message]) -> ChatInput:
    return replace(chat, messages=[*messages, PROBE_ANSWER, PROBE_QUESTION])


def of_recent(text: Callable[[ChatInput], str], chat: ChatInput, rendered: Rendered) -> str | None:
    """(b), if the recent messages alone say what it is."""
    opening = rendered.generation_prompt
    said = chat.messages[-1].get("content") if chat.messages else None
    if rendered.is_continuation or not rendered.prompt.endswith(opening):
        return None
    if not isinstance(said, str) or not said.strip():
        return None
    history = rendered.prompt[: len(rendered.prompt) - len(opening)]
    shorts = recent_messages(chat.messages, rendered.thinking_end_tags)
    for short in shorts:
        now, then = _text_or_none(text, replace(chat, messages=short)), _text_or_none(text, _continued(chat, short))
        if not now or not then:
            continue
        kept = common_chars(now, then)
        same = len(now) - common_end(now, history)
        # what the next turn changes in the newest call it changes from the loop's start
        if kept < len(now) and short is not shorts[-1]:
            continue
        if now.rfind(said.strip()) >= same and kept >= same:
            return history[: len(history) - (len(now) - kept)] + then[kept:]
    return None


def short_way_holds(text: Callable[[ChatInput], str], render: Callable[[ChatInput], Rendered], like: ChatInput) -> bool:
    """Do recent messages and all messages agree, for this template, on what the next turn keeps of a prompt?"""
    for talk in usual_talks():
        chat = replace(like, messages=talk)
        try:
            rendered = render(chat)
            short, whole = of_recent(text, chat, rendered), text(_continued(chat, talk))
        except RequestError:
            continue
        if short is not None and common_chars(rendered.prompt, short) != common_chars(rendered.prompt, whole):
            return False
    return True


def _text_or_none(text: Callable[[ChatInput], str], chat: ChatInput) -> str | None:
    try:
        return text(chat)
    except RequestError:
        return None


def usual_talks() -> list[list[Message]]:
    """Conversations of the usual kinds, ending with a question or in a tool loop after several turns.

    The later, the more there is that a format may print its own way, or refuse.
    """

    def answer(text: str, thinks: bool, *calls: int) -> list[Message]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinks:
            message["reasoning_content"] = f"Why {text}"
        idents = [f"call{call:05}" for call in calls]  # nine characters, which some templates insist on
        function = {"name": "read", "arguments": '{"path": "a"}'}
        if calls:
            message["tool_calls"] = [{"id": ident, "type": "function", "function": function} for ident in idents]
        return [message, *({"role": "tool", "tool_call_id": ident, "content": f"Found {ident}."} for ident in idents)]

    talks: list[list[Message]] = []
    for thinks in (False, True):
        start: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "First."}]
        for first_calls in ((), (1, 2)):
            for loop in ((), ((3,),), ((3,), (4, 5))):
                talk = [*start, *(answer("I read.", thinks, *first_calls) if first_calls else [])]
                talk += [*answer("One.", thinks), {"role": "user", "content": "Second."}]
                for calls in loop:
                    talk += answer("", thinks, *calls)
                talks.append(talk)
    return talks


class StableSearch:
    """One template (``text`` renders without an opening) and one tokenizer.

    ``short``: may recent messages stand for all of them (``short_way_holds``)?  Asked only where it matters.
    """

    def __init__(self, text: Callable[[ChatInput], str], tokenize: Tokenize, short: Callable[[], bool]) -> None:
        self._text = text
        self._tokenize = tokenize
        self._short = short
        self._empty = tokenize("")  # what is added to every text: BOS, or nothing

    def boundaries(self, chat: ChatInput, rendered: Rendered, prompt_tokens: Tokens) -> tuple[int, ...]:
        """Ascending, without duplicates, each in [1, len(prompt_tokens)]; a variant that the
        template refuses is left out."""
        plain = replace(
            chat,
            continue_final=False,
            tool_choice=chat.tool_choice if isinstance(chat.tool_choice, str) else "auto",
        )
        others = (
            self._without_opening(plain, rendered),
            self._with_next_turn(plain, rendered),
        )
        found = {self._shared_tokens(rendered.prompt, prompt_tokens, other) for other in others if other is not None}
        return tuple(sorted(found - {0}))

    def _without_opening(self, chat: ChatInput, rendered: Rendered) -> str | None:
        opening = rendered.generation_prompt
        if opening and not rendered.is_continuation and rendered.prompt.endswith(opening):
            text = rendered.prompt[: -len(opening)]
            if not _WITHIN_MARKER.search(text, max(0, len(text) - 64)):
                return text
        return _text_or_none(self._text, chat)

    def _with_next_turn(self, chat: ChatInput, rendered: Rendered) -> str | None:
        """(b)"""
        if len(chat.messages) >= _MANY and self._short():
            found = of_recent(self._text, chat, rendered)
            if found is not None:
                return found
        return _text_or_none(self._text, _continued(chat, chat.messages))

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
