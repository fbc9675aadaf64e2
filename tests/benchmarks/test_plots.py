"""Every plot can be drawn from a results file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks.agent.plots import plot


def test_three_plots_beside_the_results(tmp_path: Path) -> None:
    runs, lines = [], []
    for server in ("gufo", "llama"):
        samples = [{"first_token_ms": 1.0 + i} for i in range(3)]
        memory = [{"retained": 5, "whole_copies": 9}] * 3 if server == "gufo" else [{"rss": 1}] * 3
        runs.append({"workload": "edits", "server": server, "samples": samples, "memory": memory})
        lines.append({"workload": "edits", "server": server, "of_common_prefix": 1.2, "of_bound": 1.1})
    path = tmp_path / "agent-x.json"
    path.write_text(json.dumps({"runs": runs, "lines": lines}))
    made = plot(path)
    assert [p.name for p in made] == ["agent-x-first-tokens.png", "agent-x-prefilled.png", "agent-x-memory.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in made)
