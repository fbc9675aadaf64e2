"""What a played trace would have cost at best, knowing nothing of our code: only the tokens.

    request u   [ common with some earlier history )[ new )
                 0 ................ lcp(u) ........... len(prompt)

* ``common_prefix``: tokens that lie beyond the longest common prefix with any earlier sequence, that is
  prompts and what was generated after them.  It is what a rows-only model with unlimited memory could
  do, and nobody can do better.
* ``bound.least_prefilled``: the same under a byte budget, for states that can be restored at exact
  boundaries only.

Requests of one step run at the same moment; in both, earlier ones of the step count as history
(they could be waited for).  A prompt that was seen whole costs nothing (its logits can be kept).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.agent.trace import Tokens


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """One request of a trace as it was carried out."""

    prompt: Tokens
    answer: Tokens
    """What was generated after it; the last token need not have been evaluated."""

    @property
    def sequence(self) -> Tokens:
        return np.concatenate([self.prompt, self.answer])


def lcp(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def common_prefix(trace: Sequence[Played]) -> list[int]:
    """For each request, the tokens that no earlier history covers."""
    sequences: list[Tokens] = []
    least: list[int] = []
    for request in trace:
        best = max((lcp(s, request.prompt) for s in sequences), default=0)
        least.append(len(request.prompt) - best)
        sequences.append(request.sequence)
    return least
