"""One choice of a chat answer while it is written: engine text in, message parts out."""

from __future__ import annotations

from collections.abc import Sequence

from gufo_gguf.backend.message_parser import ChatMessage, MessageDelta
from gufo_gguf.engine.types import Event, Finished, FinishReason, TextDelta, TokenLogprob
from gufo_gguf.server.port import ParserPort


class Answer:
    """Owns its parser.  ``finished`` is set by the last event."""

    def __init__(self, parser: ParserPort) -> None:
        self._parser = parser
        self.finished: Finished | None = None
        self.called_tools = False
        self.logprobs: list[TokenLogprob] = []
        """Of tokens whose text the parser may still hold back; taken by ``take_logprobs``."""

    def feed(self, event: Event) -> list[MessageDelta]:
        """What this event adds to the message; the last one adds what was held back."""
        if isinstance(event, TextDelta):
            self.logprobs.extend(event.logprobs)
            return self._seen(self._parser.feed(event.text)) if event.text else []
        if isinstance(event, Finished):
            self.finished = event
            return self._seen(self._parser.feed("", final=True))
        return []

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
    def stopped(self) -> bool:
        """Ended by the model or a stop string, not by a limit."""
        return self.finished is not None and self.finished.reason is FinishReason.STOP

    def close(self) -> None:
        self._parser.close()


def whole_answer(parser: ParserPort, events: Sequence[Event]) -> Answer:
    """An answer of which every event is there; its text is parsed once."""
    answer = Answer(parser)
    texts = [e for e in events if isinstance(e, TextDelta)]
    joined = TextDelta("".join(e.text for e in texts), (), tuple(p for e in texts for p in e.logprobs))
    answer.feed(joined)
    answer.feed(events[-1])
    return answer
