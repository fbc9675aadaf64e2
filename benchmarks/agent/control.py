"""Wrong answers: greedy answers of a server with a cache, against servers that cache nothing.

Equal tokens do not give equal bytes: a restored prompt is computed in other passes than a cold one, or
beside other requests, and the last bits of a logit differ.  So where an answer leaves the control's, the
control is asked how much less likely it finds the other token: a rounding error swaps tokens that are
nearly equal (``TOLERANCE``), a state that misses one part changes log-probabilities by whole units.

Models that choose (experts, rows for an indexer) can turn a last bit into a whole unit.  What that does to
the benchmark's model shows a second cold server, asked the same with passes of half the size and the same
neighbours (``again``): its answers are judged by the same rule, and both counts are printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from benchmarks.agent.http import Http
from benchmarks.agent.oracle import Played
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


def cold(http: Http, prompt: Tokens, n_answer: int) -> Answer:
    """A greedy answer computed from nothing."""
    body = {"prompt": prompt.tolist(), "n_predict": n_answer, "cache_prompt": False, "n_probs": _N_TOP}
    body |= {"temperature": 0.0, "ignore_eos": True, "return_tokens": True}
    got = http.post("/completion", body)
    top = [
        {int(t["id"]): float(t["logprob"]) for t in at["top_logprobs"]} for at in got["completion_probabilities"]
    ]  # fmt: skip
    return Answer([int(t) for t in got["tokens"]], top)


def distance(answer: Sequence[int], control: Answer) -> float | None:
    """How much less likely the control finds the token with which an answer leaves it; None: it never does."""
    for given, own, top in zip(answer, control.tokens, control.top, strict=False):
        if given != own:
            return top[own] - top[given] if given in top else float("inf")
    return None


def sampled(trace: Sequence[Played], n: int) -> list[int]:
    """Which requests to check: the last ones of long histories and others spread over the run, n in all."""
    return sorted({round(i) for i in np.linspace(0, len(trace) - 1, min(n, len(trace)))})


def judge(http: Http, played: Sequence[Played]) -> Verdict:
    """Answers against those of the control server behind ``http``."""
    equal = ties = wrong = 0
    worst = 0.0
    played = [p for p in played if len(p.answer)]
    for one in played:
        far = distance(one.answer.tolist(), cold(http, one.prompt, len(one.answer)))
        if far is None:
            equal += 1
            continue
        worst = max(worst, far)
        if far <= TOLERANCE:
            ties += 1
        else:
            wrong += 1
    return Verdict(len(played), equal, ties, wrong, worst)


def again(http: Http, trace: Sequence[Played], steps: Sequence[int], chosen: Sequence[int]) -> list[Played]:
    """The chosen requests of a trace as the server behind ``http`` answers them, each beside its neighbours.

    ``steps``: for each request of the trace the step that sent it; requests of one step are sent at once.
    """
    out: list[Played] = []
    with ThreadPoolExecutor(max_workers=16) as pool:
        for i in chosen:
            asked = {
                j: pool.submit(cold, http, trace[j].prompt, len(trace[j].answer))
                for j, step in enumerate(steps)
                if step == steps[i] and len(trace[j].answer)
            }
            answers = {j: future.result() for j, future in asked.items()}
            if i in answers:
                out.append(Played(trace[i].prompt, np.array(answers[i].tokens, np.int32)))
    return out
