"""PNG plots of a results file: time to first token per turn, prefilled tokens against the oracles, memory.

python -m benchmarks.agent.plots results/agent-qwen4exp.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Data = dict[str, Any]


def _firsts(data: Data) -> dict[str, dict[str, Any]]:
    """The first run of each (workload, server)."""
    found: dict[str, dict[str, Any]] = {}
    for run in data["runs"]:
        found.setdefault(run["workload"], {}).setdefault(run["server"], run)
    return found


def first_tokens(data: Data, path: Path) -> None:
    """One panel per workload: each request's time to its first token, every server a line."""

    runs = _firsts(data)
    figure, panels = _panels(len(runs), 2.6)
    for axis, (workload, by_server) in zip(panels, runs.items(), strict=True):
        for server, run in by_server.items():
            axis.plot([s["first_token_ms"] for s in run["samples"]], marker=".", lw=1, label=server)
        axis.set_yscale("log")
        axis.set_title(workload, fontsize=9)
        axis.set_xlabel("request")
        axis.set_ylabel("first token, ms")
    panels[0].legend(fontsize=8)
    _save(figure, path)


def prefilled(data: Data, path: Path) -> None:
    """Bars: tokens prefilled over the longest common prefix with any history; the budgeted bound as a tick."""
    from matplotlib import pyplot as plt

    workloads = list(dict.fromkeys(x["workload"] for x in data["lines"]))
    servers = list(dict.fromkeys(x["server"] for x in data["lines"]))
    figure, axis = plt.subplots(figsize=(11, 4))
    width = 0.8 / len(servers)
    for i, server in enumerate(servers):
        by = {x["workload"]: x for x in data["lines"] if x["server"] == server}
        at = [k + i * width for k, w in enumerate(workloads) if w in by]
        axis.bar(at, [by[w]["of_common_prefix"] for w in workloads if w in by], width, label=server)
        bound = [by[w]["of_common_prefix"] / by[w]["of_bound"] for w in workloads if w in by]
        axis.scatter(at, bound, marker="_", color="black", s=120, zorder=3)
    axis.axhline(1, color="grey", lw=0.8)
    axis.set_yscale("log")
    axis.set_xticks([k + 0.4 - width / 2 for k in range(len(workloads))], workloads, fontsize=8)
    axis.set_ylabel("prefilled / common prefix")
    axis.legend(fontsize=8)
    _save(figure, path)


def memory(data: Data, path: Path) -> None:
    """What is kept over the run, with shared rows and as whole copies would be; gufo alone knows."""

    runs = {w: by["gufo"] for w, by in _firsts(data).items() if by.get("gufo", {}).get("memory")}
    if not runs:
        return
    figure, panels = _panels(len(runs), 2.4)
    for axis, (workload, run) in zip(panels, runs.items(), strict=True):
        for key, label in (("whole_copies", "as whole copies"), ("retained", "kept, rows shared"), ("disk", "on disk")):
            values = [m.get(key, 0) / 1e6 for m in run["memory"]]
            if any(values):
                axis.plot(values, lw=1, label=label)
        axis.set_title(workload, fontsize=9)
        axis.set_ylabel("MB")
    panels[0].legend(fontsize=8)
    _save(figure, path)


def _panels(n: int, height: float) -> tuple[Any, list[Any]]:
    """A figure of n panels, two in a row, each ``height`` inches high."""
    from matplotlib import pyplot as plt

    rows = -(-n // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(11, height * rows), squeeze=False)
    panels = list(axes.flat)
    for spare in panels[n:]:
        spare.set_axis_off()
    return figure, panels[:n]


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot(path: Path) -> list[Path]:
    """All plots of a results file, beside it."""
    import matplotlib

    matplotlib.use("Agg")
    data = json.loads(path.read_text())
    made = []
    for name, draw in (("first-tokens", first_tokens), ("prefilled", prefilled), ("memory", memory)):
        made.append(path.with_name(f"{path.stem}-{name}.png"))
        draw(data, made[-1])
    return [p for p in made if p.exists()]


def main(arguments: Sequence[str] | None = None) -> int:
    for name in sys.argv[1:] if arguments is None else arguments:
        for made in plot(Path(name)):
            print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
