"""Non-text inputs as tokens: an image's digest stands where its placeholder tokens start.

Placeholders of two images are equal tokens, so matching by tokens alone would share state past an
image.  Each digest in use gets a number far below every token id and sentinel; in the tree it
replaces the first placeholder token, and from there everything (candidates, common prefix, branch
points) tells images apart without knowing of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gufo_gguf.cache.tokentree import Entry
from gufo_gguf.cache.types import InputMark, Tokens

_UNKNOWN = int(np.iinfo(np.int32).min)
"""Stands for an input that no entry has; sought, never stored."""
_LAST = _UNKNOWN + (1 << 30)


def is_input(token: int) -> bool:
    return token < _LAST


def blanked(tokens: Tokens, inputs: Sequence[InputMark]) -> Tokens:
    """The tokens with 0 where an input starts: equal however the placeholder was written."""
    return _replaced(tokens, [(m.position, 0) for m in inputs])


class InputIds:
    """Numbers of the digests in use, counted by the entries that need them."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._uses: dict[str, int] = {}
        self._free: list[int] = []

    def stored(self, tokens: Tokens, inputs: Sequence[InputMark]) -> Tokens:
        """Tokens for the tree; each input in them counts one use until ``release``."""
        marks = [m for m in inputs if m.position < len(tokens)]
        for mark in marks:
            if mark.digest not in self._ids:
                self._ids[mark.digest] = self._free.pop() if self._free else _UNKNOWN + 1 + len(self._ids)
            self._uses[mark.digest] = self._uses.get(mark.digest, 0) + 1
        return _replaced(tokens, [(m.position, self._ids[m.digest]) for m in marks])

    def sought(self, tokens: Tokens, inputs: Sequence[InputMark]) -> Tokens:
        """Tokens to match with; writes nothing."""
        marks = [m for m in inputs if m.position < len(tokens)]
        return _replaced(tokens, [(m.position, self._ids.get(m.digest, _UNKNOWN)) for m in marks])

    def release(self, entry: Entry) -> None:
        """An entry that was ``stored`` is gone."""
        for mark in entry.inputs:
            if mark.position >= entry.n_tokens:
                continue
            self._uses[mark.digest] -= 1
            if not self._uses[mark.digest]:
                del self._uses[mark.digest]
                self._free.append(self._ids.pop(mark.digest))

    def check(self, entries: Iterable[Entry]) -> list[str]:
        uses: dict[str, int] = {}
        for entry in entries:
            for mark in entry.inputs:
                if mark.position < entry.n_tokens:
                    uses[mark.digest] = uses.get(mark.digest, 0) + 1
        used = set(self._ids.values())
        if uses != self._uses or uses.keys() != self._ids.keys():
            return ["inputs: recounted uses differ"]
        if len(used) != len(self._ids) or used & set(self._free):
            return ["inputs: a number is used twice"]
        return []


def _replaced(tokens: Tokens, changes: Sequence[tuple[int, int]]) -> Tokens:
    """The tokens themselves when there is nothing to change, else a changed copy."""
    if not changes:
        return tokens
    changed = tokens.copy()
    for position, token in changes:
        if position < len(changed):
            changed[position] = token
    return changed
