"""Wrong answers: greedy answers of a server of ours, against the very same passes uninterrupted.

    served    other work ── 0 ─ 512 ─ 600) ── other work, a restart ── restored at 600: ─ 1024 ─ 1100) answer
    control                 0 ─ 512 ─ 600)                                              ─ 1024 ─ 1100) answer

Equal tokens do not give equal bytes where passes end elsewhere, and a model that chooses (experts, or the rows that
an indexer lets through) turns a last bit into another word, above all with random weights.  So the control computes
what the answer stands on in the same passes: the server says how many tokens a request reused and where its prompt
was cut (``Sample.stops``), which leads from request to request back to the first token.  A fresh server with one slot
is sent prompts that end at those places, one after another; each continues what lies in the slot, so nothing is ever
restored.  Then the answers, and those that came before them, must agree token by token.

Not compared: requests that ran beside others (neighbours count in a pass), chats (no ids come back), and servers
of others (their passes end elsewhere).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.agent.http import Http
from benchmarks.agent.oracle import Played
from benchmarks.agent.servers import Sample, Server
from benchmarks.agent.trace import Tokens

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Verdict:
    compared: int
    wrong: int
    """Answers that differ, or whose control did not even reach them: an earlier answer differed."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One request to the control: read up to the prompt's end, then generate."""

    prompt: Tokens
    answer: Tokens
    """What must come, as far as it is generated; may be empty."""


class Unknown(Exception):
    """Where a state came from cannot be told."""


class Passes:
    """The way of each request of a trace from the first token on.  ``rows_only``: states can be cut anywhere."""

    def __init__(self, trace: Sequence[Played], samples: Sequence[Sample], *, rows_only: bool) -> None:
        self._trace, self._samples, self._rows_only = trace, samples, rows_only

    def to(self, i: int) -> list[Call]:
        """Calls that end with request ``i`` and its whole answer.  Raises Unknown."""
        request = self._trace[i]
        calls = self._leading(i, len(request.prompt))
        if len(calls[-1].prompt) == len(request.prompt):  # read and answered at once
            calls.pop()
        return [*calls, Call(request.prompt, request.answer)]

    def _leading(self, i: int, n: int) -> list[Call]:
        """Calls after which the slot stands at the first n tokens of a request's sequence; rows alone: or beyond."""
        request, sample = self._trace[i], self._samples[i]
        start, end = sample.n_cached, len(request.prompt)
        if n <= start:
            return self._leading(self._source(i, n), n)
        if sample.stops is None:
            raise Unknown
        calls = self._leading(self._source(i, start), start) if start else []
        for stop in sorted({s for s in (*sample.stops, end) if start < s <= end}):
            if n <= stop:
                return [*calls, Call(request.prompt[: stop if self._rows_only else n], _NONE)]
            calls.append(Call(request.prompt[:stop], _NONE))
        # a generated token is evaluated when the next one is
        calls[-1] = Call(request.prompt, request.answer[: n - end + 1])
        return calls

    def _source(self, i: int, n: int) -> int:
        """The latest request before ``i`` that stood at the first n tokens of i's prompt."""
        wanted = self._trace[i].prompt[:n]
        for j in reversed(range(i)):
            sequence = self._trace[j].sequence
            if n <= len(sequence) and np.array_equal(sequence[:n], wanted) and self._stood_at(j, n):
                return j
        raise Unknown

    def _stood_at(self, j: int, n: int) -> bool:
        captured = self._samples[j].reported.get("gufo", {}).get("captured", ())
        live = len(self._trace[j].sequence) - 1
        return self._rows_only or n == live or n in {c["boundary"] for c in captured}


def chosen(trace: Sequence[Played], passes: Passes, n: int) -> list[list[Call]]:
    """The ways of up to n requests that can be compared: the last, and others spread before it."""
    ways = []
    for i in range(len(trace)):
        try:
            ways += [passes.to(i)] if len(trace[i].answer) else []
        except Unknown:
            continue
    n = min(n, len(ways))
    return [ways[len(ways) * k // n - 1] for k in range(1, n + 1)]


def answered(http: Http, call: Call) -> bool:
    """Does the control give the call's answer?"""
    body = {"prompt": call.prompt.tolist(), "n_predict": len(call.answer), "return_tokens": True}
    got = http.post("/completion", {**body, "temperature": 0.0, "ignore_eos": True})
    return bool(got["tokens"] == call.answer.tolist())


def judge(server: Server, trace: Sequence[Played], samples: Sequence[Sample], n: int, *, rows_only: bool) -> Verdict:
    """Compare n answers of a trace; ``server`` has one slot and is restarted for each."""
    wrong = 0
    ways = chosen(trace, Passes(trace, samples, rows_only=rows_only), n)
    for calls in ways:
        server.restart(kill=True)
        wrong += not all(answered(server.http, call) for call in calls)
    return Verdict(len(ways), wrong)
