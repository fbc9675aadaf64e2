"""Two minutes of the soak; an hour of it is ``python -m tests.soak --minutes 60``."""

from __future__ import annotations

import random

import pytest

from tests.soak.agents import Tally, word
from tests.soak.soak import Report, soak


@pytest.mark.native
@pytest.mark.slow
def test_two_minutes_of_agents() -> None:
    report = soak(2.0, seed=1, sessions=3, model=None)
    assert report.problems() == [], report.summary()


def test_a_leak_and_an_empty_run_are_problems() -> None:
    tally = Tally()
    tally.counts.update({"facts right": 5, "clients killed": 2})
    flat = [100 << 20] * 100
    assert Report(1, tally, flat).problems() == []
    assert any("memory grew" in p for p in Report(1, tally, [(100 + i) << 20 for i in range(100)]).problems())
    assert any("shows nothing" in p for p in Report(1, Tally(), flat).problems())
    tally.fail("x")
    assert Report(1, tally, flat).problems() == ["x"]


def test_words_differ() -> None:
    draw = random.Random(1)
    assert len({word(draw) for _ in range(200)}) > 195
