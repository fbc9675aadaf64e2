"""What the RAM cache costs and gives, on a real model:

    python -m benchmarks.cache.run [MODEL.gguf] [--quick]

capture    one capture on the request path, against a memcpy of the private state
overhead   requests that reuse nothing, with the cache on, against --no-cache
rss        resident memory over many requests, beyond the budget
neighbour  a stream that decodes while other conversations go to disk, against one that decodes alone
eight      eight conversations of 8,000 tokens that share 6,000, one slot, a budget of four full copies

Without a model the tiny qwen4exp is used; for ``neighbour`` a generated one with the layers, heads and
state of Flash-Next (27,648 bytes a row, 118 MB private) but a narrow width and few experts.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import interleaved, median, report, spread
from benchmarks.micro.state import model_file
from gufo_gguf.backend.llama import LlamaOptions
from gufo_gguf.core import env
from gufo_gguf.engine.engine import Engine, EngineOptions
from gufo_gguf.engine.types import Finished, GenerateRequest, SamplingParams, as_tokens
from gufo_gguf.models.tiny import write_tiny

GREEDY = SamplingParams(temperature=0.0)


def tokens(seed: int, n: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, 500, n)]


def open_engine(path: Path, n_ctx: int, *, cache: bool = True, ram: int | None = 1 << 30, n_slots: int = 1) -> Engine:
    options = LlamaOptions(n_ctx=n_ctx, n_slots=n_slots, n_threads=1)
    return Engine.load(path, EngineOptions(llama=options, cache=cache, cache_ram_bytes=ram))


def ask(engine: Engine, prompt: list[int], n: int = 1) -> Finished:
    *_, event = engine.submit(GenerateRequest(as_tokens(prompt), sampling=GREEDY, max_tokens=n))
    assert isinstance(event, Finished)
    if event.error is not None:
        raise event.error
    return event


def bench_capture(path: Path, repeats: int) -> None:
    with open_engine(path, 4096) as engine:
        private = engine.cache_status()["private_bytes"]
        source, target = np.ones(private, np.uint8), np.zeros(private, np.uint8)
        capture_ms, copies = [], []
        for i in range(repeats):
            report_ = ask(engine, tokens(i, 600)).report
            capture_ms.append(report_.capture_ms / max(1, len(report_.captured)))
            copies.append(
                1e3 * median(interleaved({"copy": lambda: target.__setitem__(slice(None), source)}, 9)["copy"])
            )
        goal = [1.2 * c + 2.0 for c in copies]
        mine, limit = median(capture_ms), median(goal)
    report(
        "cache-capture",
        [
            f"private state {private / 1e6:.2f} MB",
            f"one capture {mine:.2f} ms ({min(capture_ms):.2f} .. {max(capture_ms):.2f}); "
            f"memcpy {median(copies):.3f} ms",
            f"ratio to (1.2 x memcpy + 2 ms): {mine / limit:.2f}   (goal <= 1)",
        ],
        {"capture_ms": capture_ms, "memcpy_ms": copies, "private_bytes": private},
    )


def bench_overhead(path: Path, repeats: int) -> None:
    with open_engine(path, 4096) as on, open_engine(path, 4096, cache=False) as off:
        seeds = iter(range(10_000))

        def cold(engine: Engine) -> float:
            end = ask(engine, tokens(next(seeds), 1500), n=32)
            return (end.timings.prompt_ms + end.timings.predicted_ms) / 1e3

        interleaved({"on": lambda: cold(on), "off": lambda: cold(off)}, 1)
        samples = interleaved({"on": lambda: cold(on), "off": lambda: cold(off)}, repeats)
    ratios = [a / b for a, b in zip(samples["on"], samples["off"], strict=True)]
    report(
        "cache-overhead",
        [
            f"cache on  {spread(samples['on'])}",
            f"no cache  {spread(samples['off'])}",
            f"ratio of medians {median(samples['on']) / median(samples['off']):.3f}; "
            f"of pairs {median(ratios):.3f}   (goal <= 1.02)",
        ],
        {"seconds": samples},
    )


def bench_rss(path: Path, requests: int) -> None:
    process = psutil.Process()
    budget = 24 << 20
    with open_engine(path, 2048, ram=budget) as engine:
        rss = []
        for i in range(requests):
            ask(engine, tokens(i % 37, 200 + i % 300))
            if i % max(1, requests // 20) == 0:
                rss.append(process.memory_info().rss)
        status = engine.cache_status()
        problems = engine.check()
    settled = rss[len(rss) // 3 :]
    growth = settled[-1] - settled[0]
    report(
        "cache-rss",
        [
            f"{requests} requests, budget {budget >> 20} MiB, held {status['pool']['held_bytes'] / 2**20:.1f} MiB",
            f"growth over the last two thirds {growth / 2**20:.1f} MiB = {growth / budget:.2f} of the budget "
            "  (goal: flat)",
            f"check(): {problems or 'nothing'}",
        ],
        {"rss": rss, "budget": budget, "problems": problems},
    )


def bench_neighbour(path: Path, pairs: int, n_decode: int, threads: int, n_written: int = 6) -> None:
    """A stream decodes while other conversations' checkpoints are written, or there is nothing to write.

    The stream itself neither reads nor writes the cache.  What is to be written is computed before it
    starts, as one batch of requests, so that the writer finds no pause in which to get ahead; their
    prompts are short, since it is the private state that makes a checkpoint large.
    """
    process = psutil.Process()
    options = LlamaOptions(n_ctx=1024, n_slots=2, n_threads=threads)
    samples: dict[str, list[tuple[float, ...]]] = {"alone": [], "beside": []}
    dry = 0
    with tempfile.TemporaryDirectory() as folder:
        settings = EngineOptions(
            llama=options,
            cache_ram_bytes=2 << 30,
            cache_disk=Path(folder),
            cache_disk_bytes=2 << 30,
            cache_disk_spacing=1,
        )
        with Engine.load(path, settings) as engine:
            status = engine.cache_status()
            seeds = iter(range(20_000, 30_000))
            owner = next(t.native_id for t in threading.enumerate() if t.name == "gufo-owner")

            def owner_s() -> float:
                return next(t.user_time + t.system_time for t in process.threads() if t.id == owner)

            def disk() -> dict[str, Any]:
                return dict(engine.cache_status()["disk"])

            def drain() -> None:
                while disk()["waiting"]:
                    time.sleep(0.05)

            def others_s() -> float:
                """Processor seconds of everything else on the machine."""
                machine, own = psutil.cpu_times(), process.cpu_times()
                return sum(machine) - machine.idle - machine.iowait - own.user - own.system

            def stream() -> tuple[float, ...]:
                """(seconds a token, processor seconds of the owner thread a token, MB/s that the process wrote,
                cores that others had)."""
                request = GenerateRequest(
                    as_tokens(tokens(10_000, 4)), sampling=GREEDY, max_tokens=n_decode, cache_prompt=False
                )
                written, used, others = process.io_counters().write_chars, owner_s(), others_s()
                started = time.perf_counter()
                *_, end = engine.submit(request)
                assert isinstance(end, Finished) and end.error is None
                used = (owner_s() - used) / n_decode
                wall_s = time.perf_counter() - started
                rate = (process.io_counters().write_chars - written) / wall_s / 1e6
                others = (others_s() - others) / wall_s
                return end.timings.predicted_ms / 1e3 / (end.timings.predicted_n - 1), used, rate, others

            def conversations() -> None:
                running = [
                    engine.submit(GenerateRequest(as_tokens(tokens(next(seeds), 4)), sampling=GREEDY, max_tokens=1))
                    for _ in range(n_written)
                ]
                for events in running:
                    list(events)

            stream()
            for i in range(pairs):
                for case in ("alone", "beside") if i % 2 else ("beside", "alone"):
                    drain()
                    if case == "beside":
                        conversations()
                    samples[case].append(stream())
                    if case == "beside":
                        dry += not disk()["waiting"]
    alone, beside = (list(zip(*samples[case], strict=True)) for case in ("alone", "beside"))
    wall, used = ([a / b for a, b in zip(alone[k], beside[k], strict=True)] for k in (0, 1))
    report(
        "cache-neighbour",
        [
            f"{status['row_bytes']:,} bytes a row, {status['private_bytes'] / 1e6:.0f} MB private; threads: {threads}; "
            f"{pairs} pairs in turn, {n_decode} tokens each",
            f"nothing to write     {spread(list(alone[0]))} a token",
            f"while being written  {spread(list(beside[0]))} a token, at {median(list(beside[2])):.0f} MB/s "
            f"({min(beside[2]):.0f} .. {max(beside[2]):.0f}); nothing was left before the end in {dry} of {pairs}",
            f"token rate beside writing over alone, of pairs {median(wall):.3f} ({min(wall):.3f} .. {max(wall):.3f})"
            "   (goal >= 0.95)",
            f"the same in processor time of the model's thread {median(used):.3f} ({min(used):.3f} .. {max(used):.3f})",
            f"cores that other processes had meanwhile: {median(list(alone[3])):.2f} and {median(list(beside[3])):.2f}",
        ],
        {"alone": alone, "beside": beside, "ran_dry": dry, "threads": threads},
    )


def bench_eight(path: Path, scale: float) -> None:
    shared, own = int(6000 * scale), int(2000 * scale)
    n_ctx = shared + own + 1024
    with open_engine(path, n_ctx) as probe:
        status = probe.cache_status()
        full = status["row_bytes"] * (shared + own) + status["private_bytes"]
    prompts = [tokens(1, shared) + tokens(100 + i, own) for i in range(8)]
    with open_engine(path, n_ctx, ram=4 * full) as engine:
        first = [ask(engine, p) for p in prompts]
        again = [ask(engine, p + tokens(200 + i, 20)) for i, p in enumerate(prompts)]
        ram = engine.cache_status()["ram"]
    warm = sum(e.timings.cache_n >= shared + own for e in again)
    report(
        "cache-eight",
        [
            f"{shared + own} tokens each, {shared} shared; budget = 4 full copies = {4 * full / 1e6:.1f} MB",
            "first round reused " + " ".join(str(e.timings.cache_n) for e in first),
            "second round reused " + " ".join(str(e.timings.cache_n) for e in again),
            f"warm {warm} of 8   (goal 8); retained {ram['unique_bytes'] / 1e6:.1f} MB, "
            f"whole copies {ram['whole_bytes'] / 1e6:.1f} MB",
        ],
        {"first": [e.timings.cache_n for e in first], "again": [e.timings.cache_n for e in again], "ram": ram},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=["capture", "overhead", "rss", "neighbour", "eight"])
    parser.add_argument("--decode", type=int, default=24, help="neighbour: tokens of the stream")
    parser.add_argument("--threads", type=int, default=1, help="neighbour: threads of the model")
    parser.add_argument("--layers", type=int, default=48, help="neighbour: layers of the generated model")
    args = parser.parse_args()
    path = args.model
    if path is None:
        path = env.cache_dir() / "models" / "bench-qwen4exp.gguf"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tiny("qwen4exp", path)
    quick = args.quick

    def neighbour() -> None:
        large = args.model or model_file(args.layers)
        bench_neighbour(large, 2 if quick else 6, args.decode, args.threads)

    parts = {
        "capture": lambda: bench_capture(path, 5 if quick else 15),
        "overhead": lambda: bench_overhead(path, 4 if quick else 15),
        "rss": lambda: bench_rss(path, 150 if quick else 1000),
        "neighbour": neighbour,
        "eight": lambda: bench_eight(path, 0.25 if quick else 1.0),
    }
    for name, part in parts.items():
        if args.only in (None, name):
            part()


if __name__ == "__main__":
    main()
