"""Each part of the cache can be left out alone, and leaving it out does what its name says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.agent.simulated import SHAPES, Options, Simulation, simulate
from benchmarks.agent.trace import Sizes
from benchmarks.agent.workloads import by_name
from gufo_gguf.cache.types import CacheLimits, Origin
from gufo_gguf.core.errors import ConfigError
from gufo_gguf.engine.ablation import Ablation, Part

LIMITS = CacheLimits(ram_bytes=1 << 20)
SIZES = Sizes(0.6)


def world(name: str, *without: Part) -> tuple[Simulation, set[str]]:
    """A played workload, and the origins of all captures in it."""
    options = replace(Options(SHAPES["tiny"]), ablation=Ablation(frozenset(without)))
    run, simulation = simulate(by_name(name)[0], SIZES, options)
    return simulation, {origin for s in run.samples for _, origin in s.reported["captured"]}


def test_nothing_is_left_out_by_default() -> None:
    assert Ablation().limits(LIMITS) == LIMITS
    assert Ablation().stable((3, 5)) == (3, 5)
    assert Ablation().shared_prefix_min(512) == 512 and not Ablation().eager_copies


def test_a_wrong_name_lists_the_right_ones() -> None:
    assert Ablation.named(["grid", "leader"]).without == {Part.GRID, Part.LEADER}
    with pytest.raises(ConfigError, match="learned"):
        Ablation.named(["grit"])


def test_without_stable_boundaries_the_prompt_has_none() -> None:
    assert Ablation(frozenset({Part.STABLE})).stable((3, 5)) == ()


def test_without_grid_and_learned_points_none_are_captured() -> None:
    assert {Origin.GRID, Origin.LEARNED} <= world("subagents")[1]
    assert Origin.GRID not in world("subagents", Part.GRID)[1]
    assert Origin.LEARNED not in world("subagents", Part.LEARNED)[1]


def test_without_borrowing_rows_are_copied_while_requests_run() -> None:
    lent, eager = world("agent")[0], world("agent", Part.BORROW)[0]
    assert eager.copied_bytes > 2 * lent.copied_bytes
    assert eager.manager.stats().chunks_borrowed == 0


def test_without_a_leader_each_start_computes_the_prefix_itself() -> None:
    workload, options = by_name("starts")[0], Options(SHAPES["tiny"])
    whole, _ = simulate(workload, SIZES, options)
    alone, _ = simulate(workload, SIZES, replace(options, ablation=Ablation(frozenset({Part.LEADER}))))
    assert alone.prefilled > 2 * whole.prefilled
