"""What used to be here: why a prompt that once had a restore point has none now.

A bounded memory of removed checkpoints by the digest of their history, so that a miss can say
"evicted" instead of "no checkpoint".  It explains and never decides: a digest is no proof of equal
tokens, and nothing is restored from here.  Tokens themselves are not kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import xxhash

from gufo_gguf.cache.types import InputMark, MissReason, Tokens

_GhostKey = tuple[str, int, bytes]


class Ghosts:
    """At most ``capacity`` removed checkpoints, oldest forgotten first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[_GhostKey, MissReason] = OrderedDict()
        self._depths: dict[str, dict[int, int]] = {}
        """Per scope: how many ghosts lie at a depth."""

    def __len__(self) -> int:
        return len(self._reasons)

    def add(self, scope: str, tokens: Tokens, inputs: Sequence[InputMark], reason: MissReason) -> None:
        """Remember that the state after exactly these tokens went, and why."""
        if self._capacity <= 0:
            return
        key = _key(scope, tokens, inputs)
        self._drop(key)
        self._reasons[key] = reason
        depths = self._depths.setdefault(scope, {})
        depths[len(tokens)] = depths.get(len(tokens), 0) + 1
        if len(self._reasons) > self._capacity:
            self._drop(next(iter(self._reasons)))

    def discard(self, scope: str, tokens: Tokens, inputs: Sequence[InputMark]) -> None:
        """The state is back."""
        if len(tokens) in self._depths.get(scope, ()):
            self._drop(_key(scope, tokens, inputs))

    def deepest(
        self, scope: str, tokens: Tokens, inputs: Sequence[InputMark], upto: int
    ) -> tuple[int, MissReason] | None:
        """The deepest ghost that is a prefix of the prompt, at most ``upto`` tokens deep.

        One pass over the tokens, whatever the number of ghosts.
        """
        depths = sorted(d for d in self._depths.get(scope, ()) if d <= upto)
        if not depths:
            return None
        digest, done = xxhash.xxh3_128(), 0
        best: tuple[int, MissReason] | None = None
        raw = np.ascontiguousarray(tokens).data.cast("B")
        size = tokens.itemsize
        for depth in depths:
            digest.update(raw[done * size : depth * size])
            done = depth
            reason = self._reasons.get((scope, depth, _closed(digest, inputs, depth)))
            if reason is not None:
                best = (depth, reason)
        return best

    def _drop(self, key: _GhostKey) -> None:
        if self._reasons.pop(key, None) is None:
            return
        scope, depth, _ = key
        depths = self._depths[scope]
        depths[depth] -= 1
        if not depths[depth]:
            del depths[depth]
        if not depths:
            del self._depths[scope]

    def check(self) -> list[str]:
        counted: dict[str, dict[int, int]] = {}
        for scope, depth, _ in self._reasons:
            depths = counted.setdefault(scope, {})
            depths[depth] = depths.get(depth, 0) + 1
        faults = [] if counted == self._depths else ["ghosts: depths and reasons differ"]
        if len(self._reasons) > max(0, self._capacity):
            faults.append(f"ghosts: {len(self._reasons)} of at most {self._capacity}")
        return faults


def _key(scope: str, tokens: Tokens, inputs: Sequence[InputMark]) -> _GhostKey:
    return scope, len(tokens), _closed(xxhash.xxh3_128(np.ascontiguousarray(tokens).data), inputs, len(tokens))


def _closed(digest: xxhash.xxh3_128, inputs: Sequence[InputMark], depth: int) -> bytes:
    """Digest of the tokens so far and of the inputs that start among them."""
    marks = sorted((m.position, m.digest) for m in inputs if m.position < depth) if inputs else []
    if marks:
        digest = digest.copy()
        digest.update(repr(marks).encode())
    return digest.digest()
