"""The slow model of the prefix index: a flat list of histories and the definitions, word for word."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from gufo_gguf.cache.index import Entry, Key
from gufo_gguf.cache.types import InputMark, PromptView, Tier

Symbols = tuple[object, ...]

PREFERENCE = [Tier.LIVE, Tier.RAM, Tier.DISK]


def symbols(tokens: object, inputs: tuple[InputMark, ...]) -> Symbols:
    """Tokens, with an input's digest in place of the token where it starts."""
    out: list[object] = [int(t) for t in tokens]  # type: ignore[attr-defined]
    for mark in inputs:
        if mark.position < len(out):
            out[mark.position] = mark.digest
    return tuple(out)


def shared(a: Symbols, b: Symbols) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@dataclass(frozen=True)
class Known:
    scope: str
    history: Symbols
    entry: Entry


class FlatIndex:
    def __init__(self, *, rows_only: bool) -> None:
        self.rows_only = rows_only
        self.known: dict[Key, Known] = {}

    def insert(self, scope: str, tokens: object, entry: Entry) -> None:
        history = symbols(tokens, entry.inputs)[: entry.n_tokens]
        self.known[entry.key] = Known(scope, history, entry)

    def remove(self, key: Key) -> None:
        self.known.pop(key, None)

    def lookup(self, prompt: PromptView) -> tuple[list[tuple[int, Tier, int, bool]], int]:
        """((n_tokens, tier, number, has_logits) of every usable state, any order; common prefix)."""
        wanted = symbols(prompt.tokens, prompt.inputs)
        found, common = [], 0
        for item in self.known.values():
            if item.scope != prompt.scope:
                continue
            n = shared(wanted, item.history)
            common = max(common, n)
            tier, number = item.entry.key
            whole = n == item.entry.n_tokens
            if whole and (n < len(wanted) or item.entry.has_logits):
                found.append((n, tier, number, item.entry.has_logits))
            if self.rows_only and not (whole and n < len(wanted)):
                cut = min(n, len(wanted) - 1)
                if cut > 0:
                    found.append((cut, tier, number, False))
        return found, common

    def deepest(self, scope: str, tokens: object, inputs: tuple[InputMark, ...], tier: Tier) -> int:
        wanted = symbols(tokens, inputs)
        on_it = (len(k.history) for k in self._lasting(scope, tier) if wanted[: len(k.history)] == k.history)
        return max(on_it, default=0)

    # -- relations -------------------------------------------------------------------------------
    def _lasting(self, scope: str, tier: Tier) -> list[Known]:
        return [k for k in self.known.values() if k.scope == scope and k.entry.key[0] is tier and k.entry.covers]

    def _standing(self, key: Key) -> tuple[bool, bool]:
        me = self.known[key]
        deeper = [
            k
            for k in self._lasting(me.scope, key[0])
            if len(k.history) > len(me.history) and k.history[: len(me.history)] == me.history
        ]
        depth = len(me.history)
        while deeper:
            ends = [k for k in deeper if len(k.history) == depth]
            if any(k.entry.anchor or not me.entry.anchor for k in ends):
                return True, False
            deeper = [k for k in deeper if len(k.history) > depth]
            if len({k.history[depth] for k in deeper}) >= 2:
                return False, True
            depth += 1
        return False, False

    def covered(self, key: Key) -> bool:
        return self._standing(key)[0]

    def is_branch_point(self, key: Key) -> bool:
        return self._standing(key)[1]

    def parent(self, key: Key) -> Key | None:
        me = self.known[key]
        above = [
            k
            for k in self._lasting(me.scope, key[0])
            if len(k.history) < len(me.history) and me.history[: len(k.history)] == k.history
        ]
        best = min(above, key=lambda k: (-len(k.history), k.entry.key[1]), default=None)
        return None if best is None else best.entry.key

    def family(self, key: Key) -> Hashable:
        parent = self.parent(key)
        return key if parent is None or self.is_branch_point(parent) else self.family(parent)
