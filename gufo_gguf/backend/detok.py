"""Tokens to text that may be sent: complete UTF-8, and no part of a stop string.

    bytes of a token ──► UTF-8 decoder ──► held text ──► sent
                         (holds a cut       (holds what may be the beginning
                          sequence back)     of a stop string)

A sequence that can never become valid turns into U+FFFD at once; one that is merely cut waits, and
is dropped if the generation ends inside it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class Detokenizer:
    """``piece`` gives the bytes of a token (b"" for one that shows nothing)."""

    def __init__(self, piece: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        self._piece = piece
        self._stops = [s for s in stops if s]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stop_text: str | None = None
        """The stop string that was found; nothing is sent after it."""

    def feed(self, token: int) -> str:
        """Text that became certain with this token."""
        if self.stop_text is not None:
            return ""
        self._held += self._decoder.decode(self._piece(token))
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, _, self.stop_text = min(found)  # the earliest; of two at one place, the longer
            sent, self._held = self._held[:at], ""
            return sent
        keep = self._possible_stop()
        sent = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return sent

    def flush(self) -> str:
        """What was held back for a stop string that never came; at the end of a generation."""
        rest, self._held = self._held, ""
        return "" if self.stop_text is not None else rest

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for n in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:n]):
                    longest = n
                    break
        return longest
