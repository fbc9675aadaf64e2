"""The first token after a restart:

    python -m benchmarks.agent.restart [--tokens 20000] [--model NAME] [--rounds N]

One conversation of N tokens; the server ends, cleanly or by SIGKILL, and starts again; the next turn
is timed: the same history with the answer that was given, or (``changed``) with another answer of the same
length, which is what a client sends that leaves reasoning out or renders an answer its own way; plus 50
tokens.  gufo has a cache folder.  llama-server's slot is saved
by a request before a clean end and restored by one after the start, as its client would have to; the
time of that restore is given with and without.  A client cannot save before a kill.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.agent.servers import Gufo, Llama, Sample, Setup
from benchmarks.agent.trace import Ask, Text, Tokens, join
from benchmarks.common import median, one_line, report
from benchmarks.models import bench_model, find_program, state_of

GOAL = 10.0
HOWS = {"clean": (False, False), "clean, answer changed": (False, True), "kill -9": (True, False)}
"""What happens -> (kill, changed)."""
_WRITTEN_S = 60.0


def _ask(server: Gufo | Llama, tokens: Tokens, n_answer: int) -> Sample:
    sample = Sample("restart", server.name, 0, "one", "turn")
    server.send(Ask("one", "turn", tokens=tokens, n_answer=n_answer), sample)
    return sample


def _wait_written(server: Gufo, n_tokens: int) -> None:
    """Until the conversation is on disk: a kill before that costs it, and what is timed here is the other case."""
    limit = time.monotonic() + _WRITTEN_S
    while time.monotonic() < limit:
        disk = server.http.get("/v1/cache")["disk"]
        if disk and not disk["waiting"] and disk["checkpoints"]:
            return
        time.sleep(0.1)
    raise RuntimeError(f"nothing of {n_tokens} tokens was on disk after {_WRITTEN_S:.0f} s: {disk}")


def once(server: Gufo | Llama, n_tokens: int, seed: int, *, kill: bool, changed: bool) -> dict[str, float]:
    """Times in milliseconds and the tokens prefilled, before and after."""
    text = Text(seed)
    try:
        server.start()
        history = text.draw("history", n_tokens)
        first = _ask(server, history, 16)
        if isinstance(server, Gufo):
            _wait_written(server, n_tokens)
        started = time.perf_counter()
        server.restart(kill=kill)
        restart_ms = 1e3 * (time.perf_counter() - started)
        answer = text.draw("other answer", 16) if changed else np.array(first.answer, np.int32)
        again = join([history, answer, text.draw("new", 50)])
        then = _ask(server, again, 4)
        return {
            "cold_first_ms": first.first_token_ms,
            "first_ms": then.first_token_ms,
            "prefilled": then.n_prefilled,
            "restart_ms": restart_ms,
            "client_restore_ms": server.restore_ms if isinstance(server, Llama) else 0.0,
        }
    finally:
        server.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gufo bench restart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--model", default="qwen4exp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", help=f"of: {'; '.join(HOWS)} (separated like this)")
    args = parser.parse_args(arguments)
    model = bench_model(args.model)
    state = state_of(model)
    setup = Setup(model, args.tokens + 512, 1, args.threads, 4 * state.whole(args.tokens), disk=True)
    program = find_program("llama-server")
    servers: dict[str, Callable[[], Gufo | Llama]] = {
        "gufo": lambda: Gufo(setup),
        "llama-best": lambda: Llama(setup, program, best=True),
    }
    hows = [how for how in HOWS if args.only is None or how in args.only.split(";")]
    samples: dict[str, list[dict[str, float]]] = {f"{name}, {how}": [] for how in hows for name in servers}
    for number in range(args.rounds):
        for how in hows:
            for name, make in servers.items():
                kill, changed = HOWS[how]
                samples[f"{name}, {how}"].append(once(make(), args.tokens, number, kill=kill, changed=changed))
                print(f"round {number + 1}: {name}, {how}", file=sys.stderr, flush=True)
    lines = [f"{model.stem}, {args.tokens} tokens, {args.threads} thread(s), {args.rounds} rounds"]
    for name, got in samples.items():
        first = [s["first_ms"] for s in got]
        lines.append(
            f"{name:<32} first token {median(first):8.1f} ms ({min(first):.1f} .. {max(first):.1f})"
            f"   prefilled {got[0]['prefilled']:6.0f}   restart {median([s['restart_ms'] for s in got]):7.0f} ms"
            f"   restore by the client {median([s['client_restore_ms'] for s in got]):6.0f} ms"
            f"   cold {median([s['cold_first_ms'] for s in got]):8.0f} ms"
        )
    for how in hows:
        ratios = [
            b["first_ms"] / a["first_ms"]
            for a, b in zip(samples[f"gufo, {how}"], samples[f"llama-best, {how}"], strict=True)
        ]
        lines.append(f"{how}: first token {median(ratios):.1f} x faster than llama-server   (goal {GOAL:.0f})")
    report(f"restart-{args.model}", lines, {"samples": samples, "tokens": args.tokens, "model": model.stem})
    return 0


if __name__ == "__main__":
    sys.exit(one_line(main))
