"""The prefix index: which retained states can start this prompt.  (Simple version: flat lists.)

Live frontiers, RAM checkpoints and disk checkpoints of one scope share one structure, so one lookup
finds all candidates, the longest common prefix with any history and the reason of a miss.
Lookup writes nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from gufo_gguf.cache.types import Candidate, CheckpointId, InputMark, Lookup, MissReason, PromptView, Tier, Tokens

Key = tuple[Tier, int]
"""(LIVE, slot) | (RAM, checkpoint id) | (DISK, checkpoint id)"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One retained state: the first ``n_tokens`` of a history."""

    key: Key
    n_tokens: int
    has_logits: bool = False
    inputs: tuple[InputMark, ...] = ()
    anchor: bool = False
    """The boundary that outlasts the turn (the lowest of ``PromptView.stable``): only a deeper
    anchor covers it."""
    covers: bool = True
    """False for retry copies: they neither cover a checkpoint nor make one a branch point.  Live
    frontiers never do."""


class PrefixIndex:
    def __init__(self, *, rows_only: bool, max_ghosts: int = 4096) -> None:
        self._rows_only = rows_only
        self._items: dict[Key, tuple[str, Tokens, Entry]] = {}

    def insert(self, scope: str, tokens: Tokens, entry: Entry) -> None:
        """Make a state findable; ``tokens`` is its history (at least ``n_tokens``).  Replaces an
        entry with the same key."""
        self._items[entry.key] = (scope, np.array(tokens[: entry.n_tokens]), entry)

    def remove(self, key: Key, *, ghost: MissReason | None = None) -> None:
        """Forget a state (unknown keys are fine).  ``ghost``: remember why it went."""
        self._items.pop(key, None)

    def lookup(self, prompt: PromptView) -> Lookup:
        if not prompt.read:
            return Lookup((), 0, MissReason.DISABLED)
        common, found = 0, []
        for scope, tokens, entry in self._items.values():
            if scope != prompt.scope:
                continue
            n = min(len(tokens), len(prompt.tokens))
            shared = int((tokens[:n] != prompt.tokens[:n]).argmax()) if (tokens[:n] != prompt.tokens[:n]).any() else n
            marks = set(entry.inputs) ^ {m for m in prompt.inputs if m.position < entry.n_tokens}
            shared = min([shared, *(m.position for m in marks)])
            common = max(common, shared)
            whole = shared == entry.n_tokens
            n = shared if self._rows_only or whole else 0
            logits = entry.has_logits and whole and n == len(prompt.tokens)
            if not logits and n >= len(prompt.tokens):
                n = len(prompt.tokens) - 1 if self._rows_only else 0
            if n > 0:
                tier, number = entry.key
                live = tier is Tier.LIVE
                checkpoint, slot = (None, number) if live else (CheckpointId(number), None)
                found.append(Candidate(tier, n, checkpoint, slot, logits))
        order = [Tier.LIVE, Tier.RAM, Tier.DISK]
        found.sort(key=lambda c: (-c.n_tokens, order.index(c.tier), c.checkpoint or 0, c.slot or 0))
        reason = None if found else MissReason.PREFIX_CHANGED if common else MissReason.NO_CHECKPOINT
        return Lookup(tuple(found), common, reason)

    def covered(self, key: Key) -> bool:
        """A deeper checkpoint of the same tier lies on the same branch, and no second branch starts between."""
        return False

    def is_branch_point(self, key: Key) -> bool:
        """Not covered, and two retained histories extend it and differ after it."""
        return False

    def parent(self, key: Key) -> Key | None:
        """The deepest checkpoint of the same tier that this one extends."""
        return None

    def family(self, key: Key) -> Hashable:
        """The unbranched run of checkpoints this one belongs to; equal for members of one run now."""
        return key

    def family_of(self, scope: str, tokens: Tokens) -> Hashable:
        """The family a RAM checkpoint with these tokens would join; None when it would start one."""
        return None

    def check(self) -> list[str]:
        """Recount everything; an empty list means consistent."""
        return []
