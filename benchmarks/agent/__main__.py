"""An agent's day, side by side:

    python -m benchmarks.agent [--quick | --scale X] [--workloads a,b,…] [--servers gufo,llama,llama-best]

Each round starts every server fresh for every workload, in turn.  What is printed, and kept with all
raw samples in results/: prefilled tokens, against the longest common prefix with any history and against
the least that any plan within the byte budget could do; time to first token (p50, p95, max); wall time;
wrong answers.  ``--quick`` takes some minutes; the full form takes hours on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.agent import control, report
from benchmarks.agent.bound import State, least_prefilled, need_solver
from benchmarks.agent.oracle import common_prefix
from benchmarks.agent.play import Run, play
from benchmarks.agent.plots import plot
from benchmarks.agent.servers import Gufo, Llama, Server, Setup, Url
from benchmarks.agent.trace import Sizes, Workload, deepest
from benchmarks.agent.workloads import by_name
from benchmarks.common import one_line
from benchmarks.models import bench_model, find_program, state_of

QUICK_SCALE = 0.2


def setup_of(workload: Workload, sizes: Sizes, model: Path, state: State, n_threads: int) -> Setup:
    depth = deepest(workload, sizes)
    n_ctx = -(-(depth + 64) // 256) * 256
    return Setup(
        model, n_ctx, workload.n_slots, n_threads, int(workload.copies * state.whole(depth)), disk=workload.disk
    )


def make_server(name: str, setup: Setup) -> Server:
    """A server by the name of its row, or a URL."""
    if name == "gufo" or name.startswith("gufo-"):
        return Gufo(setup, name.removeprefix("gufo").removeprefix("-"))
    if name in ("llama", "llama-best"):
        return Llama(setup, find_program("llama-server"), best=name == "llama-best")
    if name.startswith("http"):
        return Url(name)
    raise ValueError(f"no server {name!r}: gufo, gufo-PART, llama, llama-best, or a URL")


def one_workload(
    workload: Workload,
    sizes: Sizes,
    servers: Sequence[str],
    setup: Setup,
    rounds: int,
    say: Callable[[str], None],
    *,
    scripted: bool,
) -> dict[str, list[Run]]:
    """All rounds of one workload, servers in turn."""
    runs: dict[str, list[Run]] = {name: [] for name in servers}
    for number in range(rounds):
        for name in servers if number % 2 == 0 else list(reversed(servers)):
            server = make_server(name, setup)
            try:
                server.start()
                runs[name].append(play(workload, sizes, server, scripted=scripted))
            finally:
                server.stop()
            say(f"{workload.name}: {name}, round {number + 1}: {runs[name][-1].wall_s:.1f} s")
    return runs


def least_of(run: Run, state: State, setup: Setup, *, bounded: bool) -> report.Least:
    """The oracles of one trace; ``bounded`` False: no bound is known for it (restarts)."""
    prefix = sum(common_prefix(run.trace))
    bound = (
        least_prefilled(run.trace, state, setup.ram_bytes, setup.n_slots, rows_only=state.private_bytes == 0)
        if bounded
        else float(prefix)
    )
    return report.Least(prefix, bound, sum(len(p.prompt) for p in run.trace))


def judged(runs: dict[str, list[Run]], setup: Setup, n_checks: int, *, rows_only: bool) -> dict[str, control.Verdict]:
    """Answers of our servers' first rounds against the same passes uninterrupted."""
    if n_checks == 0:
        return {}
    alone = Gufo(replace(setup, n_slots=1, disk=False))
    try:
        alone.start()
        return {
            name: control.judge(alone, each[0].trace, each[0].samples, n_checks, rows_only=rows_only)
            for name, each in runs.items()
            if name.startswith("gufo")
        }
    finally:
        alone.stop()


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gufo bench agent", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"--scale {QUICK_SCALE}, one round, few checks")
    parser.add_argument("--scale", type=float, default=1.0, help="1 = the full form")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", help="names or letters, with commas; default: all")
    parser.add_argument("--servers", default="gufo,llama,llama-best", help="also URLs of OpenAI-compatible servers")
    parser.add_argument("--model", default="qwen4exp", help="file, smollm2, owlet, or the name of a tiny architecture")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checks", type=int, default=6, help="answers checked per workload and server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--scripted", action="store_true", help="histories go on with drawn answers (SmolLM2: see play.play)"
    )
    parser.add_argument("--name", help="results/<name>.json; default: agent-<model>")
    args = parser.parse_args(arguments)
    scale, rounds, checks = (QUICK_SCALE, 1, 2) if args.quick else (args.scale, args.rounds, args.checks)
    need_solver()
    sizes = Sizes(scale, args.seed)
    model = bench_model(args.model)
    state = state_of(model)
    settings = {
        "model": model.stem, "scale": scale, "rounds": rounds, "threads": args.threads, "seed": args.seed,
        "row_bytes": state.row_bytes, "private_bytes": state.private_bytes,
    }  # fmt: skip
    results = args.name or f"agent-{args.model}"
    lines: list[report.Line] = []
    kept: list[Run] = []
    for workload in by_name(args.workloads):
        setup = setup_of(workload, sizes, model, state, args.threads)
        runs = one_workload(workload, sizes, args.servers.split(","), setup, rounds, _note, scripted=args.scripted)
        verdicts = judged(runs, setup, checks, rows_only=state.private_bytes == 0)
        for name, each in runs.items():
            least = least_of(each[0], state, setup, bounded=not workload.disk)
            lines.append(report.line(each, least, verdicts.get(name)))
            kept += each
        report.save(results, settings, lines, kept)  # a run of hours may be cut off
        print("\n".join(report.table(lines[-len(runs) :])[len(lines) > len(runs) :]), flush=True)
    saved = report.save(results, settings, lines, kept)
    print(f"\nraw samples: {saved}")
    try:
        print("plots: " + ", ".join(p.name for p in plot(saved)))
    except ImportError:
        print("no plots: matplotlib is not installed (the `bench` extra has it)")
    return 0


if __name__ == "__main__":
    sys.exit(one_line(main))
