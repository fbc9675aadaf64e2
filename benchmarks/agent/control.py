"""Wrong answers: greedy answers of a server, against the same conversation alone on a fresh one of ours.

    served    turn 1 ── turn 2 ── (another conversation, an edit, a restart) ── restored: turn 3
    control   turn 1 ── turn 2 ── turn 3          never interrupted, so nothing is ever restored

The control does what the conversation did, token by token where that was generated, with the same budget and
so with the same pass ends: a cold run would read earlier answers in passes, llama-server ends its passes
elsewhere, and equal tokens do not give equal bytes then.  Passes still differ where a request was served from
a point that is no end of a turn, and neighbours in a pass count too.  So where an answer leaves the control's,
the control is asked how much less likely it finds the other token: a rounding error swaps tokens that are nearly
equal (``TOLERANCE``), a state that misses one part changes log-probabilities by whole units.  A model that
chooses (experts, or the rows that an indexer lets through) can turn a last bit into more than that, above all
with random weights; what that does to a workload is seen in the answers of the other servers, which are judged
by the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.agent.http import Http
from benchmarks.agent.oracle import Played
from benchmarks.agent.servers import Server
from benchmarks.agent.trace import Tokens

TOLERANCE = 0.1
"""In nats."""
_N_TOP = 50


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    top: list[dict[int, float]]
    """Per token: the likeliest ids and their log-probabilities."""


@dataclass(frozen=True, slots=True)
class Verdict:
    compared: int
    equal: int
    """Answers equal token by token."""
    near_ties: int
    """Answers that part where the control finds both tokens within the tolerance."""
    wrong: int
    worst: float
    """Largest distance in nats where an answer parts."""


def ask(http: Http, prompt: Tokens, n_answer: int, n_top: int = _N_TOP) -> Answer:
    """A greedy answer."""
    body = {"prompt": prompt.tolist(), "n_predict": n_answer, "n_probs": n_top}
    body |= {"temperature": 0.0, "ignore_eos": True, "return_tokens": True}
    got = http.post("/completion", body)
    top = [
        {int(t["id"]): float(t["logprob"]) for t in at["top_logprobs"]}
        for at in got.get("completion_probabilities") or ()
    ]
    return Answer([int(t) for t in got["tokens"]], top)


def ancestors(trace: Sequence[Played], i: int) -> list[int]:
    """The earlier requests that request ``i`` continues, oldest first."""
    found = []
    for j in range(i):
        before = trace[j].sequence[:-1]  # the last token need not have been evaluated
        if len(before) <= len(trace[i].prompt) and np.array_equal(trace[i].prompt[: len(before)], before):
            found.append(j)
    return sorted(found, key=lambda j: len(trace[j].prompt))


def uninterrupted(server: Server, trace: Sequence[Played], i: int) -> Answer:
    """The answer to request ``i`` on a server with one slot that begins anew and does what the conversation did."""
    server.restart(kill=True)
    for j in ancestors(trace, i):
        ask(server.http, trace[j].prompt, len(trace[j].answer), n_top=0)
    return ask(server.http, trace[i].prompt, len(trace[i].answer))


def distance(answer: Sequence[int], control: Answer) -> float | None:
    """How much less likely the control finds the token with which an answer leaves it; None: it never does."""
    for given, own, top in zip(answer, control.tokens, control.top, strict=False):
        if given != own:
            return top[own] - top[given] if given in top else float("inf")
    return None


def sampled(trace: Sequence[Played], n: int) -> list[int]:
    """Which requests to check: the last ones of long histories and others spread over the run, n in all."""
    return sorted({round(i) for i in np.linspace(0, len(trace) - 1, min(n, len(trace)))})


def judge(server: Server, trace: Sequence[Played], n: int) -> Verdict:
    """Check n answers of a trace; ``server`` has one slot and is restarted for each."""
    equal = ties = wrong = 0
    worst = 0.0
    chosen = [i for i in sampled(trace, n) if len(trace[i].answer)]
    for i in chosen:
        far = distance(trace[i].answer.tolist(), uninterrupted(server, trace, i))
        if far is None:
            equal += 1
            continue
        worst = max(worst, far)
        if far <= TOLERANCE:
            ties += 1
        else:
            wrong += 1
    return Verdict(len(chosen), equal, ties, wrong, worst)
