"""Two minutes of the soak; an hour of it is ``python -m tests.soak --minutes 60``."""

from __future__ import annotations

import math
import random

import pytest

from tests.soak.agents import Control, Tally, word
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
    tally.counts["facts near a tie"] = 3
    assert any("rounding" in p for p in Report(1, tally, flat).problems())
    tally.counts["facts near a tie"] = 2
    tally.fail("x")
    assert Report(1, tally, flat).problems() == ["x"]


def test_how_sure_a_control_was_where_the_answers_part() -> None:
    control = Control("penegon.", [[("pen", -0.1), ("x", -4.0)], [("egon", -0.7), ("gon", -0.9), ("e", -3.0)]])
    assert control.margin("pengon") == pytest.approx(0.2)
    assert control.margin("penegon.") == math.inf, "they do not part"
    assert control.margin("xyz") == pytest.approx(3.9)
    assert control.margin("quite another") == math.inf, "none of the likeliest"


def test_words_differ() -> None:
    draw = random.Random(1)
    assert len({word(draw) for _ in range(200)}) > 195
