"""Speed while serving, as ratios to llama-server of the same build:

    python -m benchmarks.serve [--model NAME] [--rounds N] [--quick]

Both servers run all the time (an idle one uses no processor) and take turns in many short pairs, so that
what the machine does meanwhile meets both.  Same model, threads, slots, context; their defaults otherwise.

decode N     tokens per second of N streams together, while all of them generate
prefill      tokens per second of a cold prompt, at the client
short first  time to the first token of a short request that comes while a long prompt is computed
cold         wall time of a request that reuses nothing

What HTTP and scheduling add to a token: ``python -m benchmarks.serve.overhead``.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.agent.http import Http
from benchmarks.agent.servers import Gufo, Llama, Setup
from benchmarks.common import median, one_line, report
from benchmarks.models import bench_model, find_program
from benchmarks.serve.load import ask, decode_rate, prompt, together

N_SLOTS = 8
GOALS = {"decode": 0.97, "prefill": 0.97, "short first": 1.0, "cold": 0.98}


@dataclass(slots=True)
class Case:
    """One figure; ``more_is_better``: a rate, else a time."""

    name: str
    run: Callable[[Http, int], float]
    """(server, seed) -> rate or seconds."""
    more_is_better: bool
    every: int = 1
    """Run in each such round: what takes long is asked less often."""
    samples: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self) -> tuple[float, float, float]:
        """gufo over llama-server as a speed (above 1: gufo is faster): median and quartiles of the pairs.

        A pair is two runs one after the other; a machine that other work slows down for seconds spoils a
        pair, not the median of many.
        """
        pairs = zip(self.samples["gufo"], self.samples["llama"], strict=False)  # the last may be half a pair
        ratios = [a / b if self.more_is_better else b / a for a, b in pairs]
        low, middle, high = np.percentile(ratios, (25, 50, 75))
        return float(middle), float(low), float(high)


def decode(n: int, n_answer: int) -> Callable[[Http, int], float]:
    return lambda http, seed: decode_rate(together(http, [prompt(seed * 100 + i, 16) for i in range(n)], n_answer))


def prefill(n_tokens: int) -> Callable[[Http, int], float]:
    def run(http: Http, seed: int) -> float:
        stream = ask(http, prompt(seed, n_tokens), 1)
        if stream.n_cached:
            raise RuntimeError("the prompt was meant to be new")
        return n_tokens / stream.first_s

    return run


def short_during_long(n_long: int) -> Callable[[Http, int], float]:
    """Seconds to the first token of 32 tokens, sent when a long prompt has been running for a moment."""

    def run(http: Http, seed: int) -> float:
        long = threading.Thread(target=ask, args=(http, prompt(seed, n_long), 1))
        long.start()
        time.sleep(0.1)
        if not long.is_alive():
            raise RuntimeError("the long prompt was over before the short one was sent; make it longer")
        short = ask(http, prompt(seed + 1, 32), 4)
        long.join()
        return short.first_s

    return run


def cold(n_tokens: int, n_answer: int) -> Callable[[Http, int], float]:
    def run(http: Http, seed: int) -> float:
        stream = ask(http, prompt(seed, n_tokens), n_answer)
        return stream.token_s[-1] - stream.sent_s

    return run


def cases_of(quick: bool) -> list[Case]:
    n_answer = 48 if quick else 64
    found = [Case(f"decode {n}", decode(n, n_answer), True) for n in (1, 2, 4, 8)]
    found.append(Case("prefill", prefill(512 if quick else 1024), True, 2))
    found.append(Case("cold", cold(384 if quick else 1024, 32), False, 2))
    found.append(Case("short first", short_during_long(2048 if quick else 4096), False, 6))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gufo bench serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="file, smollm2, owlet, or the name of a tiny architecture")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="default: 24, with --quick 6")
    parser.add_argument("--quick", action="store_true", help="short answers and prompts, few rounds")
    parser.add_argument("--only", help="names of cases, with commas")
    args = parser.parse_args(arguments)
    cases = [c for c in cases_of(args.quick) if args.only is None or c.name in args.only.split(",")]
    setup = Setup(bench_model(args.model), 8192, N_SLOTS, args.threads, 1 << 30)
    servers = {"gufo": Gufo(setup), "llama": Llama(setup, find_program("llama-server"), best=False)}
    n_rounds = args.rounds or (6 if args.quick else 24)
    seed = 0
    try:
        for server in servers.values():
            server.start()
            together(server.http, [prompt(7 + i, 64) for i in range(N_SLOTS)], 8)  # pages, threads, compiled parts
        for number in range(n_rounds):
            for case in cases:
                if number % case.every:
                    continue
                for name in servers if number // case.every % 2 == 0 else reversed(servers):
                    seed += 10
                    case.samples.setdefault(name, []).append(case.run(servers[name].http, seed))
            print(f"round {number + 1} of {n_rounds}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: what there is so far", file=sys.stderr, flush=True)
    finally:
        for server in servers.values():
            server.stop()
    title = f"{setup.model.stem}, {args.threads} thread(s), {N_SLOTS} slots; speed of gufo over llama-server"
    lines = [f"{title}: median of the pairs (quarters)"]
    cases = [case for case in cases if len(case.samples) == 2]
    for case in cases:
        middle, low, high = case.ratio()
        goal = GOALS[case.name.rstrip(" 0123456789")]
        values = "  ".join(f"{name} {median(got):,.3f}" for name, got in case.samples.items())
        unit = "tok/s" if case.more_is_better else "s"
        n = len(case.samples["gufo"])
        lines.append(
            f"{case.name:<12}{middle:6.3f} ({low:.2f} .. {high:.2f}) of {n:2d}   goal {goal}   {values} {unit}"
        )
    data = {case.name: {"samples": case.samples, "ratio": case.ratio()} for case in cases}
    report(f"serve-{args.model}", lines, {"model": setup.model.stem, "cases": data})
    return 0


if __name__ == "__main__":
    sys.exit(one_line(main))
