"""What a workload is made of, independent of any server: requests, pauses, restarts.

A workload is a generator.  It yields what happens next and takes the answers, because a client sends
back what the model said:

    play(sizes)  ── yields Step ──►  player  ── requests ──►  server
        ▲                              │
        └────────── answers ───────────┘

Prompts are token ids where the point is tokens: the workload then decides them, whatever the
tokenizer.  Where the point is what a chat template does to a history, they are messages.  Answers
have a fixed length (end-of-text is banned), so that every server is asked for the same amount of
work even where its answers differ.  With messages the history holds scripted answers, so that all
servers get the same prompts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Message = dict[str, Any]

LOW_ID, HIGH_ID = 20, 500
"""Token ids are drawn from [LOW_ID, HIGH_ID): text in every vocabulary used here, never special."""


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One request."""

    conversation: str
    kind: str
    """What the client is doing: start, turn, edit, undo, title, summary, subagent, resumed."""
    tokens: Tokens | None = None
    messages: tuple[Message, ...] | None = None
    """Exactly one of tokens and messages is given."""
    n_answer: int = 32
    idle_s: float = 0.0
    """Pause before the request, in the time of the real client; the player shortens it."""


@dataclass(frozen=True, slots=True)
class Restart:
    """The server ends and starts again.  ``kill``: by SIGKILL, without a chance to write anything."""

    kill: bool


Step = tuple[Ask, ...] | Restart
"""Requests sent at the same moment, or a restart."""

Answers = list[Tokens]
Script = Generator[Step, Answers, None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Every length of a workload goes through here, so that one number scales them all."""

    scale: float = 1.0
    """1 = the full form."""
    seed: int = 0

    def tokens(self, n: int) -> int:
        return max(8, round(n * self.scale))

    def turns(self, n: int) -> int:
        """Turns shrink more slowly than lengths: a conversation of two turns shows nothing."""
        return max(3, round(n * self.scale**0.5))

    def answer(self, n: int) -> int:
        return max(4, round(n * self.scale))


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    letter: str
    title: str
    script: Callable[[Sizes], Script]
    n_slots: int
    copies: float
    """RAM budget in whole copies of the deepest state of the workload (rows + private state)."""
    disk: bool = False


def rehearse(workload: Workload, sizes: Sizes) -> list[Step]:
    """All steps of a workload, answers made of token LOW_ID: their lengths are those of a real run."""
    script = workload.script(sizes)
    steps: list[Step] = []
    answers: Answers = []
    try:
        step = next(script)
        while True:
            steps.append(step)
            answers = [] if isinstance(step, Restart) else [np.full(a.n_answer, LOW_ID, np.int32) for a in step]
            step = script.send(answers)
    except StopIteration:
        return steps


def n_tokens_at_most(ask: Ask) -> int:
    """Tokens of a prompt and its answer; for messages an upper bound (a token is at least a byte)."""
    if ask.tokens is not None:
        return len(ask.tokens) + ask.n_answer
    return sum(len(json.dumps(m)) + 32 for m in ask.messages or ()) + ask.n_answer


def deepest(workload: Workload, sizes: Sizes) -> int:
    """Tokens of the deepest state of a workload, an upper bound."""
    asks = [ask for step in rehearse(workload, sizes) if not isinstance(step, Restart) for ask in step]
    return max(map(n_tokens_at_most, asks))


class Text:
    """Seeded token text.  The same (seed, label) gives the same tokens, whatever was drawn before."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def draw(self, label: str, n: int) -> Tokens:
        rng = np.random.default_rng([self._seed, *label.encode()])
        return rng.integers(LOW_ID, HIGH_ID, n, dtype=np.int32)

    def lengths(self, label: str, n: int, median: int, largest: int) -> list[int]:
        """n sizes with a long tail: log-normal around the median, at most ``largest``."""
        rng = np.random.default_rng([self._seed, *label.encode()])
        return [int(min(largest, max(8, x))) for x in rng.lognormal(np.log(median), 0.8, n)]


def join(parts: Sequence[Tokens]) -> Tokens:
    return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, np.int32)
