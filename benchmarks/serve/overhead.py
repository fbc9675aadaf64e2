"""What HTTP and scheduling add to each token of one stream: ``python -m benchmarks.serve.overhead``.

    engine   events of Engine.submit, read in this process
    http     the same request to a ``gufo serve`` of its own, read from a raw socket

Both are timed from the first generated token to the last, so that prompts count for nothing, with the
same model, threads and tokens, in turns.  The difference of the medians over the tokens between them is
the overhead; the client's own reading is part of it.  A tiny model, since a pass of it takes little and
what comes on top shows; a quiet machine, since both sides of the pipe want a core.

Beside the wall time stands the processor time of the process that has the model, of the whole request:
it says what there is to save, and a busy machine changes it little.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.common import interleaved, median, report, spread
from gufo_gguf.engine.engine import Engine
from gufo_gguf.engine.flags import engine_options
from gufo_gguf.engine.types import GenerateRequest, SamplingParams, TextDelta, as_tokens
from gufo_gguf.models.tiny import write_tiny
from tests.engine.served import Served

_PROMPT = "What follows is a list of words. " * 4
_GOAL_US = 150
_FRAMES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": _PROMPT}]},
    "/v1/completions": {"prompt": _PROMPT},
    "/completion": {"prompt": _PROMPT},
    "/v1/messages": {"messages": [{"role": "user", "content": _PROMPT}]},
    "/v1/responses": {"input": _PROMPT},
}


def from_engine(engine: Engine, n_tokens: int) -> float:
    """Seconds from the first token's event to the last one's."""
    tokens = as_tokens(engine.vocab.tokenize(_PROMPT, add_special=True, parse_special=True))
    params = SamplingParams(temperature=0, ignore_eos=True)
    first = last = 0.0
    for event in engine.submit(GenerateRequest(tokens, sampling=params, max_tokens=n_tokens)):
        if isinstance(event, TextDelta):
            last = time.perf_counter()
            first = first or last
    return last - first


def from_http(address: tuple[str, int], path: str, n_tokens: int) -> float:
    """Seconds from the first piece of the answer's frames to the last; one connection, bytes as they come."""
    body: dict[str, Any] = {**_FRAMES[path], "stream": True, "temperature": 0, "ignore_eos": True}
    body["n_predict"] = n_tokens
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    marks = (b'"content":"', b'"text":"', b"_delta", b".delta")
    with socket.create_connection(address) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(head.encode() + b"Connection: close\r\n\r\n" + data)
        first = last = 0.0
        n_seen = 0
        while chunk := sock.recv(65536):
            n = sum(chunk.count(mark) for mark in marks)
            if n:
                n_seen += n
                last = time.perf_counter()
                first = first or last
    if n_seen < n_tokens // 8:
        raise RuntimeError(f"{path}: {n_seen} pieces for {n_tokens} tokens")
    return last - first


@dataclass
class Costs:
    """Processor seconds of each case's runs, beside the wall times."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def of(self, name: str, process: psutil.Process, case: Callable[[], float]) -> Callable[[], float]:
        """The case, with what it costs ``process`` noted."""

        def run() -> float:
            before = process.cpu_times()
            wall = case()
            after = process.cpu_times()
            self.seconds[name].append(after.user + after.system - before.user - before.system)
            return wall

        return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--arch", default="llama", help="of the tiny model")
    parser.add_argument("--model", type=Path, help="a GGUF file instead")
    parser.add_argument("--paths", nargs="*", default=list(_FRAMES))
    options = parser.parse_args()
    model = options.model
    if model is None:
        model = Path(write_to(options.arch))
    server = Served(model, "-c", 2048, "--config", "/dev/null")
    try:
        split = urlsplit(str(server.http.base_url))
        address = (str(split.hostname), int(split.port or 80))
        flags = {"ctx_size": 2048, "threads": 1, "batch_size": 256, "ubatch_size": 64, "cache_ram_bytes": 64 << 20}
        with Engine.load(model, engine_options(**flags)) as engine:  # type: ignore[arg-type]
            n = options.tokens
            costs, other = Costs(), psutil.Process(server.child.pid)
            cases: dict[str, Any] = {"engine": costs.of("engine", psutil.Process(), lambda: from_engine(engine, n))}
            for path in options.paths:
                cases[path] = costs.of(path, other, lambda path=path: from_http(address, path, n))  # type: ignore[misc]
            interleaved(cases, 1)  # warm
            costs.seconds.clear()
            samples = interleaved(cases, options.repeats)
    finally:
        server.discard()
    base = median(samples["engine"])
    lines = [f"engine: {1e6 * base / (n - 1):.0f} µs a token; {spread(samples['engine'])} for {n} tokens"]
    figures = {"engine_us_per_token": 1e6 * base / (n - 1)}
    for path in options.paths:
        over = 1e6 * (median(samples[path]) - base) / (n - 1)
        best = 1e6 * (min(samples[path]) - min(samples["engine"])) / (n - 1)
        cpu = 1e6 * (median(costs.seconds[path]) - median(costs.seconds["engine"])) / n
        lines.append(
            f"{path}: {over:+.0f} µs a token by medians, {best:+.0f} by the best of each (goal: {_GOAL_US}); "
            f"processor {cpu:+.0f}"
        )
        figures[path] = over
    report("serve-overhead", lines, {"us_per_token": figures, "samples_s": samples, "tokens": n})


def write_to(arch: str) -> str:
    """A tiny model in the cache folder."""
    from gufo_gguf.core import env

    path = env.cache_dir() / "models" / f"overhead-{arch}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tiny(arch, path)
    return str(path)


if __name__ == "__main__":
    main()
