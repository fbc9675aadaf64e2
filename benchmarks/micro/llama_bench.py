"""Single-stream speed against llama-bench of the same build, as ratios of tokens per second.

Same model, same libraries, same threads, flash attention on in both, in turn, several rounds, each
case in a process of its own (libgomp puts threads to sleep at every barrier once a process has more of
them than the machine has cores: two engines in one process decode a quarter slower than one):

    llama-bench     -p N -n N, one repetition per round (it warms up by itself)
    backend         the same passes through LlamaBackend, logits read after each
    no-cache, cache one request through the engine, sampled greedily

And, where neighbours on the machine cannot reach: CPU time of passes through the backend and
through a bare llama_decode, in turn, in one process (case "overhead").

Usage: python -m benchmarks.micro.llama_bench [--model FILE] [--threads N] [--rounds N] [--llama-bench FILE]
`make tools` builds llama-bench.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import median, report
from gufo_gguf.backend import native
from gufo_gguf.backend.base import Span
from gufo_gguf.backend.libpath import library_dir
from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions, default_threads
from gufo_gguf.cache.types import Tokens
from gufo_gguf.core.errors import ConfigError
from gufo_gguf.engine.engine import Engine, EngineOptions
from gufo_gguf.engine.types import Finished, GenerateRequest, SamplingParams
from gufo_gguf.models.default import model_path

GOAL = 0.95
PEER = "llama-bench"
CASES = ("backend", "no-cache", "cache")
N_UBATCH = 512

Rates = dict[str, float]
"""{"prefill": tokens per second, "decode": tokens per second}."""


def find_llama_bench() -> Path:
    """llama-bench in the build tree that the libraries came from."""
    key = "-".join(library_dir().name.split("-")[1:2])
    found = sorted(library_dir().parent.glob(f"upstream-{key}-*/bin/llama-bench"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise ConfigError("llama-bench is not built: run `make tools`, or name it with --llama-bench")
    return found[-1]


def run_llama_bench(program: Path, model: Path, n_prompt: int, n_decode: int, n_threads: int) -> Rates:
    command = [str(program), "-m", str(model), "-p", str(n_prompt), "-n", str(n_decode), "-t", str(n_threads)]
    command += ["-b", "2048", "-ub", str(N_UBATCH), "-fa", "on", "-r", "1", "-o", "json"]
    libraries = {"LD_LIBRARY_PATH": str(program.parent), "DYLD_LIBRARY_PATH": str(program.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **libraries})
    results = json.loads(done.stdout)
    return {"decode" if r["n_gen"] else "prefill": float(r["avg_ts"]) for r in results}


def run_backend(backend: LlamaBackend, n_prompt: int, n_decode: int) -> Rates:
    tokens = np.random.default_rng(0).integers(0, backend.info.n_vocab, n_prompt + n_decode, dtype=np.int32)
    backend.truncate(0, 0)
    started = time.perf_counter()
    for at in range(0, n_prompt, backend.info.n_batch):
        end = min(at + backend.info.n_batch, n_prompt)
        backend.decode([Span(0, tokens[at:end], end == n_prompt)])
    backend.logits(0)
    prefilled = time.perf_counter()
    backend.truncate(0, 0)  # as llama-bench does, which decodes from an empty context
    restarted = time.perf_counter()
    for i in range(n_decode):
        backend.decode([Span(0, tokens[n_prompt + i : n_prompt + i + 1], True)])
        backend.logits(0)
    return {"prefill": n_prompt / (prefilled - started), "decode": n_decode / (time.perf_counter() - restarted)}


class Overhead:
    """CPU time of passes through the backend over that of a bare llama_decode, in turn (medians).

    Slot 0 is the backend's and slot 1 is driven past it, so both run in the same context.
    """

    def __init__(self, backend: LlamaBackend) -> None:
        self._backend = backend
        self._low = native.bindings()
        self._context = ctypes.cast(backend.ctx_ptr, self._low.llama_context_p_ctypes)

    def measure(self, n_passes: int, n_tokens: int) -> float:
        """n_passes of n_tokens each, from empty slots on."""
        tokens = np.random.default_rng(1).integers(0, self._backend.info.n_vocab, n_tokens, dtype=np.int32)
        batch = self._low.llama_batch_init(n_tokens, 0, 1)
        ours, bare = [], []
        for i in range(n_passes):
            if i == 0 or self._backend.position(0) + n_tokens > self._backend.info.n_ctx:
                self._backend.truncate(0, 0)
                self._backend.truncate(1, 0)
            started = time.process_time()
            self._backend.decode([Span(0, tokens, True)])
            self._backend.logits(0)
            between = time.process_time()
            self._bare(batch, tokens, self._backend.position(1))
            ours.append(between - started)
            bare.append(time.process_time() - between)
        self._low.llama_batch_free(batch)
        return median(ours) / median(bare)

    def _bare(self, batch: Any, tokens: Tokens, position: int) -> None:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens.tolist()):
            batch.token[i], batch.pos[i] = token, position + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 1, i == len(tokens) - 1
        if self._low.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        self._low.llama_get_logits_ith(self._context, len(tokens) - 1)


class EngineRuns:
    """One request after another, each with a prompt of its own, so that none is found in the cache."""

    def __init__(self, engine: Engine, n_vocab: int) -> None:
        self._engine = engine
        self._n_vocab = n_vocab
        self._n_runs = 0

    def __call__(self, n_prompt: int, n_decode: int) -> Rates:
        # llama-bench decodes from an empty context: two requests, a long prompt and a short one
        prefill, _ = self._request(n_prompt, 1)
        _, decode = self._request(2, n_decode + 1)
        return {"prefill": prefill, "decode": decode}

    def _request(self, n_prompt: int, n_decode: int) -> tuple[float, float]:
        self._n_runs += 1
        rng = np.random.default_rng(self._n_runs)
        tokens = rng.integers(0, self._n_vocab, n_prompt, dtype=np.int32)
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        stream = self._engine.submit(GenerateRequest(tokens, sampling, max_tokens=n_decode))
        done = [event for event in stream if isinstance(event, Finished)][-1]
        assert done.timings.predicted_n == n_decode and done.timings.prompt_n == n_prompt, done
        rates = done.timings.as_dict()
        # the first token's time is the prompt's: n_decode tokens are n_decode - 1 passes
        passes = (n_decode - 1) / n_decode
        return float(rates["prompt_per_second"]), float(rates["predicted_per_second"]) * passes


def serve_case(case: str, model: Path, options: LlamaOptions, n_prompt: int, n_decode: int) -> None:
    """Load one of CASES, warm it up, then answer each line of stdin with the JSON of one round."""
    with ExitStack() as stack:
        run: Callable[[int, int], Rates]
        if case in ("backend", "overhead"):
            backend = stack.enter_context(LlamaBackend(model, options))
            run = partial(run_backend, backend)
        else:
            engine_options = EngineOptions(llama=options, cache=case == "cache", cache_ram_bytes=1 << 30)
            engine = stack.enter_context(Engine.load(model, engine_options))
            run = EngineRuns(engine, engine.info.n_vocab)
        run(n_prompt, n_decode)
        if case == "overhead":
            overhead = Overhead(backend)
            run = lambda p, d: {"prefill": overhead.measure(7, p), "decode": overhead.measure(2 * d, 1)}  # noqa: E731
        for _ in sys.stdin:
            print(json.dumps(run(n_prompt, n_decode)), flush=True)


class Child:
    """serve_case in a process of its own, with this one's arguments; calling it runs one round."""

    def __init__(self, case: str) -> None:
        command = [sys.executable, "-m", "benchmarks.micro.llama_bench", *sys.argv[1:], "--case", case]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self) -> Rates:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a child ended with {self._process.wait()}")
        return dict(json.loads(answer))

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description="Single-stream speed against llama-bench")
    parser.add_argument("--model", type=Path, default="smollm2", help="file or name; default: smollm2")
    parser.add_argument("--llama-bench", type=Path, help="default: the one that `make tools` built")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--case", choices=[*CASES, "overhead"], help="serve this alone: a line in, a round as JSON out")
    arguments = parser.parse_args()
    model, sizes = model_path(arguments.model), (arguments.prompt, arguments.decode)
    n_ctx = -(-2 * sum(sizes) // 256) * 256
    options = LlamaOptions(n_ctx=n_ctx, n_slots=2, n_ubatch=N_UBATCH, n_threads=arguments.threads)
    if arguments.case:
        serve_case(arguments.case, model, options, *sizes)
        return
    program = arguments.llama_bench or find_llama_bench()
    rounds = []
    with ExitStack() as stack:
        children = {case: stack.enter_context(Child(case)) for case in CASES}
        for child in children.values():
            child()  # loaded and warm before the first measured round
        for _ in range(arguments.rounds):
            rates = {case: child() for case, child in children.items()}
            rounds.append({PEER: run_llama_bench(program, model, *sizes, arguments.threads)} | rates)
    with Child("overhead") as child:
        overhead = child()

    setting = f"{arguments.threads} thread(s), prefill of {sizes[0]}, decode of {sizes[1]}, {len(rounds)} rounds"
    lines = [f"{model.name}, {setting}"]
    for what in ("prefill", "decode"):
        for name in (PEER, *CASES):
            speeds = [r[name][what] for r in rounds]
            ratio = [r[name][what] / r[PEER][what] for r in rounds]
            lines.append(
                f"{what:8} {name:12}{median(speeds):9.1f} tok/s ({min(speeds):8.1f} ..{max(speeds):8.1f})"
                f"   ratio {median(ratio):5.2f} ({min(ratio):.2f} .. {max(ratio):.2f})"
            )
    each = ", ".join(f"{what} {ratio:.3f}" for what, ratio in overhead.items())
    lines.append(f"CPU time of a pass through the backend over a bare llama_decode: {each}")
    lines.append(f"goal: at least {GOAL} of llama-bench")
    report("llama_bench", lines, {"rounds": rounds, "cpu_overhead": overhead})


if __name__ == "__main__":
    main()
