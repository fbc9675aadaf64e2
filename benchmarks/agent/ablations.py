"""What each choice of the cache earns: the same workloads with one thing off at a time.

    python -m benchmarks.agent.ablations [--scale X] [--shape flash-next|tiny] [--copies N]

The real cache and scheduler over the fake backend (``simulated``), so the table is exact, repeats to the
token, and takes minutes.  Per workload: prefilled tokens over those of the whole cache.  Two things are
not about tokens and have columns of their own: whole copies (what the retained set would take without
shared chunks, computed at every moment, largest ratio), and eager copies (row bytes copied while a
request runs, over those with borrowing).  Stable boundaries need a template and the disk needs a
restart: a second table is played on real servers with a tiny model, in short form (``--no-served`` leaves
it out).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.agent.__main__ import QUICK_SCALE, one_workload, setup_of
from benchmarks.agent.bound import least_prefilled, need_solver
from benchmarks.agent.play import Run
from benchmarks.agent.simulated import SHAPES, Options, Simulation, simulate
from benchmarks.agent.trace import Sizes
from benchmarks.agent.workloads import by_name
from benchmarks.common import RESULTS, environment, one_line
from benchmarks.models import bench_model, state_of
from gufo_gguf.engine.ablation import Ablation, Part
from gufo_gguf.models.recipe import chat_template

WORKLOADS = "agent,subagents,rotating,edits,side,compaction,starts"
ROWS: tuple[tuple[str, Part], ...] = (
    ("no grid", Part.GRID),
    ("no learned points", Part.LEARNED),
    ("no capture when a slot is taken", Part.PARTING),
    ("plain LRU instead of ranks", Part.RANKS),
    ("no leader, no followers", Part.LEADER),
    ("eager copies instead of borrowed rows", Part.BORROW),
)

SERVED = {"no stable boundary": "gufo-stable", "no disk": "gufo-disk"}
SERVED_WORKLOADS = "thinking,restart,kill"


def whole_over_shared(run: Run) -> float:
    """Largest ratio of whole copies to what is really kept, over the run."""
    return max((m["whole_copies"] / m["retained"] for m in run.memory if m["retained"]), default=1.0)


def play_all(names: str, sizes: Sizes, options: Options) -> dict[str, tuple[Run, Simulation]]:
    return {w.name: simulate(w, sizes, options) for w in by_name(names)}


OPENS_THOUGHT = "{%- if add_generation_prompt -%}{{- '<think>\\n' -}}{%- endif -%}"
"""Behind the tiny model's template: as in those of models that always think, the prompt's end does not come back."""


def play_served(sizes: Sizes) -> dict[str, dict[str, int]]:
    """Workload -> server -> tokens prefilled."""
    model = bench_model("qwen4exp")
    state = state_of(model)
    servers = ["gufo", *SERVED.values()]
    prefilled = {}
    with tempfile.TemporaryDirectory(prefix="gufo-bench-") as folder:
        template = Path(folder, "thinks.jinja")
        template.write_text(chat_template() + OPENS_THOUGHT)
        for workload in by_name(SERVED_WORKLOADS):
            setup = setup_of(workload, sizes, model, state, n_threads=1)
            setup = replace(setup, more=("--chat-template-file", str(template)))
            runs = one_workload(workload, sizes, servers, setup, 1, lambda line: None, scripted=False)
            prefilled[workload.name] = {name: each[0].prefilled for name, each in runs.items()}
    return prefilled


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gufo bench ablations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="flash-next")
    parser.add_argument("--copies", type=float, help="budget in whole copies; default: each workload's own")
    parser.add_argument("--workloads", default=WORKLOADS)
    parser.add_argument("--no-served", action="store_true", help="leave out what needs real servers")
    args = parser.parse_args(arguments)
    need_solver()
    sizes = Sizes(args.scale)
    options = Options(SHAPES[args.shape], copies=args.copies)
    whole = play_all(args.workloads, sizes, options)
    names = list(whole)
    bound = {
        n: run.prefilled / least_prefilled(run.trace, world.state, world.budget_bytes, world.n_slots)
        for n, (run, world) in whole.items()
    }
    rows: list[dict[str, Any]] = []
    print(f"{'':<40}" + "".join(f"{n:>12}" for n in names))
    print(f"{'whole cache, tokens prefilled':<40}" + "".join(f"{run.prefilled:>12,}" for run, _ in whole.values()))
    print(f"{'  over the budgeted oracle':<40}" + "".join(f"{bound[n]:>12.3f}" for n in names), flush=True)
    for what, part in ROWS:
        got = play_all(args.workloads, sizes, replace(options, ablation=Ablation(frozenset({part}))))
        ratio = {n: got[n][0].prefilled / whole[n][0].prefilled for n in names}
        copied = {n: got[n][1].copied_bytes / max(1, whole[n][1].copied_bytes) for n in names}
        rows.append({"what": what, "ratio": ratio, "copied": copied})
        print(f"{what:<40}" + "".join(f"{ratio[n]:>12.2f}" for n in names), flush=True)
        if part is Part.BORROW:
            print(f"{'  row bytes copied while requests run, x':<40}" + "".join(f"{copied[n]:>12.1f}" for n in names))
    sharing = {n: whole_over_shared(run) for n, (run, _) in whole.items()}
    print(f"{'whole copies instead of chunks: bytes, x':<40}" + "".join(f"{sharing[n]:>12.1f}" for n in names))
    served = {} if args.no_served else play_served(Sizes(QUICK_SCALE))
    if served:
        print(f"\n{'on real servers, tiny model':<40}" + "".join(f"{n:>12}" for n in served))
        print(f"{'tokens prefilled':<40}" + "".join(f"{got['gufo']:>12,}" for got in served.values()))
        for what, server in SERVED.items():
            print(f"{what:<40}" + "".join(f"{got[server] / got['gufo']:>12.2f}" for got in served.values()))
    RESULTS.mkdir(exist_ok=True)
    data = {
        "environment": environment(), "shape": args.shape, "scale": args.scale, "workloads": names, "rows": rows,
        "served": {"scale": QUICK_SCALE, "prefilled": served}, "of_bound": bound, "whole_over_shared": sharing,
        "prefilled": {n: run.prefilled for n, (run, _) in whole.items()},
    }  # fmt: skip
    (RESULTS / "ablations.json").write_text(json.dumps(data, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(one_line(main))
