"""From samples to tables: one line per workload and server, no average over requests that hides one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.agent.control import Verdict
from benchmarks.agent.play import Run
from benchmarks.common import RESULTS, environment, median

GOAL_OF_BOUND = 1.15


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value with at least q of all at or below it."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(q * 1000) * len(ordered) // 1000) - 1)]


@dataclass(frozen=True, slots=True)
class Least:
    """What a trace could have cost, in prefilled tokens."""

    common_prefix: int
    bound: float
    """Lower bound under the byte budget."""
    prompt_tokens: int


@dataclass(slots=True)
class Line:
    workload: str
    server: str
    prompt_tokens: int
    prefilled: int
    of_common_prefix: float
    of_bound: float
    first_token_ms: dict[str, float]
    wall_s: list[float]
    """One per round."""
    cpu_s: list[float]
    answers: dict[str, Any]
    memory: dict[str, int]


def line(runs: Sequence[Run], least: Least, verdict: Verdict | None) -> Line:
    """One workload on one server; the counts are those of the first round, times of all rounds."""
    first = runs[0]
    ttft = [s.first_token_ms for run in runs for s in run.samples]
    keys = {key for m in first.memory for key in m}
    return Line(
        workload=first.workload,
        server=first.server,
        prompt_tokens=least.prompt_tokens,
        prefilled=first.prefilled,
        of_common_prefix=first.prefilled / max(1, least.common_prefix),
        of_bound=first.prefilled / max(1.0, least.bound),
        first_token_ms={"p50": quantile(ttft, 0.5), "p95": quantile(ttft, 0.95), "max": max(ttft)},
        wall_s=[run.wall_s for run in runs],
        cpu_s=[run.cpu_s for run in runs],
        answers=asdict(verdict) if verdict is not None and verdict.compared else {},
        memory={key: max(m.get(key, 0) for m in first.memory) for key in sorted(keys)},
    )


def table(lines: Iterable[Line]) -> list[str]:
    """Fixed-width text."""
    head = (
        f"{'workload':<11}{'server':<11}{'prompt':>8}{'prefilled':>10}{'/prefix':>8}{'/bound':>8}"
        f"{'TTFT p50':>10}{'p95':>8}{'max ms':>8}{'wall s':>8}{'CPU s':>7}{'wrong':>7}"
    )
    out = [head]
    for one in lines:
        ttft = one.first_token_ms
        wrong = f"{one.answers['wrong']}/{one.answers['compared']}" if one.answers else "-"
        out.append(
            f"{one.workload:<11}{one.server:<11}{one.prompt_tokens:>8,}{one.prefilled:>10,}"
            f"{one.of_common_prefix:>8.2f}{one.of_bound:>8.2f}"
            f"{ttft['p50']:>10.0f}{ttft['p95']:>8.0f}{ttft['max']:>8.0f}{median(one.wall_s):>8.2f}{median(one.cpu_s):>7.2f}{wrong:>7}"
        )
    return out


def save(name: str, settings: Mapping[str, Any], lines: Sequence[Line], runs: Sequence[Run]) -> Path:
    """results/<name>.json: settings, environment, lines and every raw sample."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    data = {
        "environment": environment(),
        "settings": dict(settings),
        "lines": [asdict(x) for x in lines],
        "runs": [
            {
                "workload": run.workload,
                "server": run.server,
                "wall_s": run.wall_s,
                "cpu_s": run.cpu_s,
                "restart_s": run.restart_s,
                "memory": run.memory,
                "samples": [{k: v for k, v in asdict(s).items() if k not in ("answer", "text")} for s in run.samples],
            }
            for run in runs
        ],
    }
    path.write_text(json.dumps(data, indent=1))
    return path
