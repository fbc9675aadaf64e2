"""How a control retraces what an answer stands on: the same passes, from the first token on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.agent.control import Call, Passes, Unknown, chosen
from benchmarks.agent.oracle import Played
from benchmarks.agent.servers import Sample

A = list(range(100, 140))


class Trace:
    def __init__(self) -> None:
        self.played: list[Played] = []
        self.samples: list[Sample] = []

    def add(self, prompt: list[int], answer: list[int], cached: int, captured: list[int], stops: Any = ()) -> None:
        self.played.append(Played(np.array(prompt, np.int32), np.array(answer, np.int32)))
        sample = Sample("w", "gufo", len(self.samples), "c", "turn", n_cached=cached)
        sample.reported = {"gufo": {"captured": [{"boundary": b, "origin": "grid"} for b in captured]}}
        sample.stops = None if stops is None else list(stops or captured)
        self.samples.append(sample)

    def way(self, i: int, *, rows_only: bool = False) -> list[tuple[int, list[int]]]:
        calls = Passes(self.played, self.samples, rows_only=rows_only).to(i)
        for call in calls[: 0 if rows_only else -1]:
            assert call.prompt.tolist() == (self.played[i].sequence[: len(call.prompt)]).tolist()
        assert calls[-1].prompt is self.played[i].prompt
        return [(len(c.prompt), c.answer.tolist()) for c in calls]


def test_a_cold_request_is_cut_where_it_was_cut() -> None:
    t = Trace()
    t.add(A[:30], [1, 2, 3], 0, [10, 20], stops=[10, 20, 25])
    assert t.way(0) == [(10, []), (20, []), (25, []), (30, [1, 2, 3])], "a refused capture cut the pass as well"


def test_what_was_generated_is_generated_again() -> None:
    t = Trace()
    t.add(A[:30], [1, 2, 3], 0, [30])
    t.add([7] * 9, [9], 0, [9])  # another conversation
    t.add([*A[:30], 1, 2, 5], [4, 4], 32, [33])  # the last token of an answer is not evaluated
    t.add([*A[:30], 1, 2, 5, 4, 6], [8], 34, [35])
    assert t.way(2) == [(30, [1, 2, 3]), (33, [4, 4])]
    assert t.way(3) == [(30, [1, 2, 3]), (33, [4, 4]), (35, [8])]


def test_an_edit_starts_where_its_checkpoint_was_captured() -> None:
    t = Trace()
    t.add(A[:30], [1], 0, [10, 20, 30])
    t.add([*A[:25], 7, 8], [2], 20, [27])
    t.add([*A[:15], 9], [3], 10, [16])
    t.add([*A[:25], 7, 8, 2, 1], [5], 27, [29])
    assert t.way(1) == [(10, []), (20, []), (27, [2])]
    assert t.way(2) == [(10, []), (16, [3])]
    assert t.way(3) == [(10, []), (20, []), (27, []), (29, [5])]


def test_an_identical_resend_reads_nothing() -> None:
    t = Trace()
    t.add(A[:30], [1, 2], 0, [20, 30])
    t.add(A[:30], [1, 2], 30, [])
    t.add([*A[:30], 1], [2], 31, [])  # the state after an answer, its logits kept
    assert t.way(1) == [(20, []), (30, [1, 2])]
    assert t.way(2) == [(20, []), (30, [1, 2]), (31, [2])]


def test_the_latest_that_stood_there_is_the_source() -> None:
    t = Trace()
    t.add(A[:20], [1], 0, [20])
    t.add(A[:30], [1], 0, [10, 20, 30])  # evicted in between: computed again, in other passes
    t.add([*A[:20], 5], [1], 20, [21])
    assert t.way(2) == [(10, []), (20, []), (21, [1])]


def test_rows_alone_are_cut_in_the_slot() -> None:
    t = Trace()
    t.add(A[:30], [1, 2], 0, [30])
    t.add([*A[:25], 7], [2], 25, [26])
    assert t.way(1, rows_only=True) == [(30, []), (26, [2])]


def test_what_ran_beside_others_is_not_compared() -> None:
    t = Trace()
    t.add(A[:30], [1, 2], 0, [30], stops=None)
    t.add([*A[:30], 1, 5], [2], 31, [32])
    t.add([7] * 9, [9], 0, [9])
    t.add([7] * 8, [9], 5, [8])  # 5 is no place where anything stood
    passes = Passes(t.played, t.samples, rows_only=False)
    for i in (0, 1, 3):
        with pytest.raises(Unknown):
            passes.to(i)
    (way,) = chosen(t.played, passes, 4)
    assert isinstance(way[0], Call) and way[0].prompt.tolist() == [7] * 9


def test_checked_requests_are_spread_and_include_the_last() -> None:
    t = Trace()
    for n in range(1, 10):
        t.add(A[n : n + 5], [1], 0, [])
    passes = Passes(t.played, t.samples, rows_only=False)
    assert [int(w[0].prompt[0]) - 101 for w in chosen(t.played, passes, 3)] == [2, 5, 8]
    assert len(chosen(t.played, passes, 20)) == 9
