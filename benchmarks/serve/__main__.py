"""Speed while serving, as ratios to llama-server of the same build:

    python -m benchmarks.serve [--model NAME] [--rounds N] [--quick]

Both servers run all the time (an idle one uses no processor) and take turns, so that what the machine
does meanwhile meets both.  Same model, threads, slots, context; their defaults otherwise.

decode N     tokens per second of N streams together, while all of them generate
prefill      tokens per second of a cold prompt, at the client
short first  time to the first token of a short request that comes while a long prompt is computed
cold         wall time of a request that reuses nothing
overhead     time per token at the client beyond the time inside llama_decode, one stream (gufo alone)
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.agent.http import Http
from benchmarks.agent.servers import Gufo, Llama, Setup
from benchmarks.common import median, report
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
    samples: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self) -> tuple[float, float, float]:
        """gufo over llama-server as a speed (above 1: gufo is faster): median, least, largest over the rounds."""
        pairs = zip(self.samples["gufo"], self.samples["llama"], strict=True)
        ratios = [a / b if self.more_is_better else b / a for a, b in pairs]
        return median(ratios), min(ratios), max(ratios)


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
        short = ask(http, prompt(seed + 1, 32), 4)
        if not long.is_alive():
            raise RuntimeError("the long prompt was over before the short one; make it longer")
        long.join()
        return short.first_s

    return run


def cold(n_tokens: int, n_answer: int) -> Callable[[Http, int], float]:
    def run(http: Http, seed: int) -> float:
        stream = ask(http, prompt(seed, n_tokens), n_answer)
        return stream.token_s[-1] - stream.sent_s

    return run


def overhead_us(http: Http, n_answer: int, seed: int) -> float:
    """Microseconds per token beyond the passes themselves, from the server's own count of seconds in passes."""

    def passes() -> float:
        text = http.text("/metrics")
        found = re.search(r"^gufo_decode_seconds_total\S* (\S+)$", text, re.M)
        if found is None:
            raise RuntimeError("/metrics does not count seconds of decoding")
        return float(found[1])

    before = passes()
    stream = ask(http, prompt(seed, 16), n_answer)
    spent = passes() - before
    return 1e6 * (stream.token_s[-1] - stream.token_s[0] - spent) / (n_answer - 1)


def cases_of(quick: bool) -> list[Case]:
    n_answer = 64 if quick else 192
    found = [Case(f"decode {n}", decode(n, n_answer), True) for n in (1, 2, 4, 8)]
    found.append(Case("prefill", prefill(1024 if quick else 4096), True))
    found.append(Case("short first", short_during_long(4096 if quick else 7168), False))
    found.append(Case("cold", cold(512 if quick else 1024, 32), False))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gufo bench serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="file, smollm2, owlet, or the name of a tiny architecture")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="short answers and prompts, three rounds")
    parser.add_argument("--only", help="names of cases, with commas")
    args = parser.parse_args(arguments)
    cases = [c for c in cases_of(args.quick) if args.only is None or c.name in args.only.split(",")]
    setup = Setup(bench_model(args.model), 8192, N_SLOTS, args.threads, 1 << 30)
    servers = {"gufo": Gufo(setup), "llama": Llama(setup, find_program("llama-server"), best=False)}
    overheads: list[float] = []
    seed = 0
    try:
        for server in servers.values():
            server.start()
            together(server.http, [prompt(7 + i, 64) for i in range(N_SLOTS)], 8)  # pages, threads, compiled parts
        for number in range(3 if args.quick else args.rounds):
            for case in cases:
                for name in servers if number % 2 == 0 else reversed(servers):
                    seed += 10
                    case.samples.setdefault(name, []).append(case.run(servers[name].http, seed))
            overheads.append(overhead_us(servers["gufo"].http, 128, seed + 5))
            print(f"round {number + 1}", file=sys.stderr, flush=True)
    finally:
        for server in servers.values():
            server.stop()
    lines = [f"{setup.model.stem}, {args.threads} thread(s), {N_SLOTS} slots; speed of gufo over llama-server"]
    for case in cases:
        middle, least, largest = case.ratio()
        goal = GOALS[case.name.rstrip(" 0123456789")]
        values = "  ".join(f"{name} {median(got):,.3f}" for name, got in case.samples.items())
        unit = "tok/s" if case.more_is_better else "s"
        lines.append(f"{case.name:<12}{middle:6.3f} ({least:.2f} .. {largest:.2f})   goal {goal}   {values} {unit}")
    lines.append(
        f"overhead    {median(overheads):6.0f} us a token ({min(overheads):.0f} .. {max(overheads):.0f})   goal 150"
    )
    data = {case.name: {"samples": case.samples, "ratio": case.ratio()} for case in cases}
    report(f"serve-{args.model}", lines, {"model": setup.model.stem, "cases": data, "overhead_us": overheads})
    return 0


if __name__ == "__main__":
    sys.exit(main())
