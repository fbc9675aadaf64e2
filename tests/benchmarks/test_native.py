"""A small agent's day against a real server with a tiny model: nothing computed twice, no wrong answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.agent import control
from benchmarks.agent.__main__ import make_server, setup_of
from benchmarks.agent.bound import State
from benchmarks.agent.oracle import common_prefix
from benchmarks.agent.play import Run, play
from benchmarks.agent.servers import Gufo, Setup
from benchmarks.agent.trace import Sizes
from benchmarks.agent.workloads import by_name
from benchmarks.models import state_of
from tests.conftest import tiny_model_path

pytestmark = [pytest.mark.native, pytest.mark.slow]
SIZES = Sizes(0.05)


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model_path("qwen4exp")


def run_on(name: str, setup: Setup, workload: str) -> Run:
    server = make_server(name, setup)
    try:
        server.start()
        return play(by_name(workload)[0], SIZES, server, pace=0.001)
    finally:
        server.stop()


def setup_for(workload: str, model: Path) -> Setup:
    return setup_of(by_name(workload)[0], SIZES, model, state_of(model), 1)


def test_a_conversation_prefills_what_is_new_and_answers_right(model: Path) -> None:
    setup = setup_for("edits", model)
    run = run_on("gufo", setup, "edits")
    least = common_prefix(run.trace)
    assert sum(least) <= run.prefilled < 2 * sum(least)
    assert all(s.first_token_ms > 0 and s.total_ms >= s.first_token_ms for s in run.samples)
    assert run.cpu_s > 0 and run.memory[-1]["retained"] <= run.memory[-1]["whole_copies"]
    alone = Gufo(setup)
    try:
        alone.start()
        verdict = control.judge(alone, run.trace, run.samples, len(run.trace), rows_only=False)
        changed = replace(run.trace[-1], answer=run.trace[-1].answer[::-1])
        seen = control.judge(alone, [*run.trace[:-1], changed], run.samples, 2, rows_only=False)
    finally:
        alone.stop()
    assert (verdict.compared, verdict.wrong) == (len(run.trace), 0), "to the last token, whatever was restored"
    assert {s.reported["gufo"]["reuse_source"] for s in run.samples} >= {"ram", "live"}
    assert (seen.compared, seen.wrong) == (2, 1), "a changed answer is seen"


def test_thinking_that_is_not_sent_back_costs_nothing(model: Path) -> None:
    setup = setup_for("thinking", model)
    run = run_on("gufo", setup, "thinking")
    assert run.prefilled <= 1.15 * sum(common_prefix(run.trace))
    without = run_on("gufo-stable", setup, "thinking")
    assert without.prefilled >= run.prefilled  # this template repeats the opening: prompt ends are stable here


@pytest.mark.parametrize("workload", ["restart", "kill"])
def test_a_restart_loses_little(model: Path, workload: str) -> None:
    run = run_on("gufo", setup_for(workload, model), workload)
    resumed = next(s for s in run.samples if s.kind == "resumed")
    if workload == "restart":
        assert resumed.n_cached > resumed.n_prompt // 2
    assert run.samples[-1].n_cached > 0


def test_the_state_of_the_model_is_what_the_budget_counts_in(model: Path) -> None:
    state = state_of(model)
    assert isinstance(state, State) and state.row_bytes > 0 and state.private_bytes > 0
    assert setup_for("rotating", model).ram_bytes >= 4 * state.private_bytes
