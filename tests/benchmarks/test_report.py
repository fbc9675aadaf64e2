"""Figures that reach a reader: quantiles, verdicts on answers, and the command that fills the README."""

from __future__ import annotations

import pytest

from benchmarks.agent.play import Run
from benchmarks.agent.report import Least, line, quantile, table
from benchmarks.agent.servers import Sample


def test_quantiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert (quantile(values, 0.5), quantile(values, 0.95), quantile(values, 0.0)) == (3.0, 5.0, 1.0)
    assert quantile([float(i) for i in range(1, 101)], 0.95) == 95.0
    assert quantile([7.0], 0.5) == 7.0


def test_a_line_counts_the_first_round_and_times_all() -> None:
    runs = []
    for scale in (1.0, 3.0):
        run = Run("agent", "gufo", wall_s=scale, memory=[{"rss": 5}, {"rss": 7}])
        for i in range(2):
            sample = Sample("agent", "gufo", i, "agent", "turn", n_prompt=100, n_cached=40, n_prefilled=60)
            sample.first_token_ms = scale * (i + 1)
            run.samples.append(sample)
        runs.append(run)
    got = line(runs, Least(common_prefix=100, bound=110.0, prompt_tokens=200), None)
    assert (got.prefilled, got.of_common_prefix, got.of_bound) == (120, 1.2, pytest.approx(120 / 110))
    assert got.first_token_ms == {"p50": 2.0, "p95": 6.0, "max": 6.0}
    assert got.wall_s == [1.0, 3.0] and got.memory == {"rss": 7}
    assert "agent" in table([got])[1] and "1.20" in table([got])[1]
