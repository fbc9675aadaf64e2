"""The command that puts results into the README touches what lies between its marks, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.table import fill

TEXT = """before
<!-- results: agent -->
stale
<!-- /results -->
between
<!-- results: serve -->
kept
<!-- /results -->
"""


def agent_results(folder: Path) -> None:
    line = {
        "workload": "edits", "prompt_tokens": 9000, "first_token_ms": {"p50": 1.0, "p95": 2.0, "max": 3.0},
        "of_bound": 1.07, "of_common_prefix": 1.2, "answers": {"wrong": 0, "compared": 6},
    }  # fmt: skip
    gufo = {**line, "server": "gufo", "prefilled": 1200, "wall_s": [2.0, 4.0, 3.0], "cpu_s": [1.0, 1.0, 1.0]}
    llama = {
        **line,
        "server": "llama",
        "prefilled": 4000,
        "answers": {"wrong": 1, "compared": 6},
        "wall_s": [6.0, 6.0, 6.0],
        "cpu_s": [4.0, 4.0, 4.0],
    }
    data = {
        "environment": {"cores": 2},
        "settings": {"model": "tiny", "scale": 0.2, "threads": 1, "rounds": 3},
        "lines": [gufo, llama],
    }
    (folder / "agent-tiny.json").write_text(json.dumps(data))


def test_marked_parts_are_written_and_the_rest_stays(tmp_path: Path) -> None:
    agent_results(tmp_path)
    got = fill(TEXT, tmp_path)
    assert got.startswith("before\n<!-- results: agent -->\n") and "stale" not in got
    row = "| (d) edits and undo | 9,000 | 1,200 | 1.07 | 1.20 | 4,000 | 0.50 (0.25) | 1 / 2 / 3 ms | 0 of 6 |"
    assert row in got
    assert "between\n<!-- results: serve -->\nkept\n<!-- /results -->\n" in got  # no results: left alone
    assert fill(got, tmp_path) == got  # writing twice changes nothing


def test_what_each_choice_earns_is_two_tables(tmp_path: Path) -> None:
    data = {
        "workloads": ["agent"], "shape": "tiny", "scale": 1.0, "prefilled": {"agent": 1000}, "of_bound": {"agent": 1.1},
        "rows": [{"what": "no grid", "ratio": {"agent": 1.5}, "copied": {"agent": 1.0}}],
        "whole_over_shared": {"agent": 3.0},
        "served": {"scale": 0.2, "prefilled": {"thinking": {"gufo": 100, "gufo-stable": 325, "gufo-disk": 100}}},
    }  # fmt: skip
    (tmp_path / "ablations.json").write_text(json.dumps(data))
    got = fill("<!-- results: ablations -->\n<!-- /results -->\n", tmp_path)
    assert "| no grid: prefilled, x | 1.50 |" in got
    assert "| no stable boundary: prefilled, x | 3.25 |" in got and "| no disk: prefilled, x | 1.00 |" in got


def test_results_of_other_benchmarks_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "serve-something.json").write_text('{"environment": {}}')
    assert fill(TEXT, tmp_path) == TEXT


def test_without_results_nothing_changes(tmp_path: Path) -> None:
    assert fill(TEXT, tmp_path) == TEXT
