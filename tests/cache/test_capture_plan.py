"""Where requests leave checkpoints: the article's conversations, and rules that hold for any prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gufo_gguf.cache.capture_plan import grid_allowance, grid_points, plan_captures
from gufo_gguf.cache.types import CacheLimits, CapturePoint, Origin, PromptView, StateShape

GIB = 1 << 30
LIMITS = CacheLimits(ram_bytes=32 * GIB)
FLASH_NEXT = StateShape(row_bytes=27_460, private_bytes=133_000_000, logits_bytes=4 * 248_320)
"""The article's model: bytes per row and of one private state."""


def prompt(n: int, *stable: int, write: bool = True, system_end: int = 0) -> PromptView:
    return PromptView("m", np.zeros(n, dtype=np.int32), stable, system_end, write=write)


def plan(view: PromptView, start: int = 0, **more: Any) -> tuple[CapturePoint, ...]:
    arguments: dict[str, Any] = {
        "start_has_checkpoint": True,
        "common_prefix": start,
        "n_ubatch": 512,
        "limits": LIMITS,
        "grid_budget": 4,
        "private_rows": FLASH_NEXT.private_rows,
    }
    return plan_captures(prompt=view, start=start, **{**arguments, **more})


def brief(points: tuple[CapturePoint, ...]) -> list[tuple[int, str]]:
    return [(p.boundary, p.origin.value) for p in points]


# -- the article's figures -------------------------------------------------------------------------
def test_the_measured_conversation_leaves_six_checkpoints() -> None:
    points = plan(prompt(95_439, 95_434))
    assert brief(points) == [
        (22_528, "grid"),
        (47_104, "grid"),
        (69_632, "grid"),
        (94_208, "grid"),
        (95_434, "prompt"),
        (95_439, "retry"),
    ]
    assert [p.required for p in points] == [False] * 4 + [True, False]
    assert [p.want_logits for p in points] == [False] * 5 + [True]


def test_its_edits_plan_a_grid_over_the_part_to_compute() -> None:
    """The edit at 85,385 restores 69,632 and prefills 25,810: twelve multiples of 2,048 in it, four kept."""
    points = plan(prompt(95_442, 95_437), 69_632, common_prefix=85_384)
    assert brief(points) == [
        (75_776, "grid"),
        (81_920, "grid"),
        (85_384, "learned"),
        (88_064, "grid"),
        (94_208, "grid"),
        (95_437, "prompt"),
        (95_442, "retry"),
    ]


def test_figure_3_a_short_conversation_has_a_dense_grid() -> None:
    assert brief(plan(prompt(8192))) == [(2048, "grid"), (4096, "grid"), (6144, "grid"), (8192, "prompt")]


def test_figure_8_the_first_subagent_learns_the_boundary() -> None:
    points = plan(prompt(8000), 4096, common_prefix=6000)
    assert (6000, "learned") in brief(points)
    # The second one restores it: nothing more to learn there.
    assert "learned" not in {o for _, o in brief(plan(prompt(7000), 6000, common_prefix=6000))}
    # A shared prompt shorter than the grid step is learned by a cold request.
    assert brief(plan(prompt(1900), common_prefix=1500)) == [(1500, "learned"), (1900, "prompt")]


def test_figure_10_where_a_request_leaves_checkpoints() -> None:
    points = plan(prompt(12_000, 11_700), 4096, start_has_checkpoint=False, common_prefix=6000)
    assert brief(points) == [
        (4096, "reused_end"),
        (6000, "learned"),
        (6144, "grid"),
        (8192, "grid"),
        (10_240, "grid"),
        (11_700, "prompt"),
        (12_000, "retry"),
    ]


# -- the grid --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("start", "end", "at_most", "expected"),
    [
        (0, 95_439, 4, (22_528, 47_104, 69_632, 94_208)),
        # fewer than there could be, for want of RAM: the prompt's end serves the last stretch
        (0, 95_439, 2, (30_720, 61_440)),
        (0, 95_439, 1, (47_104,)),
        (0, 6_900, 3, (2048, 4096, 6144)),
        (0, 6_900, 2, (2048, 4096)),
        (0, 95_439, 0, ()),
        (0, 2048 + 127, 4, ()),
        (0, 2048 + 128, 4, (2048,)),
        (2048, 4096 + 128, 4, (4096,)),
        (2049, 4096 + 128, 4, (4096,)),
        (4095, 4096 + 128, 4, (4096,)),
        (4096, 4096 + 128, 4, ()),
        (100, 50, 4, ()),
    ],
)
def test_grid_points(start: int, end: int, at_most: int, expected: tuple[int, ...]) -> None:
    assert grid_points(start, end, LIMITS, max_points=at_most) == expected


def test_a_grid_point_moves_to_a_pass_end_within_128() -> None:
    # Passes of 1,000 tokens end at 2,000 (48 below 2,048), 4,000 (96 below) and 6,000 (144 below).
    assert brief(plan(prompt(8000), n_ubatch=1000))[:3] == [(2000, "grid"), (4000, "grid"), (6144, "grid")]
    # A pass end above is as good as one below; the closer one wins.
    assert brief(plan(prompt(2500), n_ubatch=2100))[0] == (2100, "grid")
    # One pass that holds everything ends nowhere near.
    assert brief(plan(prompt(2500), n_ubatch=100_000))[0] == (2048, "grid")


def test_a_grid_point_yields_to_an_exact_stop_nearby() -> None:
    assert brief(plan(prompt(3000, 2000))) == [(2000, "prompt"), (3000, "retry")]
    assert brief(plan(prompt(3000, 1919))) == [(1919, "prompt"), (2048, "grid"), (3000, "retry")]
    # The reused history ended just before: a checkpoint lies there or is captured there.
    assert brief(plan(prompt(3000), 2000)) == [(3000, "prompt")]
    assert brief(plan(prompt(3000), 2000, start_has_checkpoint=False)) == [(2000, "reused_end"), (3000, "prompt")]


def test_fewer_grid_points_under_a_small_budget() -> None:
    def allowed(gib: float, n_tokens: int = 95_439, **more: Any) -> int:
        return grid_allowance(FLASH_NEXT, CacheLimits(ram_bytes=int(gib * GIB), **more), n_tokens)

    assert [allowed(g) for g in (0, 4, 5.8, 5.9, 6.2, 9, 32)] == [0, 0, 0, 1, 2, 4, 4]
    assert [allowed(32, max_checkpoints=n) for n in (128, 16, 8, 4)] == [4, 2, 1, 0]
    rows_only = StateShape(row_bytes=1000, private_bytes=0, logits_bytes=4)
    assert grid_allowance(rows_only, LIMITS, 10_000) == 0
    recurrent = StateShape(row_bytes=0, private_bytes=1 << 20, logits_bytes=4)
    assert grid_allowance(recurrent, CacheLimits(ram_bytes=16 << 20), 10_000) == 4


# -- the learned point -----------------------------------------------------------------------------
def test_a_learned_point_needs_512_tokens_and_merges_backwards_only() -> None:
    assert "learned" not in {o for _, o in brief(plan(prompt(3000), 100, common_prefix=611))}
    assert (612, "learned") in brief(plan(prompt(3000), 100, common_prefix=612))
    # Up to 64 tokens past a planned capture it is that capture.
    assert brief(plan(prompt(3000), common_prefix=2048 + 64)) == [(2048, "learned"), (3000, "prompt")]
    # Further on it is a stop of its own; the grid point next to it would be a second copy.
    assert brief(plan(prompt(3000), common_prefix=2048 + 65)) == [(2113, "learned"), (3000, "prompt")]
    assert brief(plan(prompt(3000), common_prefix=2048 + 129))[:2] == [(2048, "grid"), (2177, "learned")]
    # Never moved past the divergence: the grid point comes to it instead.
    assert brief(plan(prompt(3000), common_prefix=2040)) == [(2040, "learned"), (3000, "prompt")]
    # A stable boundary shortly after the divergence stays: it is exact.
    assert brief(plan(prompt(3000, 1030), common_prefix=1000))[:2] == [(1000, "learned"), (1030, "prompt")]
    # One shortly before takes it in, and stays what it is.
    assert brief(plan(prompt(3000, 990), common_prefix=1000))[0] == (990, "prompt")


# -- the end of the system prompt --------------------------------------------------------------------
def test_the_end_of_the_system_prompt_follows_the_rule_of_learned_points() -> None:
    assert brief(plan(prompt(7000, 6990, system_end=6050))) == [
        (2048, "grid"),
        (4096, "grid"),
        (6050, "system"),  # the grid point at 6,144 would be a second copy of it
        (6990, "prompt"),
        (7000, "retry"),
    ]
    # It is kept at others' expense where it restores more than it takes, and RAM is not short.
    for n, more, required in ((4843, {}, False), (4844, {}, True), (6050, {"grid_budget": 0}, False)):
        (point,) = [p for p in plan(prompt(7000, 6990, system_end=n), **more) if p.origin is Origin.SYSTEM]
        assert (point.boundary, point.required) == (n, required)
    # Too short, or nearly restored: not worth a state.
    assert "system" not in {o for _, o in brief(plan(prompt(3000, system_end=511)))}
    assert (512, "system") in brief(plan(prompt(3000, system_end=512)))
    assert "system" not in {o for _, o in brief(plan(prompt(7000, system_end=6000), 5500, common_prefix=5500))}
    # Seen twice, it is a learned point, also when the questions begin with the same words.
    assert (6000, "learned") in brief(plan(prompt(7000, system_end=6000), 4096, common_prefix=6000))
    two_words = brief(plan(prompt(7000, system_end=6000), 4096, common_prefix=6003))
    assert (6000, "learned") in two_words and 6003 not in dict(two_words)
    # A short question does not move it: the stable boundary holds the question.
    assert brief(plan(prompt(1010, 1005, system_end=1000)))[:2] == [(1000, "system"), (1005, "prompt")]
    # A prompt of nothing else.
    assert brief(plan(prompt(1000, system_end=1000))) == [(1000, "prompt")]
    assert brief(plan(prompt(3000, system_end=2000), rows_only=True)) == [(3000, "prompt")]


# -- exact points ----------------------------------------------------------------------------------
def test_stable_boundaries() -> None:
    # Both renderings count when they differ; what was reused already is not computed again.
    assert brief(plan(prompt(1000, 400, 990))) == [(400, "prompt"), (990, "prompt"), (1000, "retry")]
    assert brief(plan(prompt(1000, 400, 990), 500)) == [(990, "prompt"), (1000, "retry")]
    # Nothing is stable: the prompt end is the prompt checkpoint, with its logits.
    (point,) = plan(prompt(1000))
    assert point == CapturePoint(1000, Origin.PROMPT, required=True, want_logits=True)
    assert plan(prompt(1000, 1000)) == (point,)
    # The reused history ends exactly at a stable boundary that has no checkpoint yet.
    assert brief(plan(prompt(1000, 400), 400, start_has_checkpoint=False)) == [(400, "prompt"), (1000, "retry")]


def test_an_identical_resend_plans_nothing() -> None:
    assert plan(prompt(1000, 990), 1000) == ()
    assert brief(plan(prompt(1000, 990), 1000, start_has_checkpoint=False)) == [(1000, "retry")]


def test_requests_that_may_not_write_or_have_no_tokens() -> None:
    assert plan(prompt(9000, 8000, write=False)) == ()
    assert plan(prompt(0)) == ()


def test_rows_only_models_need_the_prompt_boundaries_alone() -> None:
    points = plan(prompt(9000, 8990), 100, start_has_checkpoint=False, common_prefix=6000, rows_only=True)
    assert brief(points) == [(8990, "prompt"), (9000, "retry")]


# -- any prompt ------------------------------------------------------------------------------------
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_rules_of_any_plan(data: st.DataObject) -> None:
    end = data.draw(st.integers(1, 20_000), "end")
    start = data.draw(st.integers(0, end), "start")
    stable = tuple(sorted(data.draw(st.sets(st.integers(1, end), max_size=2), "stable")))
    common = data.draw(st.integers(start, end), "common")
    ubatch = data.draw(st.sampled_from([1, 100, 500, 512, 1000, 2048, 100_000]), "ubatch")
    has = data.draw(st.booleans(), "has") or start == 0
    budget = data.draw(st.integers(0, 4), "budget")
    system_end = data.draw(st.integers(0, end), "system end")
    points = plan(
        prompt(end, *stable, system_end=system_end),
        start,
        start_has_checkpoint=has,
        common_prefix=common,
        n_ubatch=ubatch,
        grid_budget=budget,
    )
    at = {p.boundary: p for p in points}
    assert list(at) == sorted(at) and len(at) == len(points), "ascending, each boundary once"
    assert all(max(start, 1) <= b <= end for b in at)
    assert len(points) <= budget + len(stable) + 4
    # Exact positions are there, unless a checkpoint already is.
    for boundary in [*(b for b in stable if b > start), end]:
        assert boundary in at or (boundary == start and has)
    assert (start in at) == (start > 0 and not has)
    # Grid points: a multiple of the step, or a pass end within 128; never crowding an exact stop.
    grid = [b for b in at if at[b].origin is Origin.GRID]
    exact = [b for b in at if at[b].required]
    for b in grid:
        assert b % 2048 == 0 or (b % ubatch == 0 and min(b % 2048, -b % 2048) <= 128)
        assert b <= end - 128 and b > start
        assert all(abs(b - e) > 128 for e in exact)
    # Learned point and end of the system prompt serve the next prompt that parts there, worth at least 512 tokens.
    for origin, parts_at in ((Origin.LEARNED, common), (Origin.SYSTEM, system_end)):
        points_there = [b for b in at if at[b].origin is origin]
        assert len(points_there) <= 1
        if parts_at - start >= 512:
            assert any(parts_at - 64 <= b <= parts_at for b in at)
            assert all(parts_at - 64 <= b <= parts_at for b in points_there)
        else:
            assert not points_there
