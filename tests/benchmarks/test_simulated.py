"""Token workloads on the real cache without a model: nothing below the oracle, and the design's promises."""

from __future__ import annotations

import pytest

from benchmarks.agent.oracle import common_prefix
from benchmarks.agent.simulated import SHAPES, Options, simulate
from benchmarks.agent.trace import Sizes
from benchmarks.agent.workloads import by_name

SIZES = Sizes(0.1)


@pytest.mark.parametrize("name", ["agent", "subagents", "rotating", "edits", "side", "compaction", "starts"])
def test_no_request_beats_the_oracle(name: str) -> None:
    run, _ = simulate(by_name(name)[0], SIZES, Options(SHAPES["tiny"]))
    least = common_prefix(run.trace)
    assert len(run.samples) == len(least)
    # within one step the leader is whichever request was admitted first
    assert run.prefilled >= sum(least)
    assert all(s.n_cached + s.n_prefilled == s.n_prompt for s in run.samples)


def test_appending_costs_one_token_a_turn_over_the_oracle() -> None:
    run, _ = simulate(by_name("agent")[0], SIZES)
    least = common_prefix(run.trace)
    assert [s.n_prefilled - n for s, n in zip(run.samples, least, strict=True)][1:] == [1] * (len(least) - 1)


def test_a_run_repeats_exactly() -> None:
    one, other = (simulate(by_name("rotating")[0], SIZES)[0] for _ in range(2))
    assert [s.n_prefilled for s in one.samples] == [s.n_prefilled for s in other.samples]
    assert [s.answer for s in one.samples] == [s.answer for s in other.samples]
