"""One choice of a chat answer while it is written: engine text in, message parts out.

The parser reads the whole text again with every piece, so that a piece of a long answer costs more
than the token it brings (20 µs at first, 140 µs at 8,000 characters).  From some length on, pieces are
therefore gathered: parsing gets at most one twentieth of the time, and a piece waits for a few
milliseconds.  What parsing costs is processor time: on a busy machine the clock on the wall would count
the others' work and hold pieces back for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gufo_gguf.backend.message_parser import ChatMessage, MessageDelta
from gufo_gguf.engine.types import Event, Finished, FinishReason, TextDelta, TokenLogprob
from gufo_gguf.server.port import ParserPort

_GATHER_FROM_CHARS = 1024
_PAUSE_PER_COST = 20
_PAUSE_MAX_S = 0.05


class Answer:
    """Owns its parser.  ``finished`` is set by the last event."""

    def __init__(
        self,
        parser: ParserPort,
        clock: Callable[[], float] = time.perf_counter,
        cost: Callable[[], float] = time.thread_time,
    ) -> None:
        """``clock`` and ``cost`` give seconds: on the wall, and of this thread's work."""
        self._parser = parser
        self._clock = clock
        self._cost = cost
        self._n_chars = 0
        self._pieces: list[tuple[str, int]] = []
        """Raw text and its number of tokens, as they came."""
        self._gathered = ""
        self._parse_from_s = 0.0
        self.finished: Finished | None = None
        self.called_tools = False
        self.logprobs: list[TokenLogprob] = []
        """Of tokens whose text the parser may still hold back; taken by ``take_logprobs``."""

    def feed(self, event: Event) -> list[MessageDelta]:
        """What this event adds to the message; the last one adds what was held back."""
        if isinstance(event, TextDelta):
            self._pieces.append((event.text, len(event.tokens)))
            self.logprobs.extend(event.logprobs)
            return self._text(event.text) if event.text else []
        if isinstance(event, Finished):
            self.finished = event
            rest, self._gathered = self._gathered, ""
            return self._seen(self._parser.feed(rest, final=True))
        return []

    def feed_all(self, events: Sequence[TextDelta]) -> None:
        """Many at once; their text is parsed once."""
        for event in events:
            self._pieces.append((event.text, len(event.tokens)))
            self.logprobs.extend(event.logprobs)
        self._seen(self._parser.feed("".join(event.text for event in events)))

    def _text(self, text: str) -> list[MessageDelta]:
        self._n_chars += len(text)
        self._gathered += text
        if self._n_chars < _GATHER_FROM_CHARS:
            text, self._gathered = self._gathered, ""
            return self._seen(self._parser.feed(text))
        if self._clock() < self._parse_from_s:
            return []
        text, self._gathered = self._gathered, ""
        before = self._cost()
        deltas = self._parser.feed(text)
        pause_s = min(_PAUSE_PER_COST * (self._cost() - before), _PAUSE_MAX_S)
        self._parse_from_s = self._clock() + pause_s
        return self._seen(deltas)

    def _seen(self, deltas: list[MessageDelta]) -> list[MessageDelta]:
        self.called_tools = self.called_tools or any(d.tool_index is not None for d in deltas)
        return deltas

    def take_logprobs(self) -> list[TokenLogprob]:
        taken, self.logprobs = self.logprobs, []
        return taken

    @property
    def message(self) -> ChatMessage:
        return self._parser.message

    @property
    def reasoning_tokens(self) -> int:
        """Generated tokens up to the end of the reasoning; its closing tag counts as the answer's.

        Where the parser did not take the reasoning from one place (several blocks), its share of the
        text stands for its share of the tokens.
        """
        reasoning = self.message.reasoning_content
        if not reasoning:
            return 0
        text = "".join(piece for piece, _ in self._pieces)
        at = text.find(reasoning)
        if at < 0:
            n_tokens = sum(n for _, n in self._pieces)
            return min(n_tokens, round(n_tokens * len(reasoning) / max(1, len(text))))
        end, n_tokens, seen = at + len(reasoning), 0, 0
        for piece, n in self._pieces:
            if seen >= end:
                break
            n_tokens += n
            seen += len(piece)
        return n_tokens

    @property
    def stopped(self) -> bool:
        """Ended by the model or a stop string, not by a limit."""
        return self.finished is not None and self.finished.reason is FinishReason.STOP

    def close(self) -> None:
        self._parser.close()


def whole_answer(parser: ParserPort, events: Sequence[Event]) -> Answer:
    """An answer of which every event is there; its text is parsed once."""
    answer = Answer(parser)
    answer.feed_all([e for e in events if isinstance(e, TextDelta)])
    answer.feed(events[-1])
    return answer
