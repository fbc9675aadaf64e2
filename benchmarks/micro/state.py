"""State out and in against memcpy, for the geometry of Flash-Next's state.

A generated model with the real one's layers, heads and state sizes (27,648 bytes of rows a token,
118 MB of private state) but a narrow width and few experts: what the cache moves is real, what a
token costs to compute is far less than with the real weights.  So "tokens of decode" below is an
upper bound for the real model.

Measured in turn, several times, in one run:

    rows out / in       2,048 rows, in chunks of 256 packed rows, between the slot and host buffers
    private out / in    the whole private state
    memcpy              numpy's copy of the same bytes between two such host buffers, per kind
    capture             private state and a tail of 128 rows: what one checkpoint copies
    decode              one token, alone

"In" looks for NaN in every value; "trusted" skips that (payloads that never left our hands).
Shares are taken from CPU time as well: on a busy machine wall-clock time measures the neighbours.

Usage: python -m benchmarks.micro.state [--layers N] [--repeats N] [--threads N] [--model FILE]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.common import median, report
from gufo_gguf.backend.base import Bytes, Span
from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions
from gufo_gguf.core import env
from gufo_gguf.models.shape import shape_geometry, write_shape

CHUNK_ROWS, N_CHUNKS = 256, 8
N_ROWS = CHUNK_ROWS * N_CHUNKS
N_TAIL = CHUNK_ROWS // 2
GOAL = 0.8

Seconds = tuple[float, float]
"""(wall, CPU of this thread)."""


def timed(action: Callable[[], object]) -> Seconds:
    wall, cpu = time.perf_counter(), time.thread_time()
    action()
    return time.perf_counter() - wall, time.thread_time() - cpu


def model_file(n_layer: int) -> Path:
    """The generated model, made on first use in the cache folder."""
    path = env.cache_dir() / "models" / f"flash-next-state-{n_layer}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_shape("flash-next", shape_geometry("flash-next", 8, n_layer=n_layer, n_embd=128, n_vocab=1024), path)
    return path


class Bench:
    def __init__(self, backend: LlamaBackend) -> None:
        inventory = backend.info.inventory
        assert inventory is not None
        self.backend = backend
        self.chunk_bytes = CHUNK_ROWS * inventory.row_bytes
        self.row_bytes, self.private_bytes = inventory.row_bytes, inventory.private_bytes
        self.tokens = np.random.default_rng(0).integers(0, 512, N_ROWS + 64, dtype=np.int32)
        self.chunks, self.copies = ([self._buffer(self.chunk_bytes) for _ in range(N_CHUNKS)] for _ in range(2))
        self.private, self.private_copy = self._buffer(self.private_bytes), self._buffer(self.private_bytes)
        self._fill()

    def _buffer(self, n_bytes: int) -> Bytes:
        buffer = self.backend.alloc(n_bytes)
        buffer[:] = 1  # touch every page: what is measured is copying, not the kernel's zeroing
        return buffer

    def _fill(self) -> None:
        """Slot 0 at 2,048 tokens.  The rows are made up: copying does not look at them, computing
        them would take minutes."""
        values = np.random.default_rng(1).normal(size=self.chunk_bytes // 2).astype(np.float16).view(np.uint8)
        for chunk in self.chunks:
            chunk[:] = values
        self.backend.decode([Span(0, self.tokens[:1], True)])
        self.backend.private_out(0, self.private)
        self.private[8:12].view(np.int32)[:] = N_ROWS  # the header's position
        self._restore(0, self.private)

    def _restore(self, slot: int, private: Bytes) -> None:
        self.backend.begin_restore(slot, self.tokens[:N_ROWS])
        self._load_rows(slot)
        self.backend.load_private(slot, private)
        self.backend.finish_restore(slot)

    def _load_rows(self, slot: int) -> None:
        for i, chunk in enumerate(self.chunks):
            self.backend.load_rows(slot, i * CHUNK_ROWS, CHUNK_ROWS, chunk, CHUNK_ROWS)

    # -- what is measured ------------------------------------------------------------------------

    def rows_out(self) -> None:
        for i, chunk in enumerate(self.chunks):
            self.backend.rows_out(0, i * CHUNK_ROWS, CHUNK_ROWS, chunk)

    def rows_memcpy(self) -> None:
        for copy, chunk in zip(self.copies, self.chunks, strict=True):
            np.copyto(copy, chunk)

    def rows_in(self, trusted: bool) -> Seconds:
        self.backend.begin_restore(1, self.tokens[:N_ROWS], trusted=trusted)
        seconds = timed(lambda: self._load_rows(1))
        self.backend.abort_restore(1)
        return seconds

    def private_out(self) -> None:
        self.backend.private_out(0, self.private)

    def private_memcpy(self) -> None:
        np.copyto(self.private_copy, self.private)

    def private_in(self, trusted: bool) -> Seconds:
        self.backend.begin_restore(1, self.tokens[:N_ROWS], trusted=trusted)
        seconds = timed(lambda: self.backend.load_private(1, self.private))
        self.backend.abort_restore(1)
        return seconds

    def whole_restore(self) -> Seconds:
        seconds = timed(lambda: self._restore(1, self.private))
        self.backend.truncate(1, 0)
        return seconds

    def capture(self) -> None:
        self.backend.private_out(0, self.private)
        self.backend.rows_out(0, N_ROWS - N_TAIL, N_TAIL, self.copies[0])

    def decode(self) -> Seconds:
        at = self.backend.position(0)
        seconds = timed(lambda: self.backend.decode([Span(0, self.tokens[at : at + 1], True)]))
        if self.backend.position(0) >= len(self.tokens):
            self._restore(0, self.private_copy)
        return seconds


def measure(bench: Bench, repeats: int) -> dict[str, list[Seconds]]:
    """Each case in turn, ``repeats`` times; the first round is not counted."""
    cases: dict[str, Callable[[], Seconds]] = {
        "rows memcpy": lambda: timed(bench.rows_memcpy),
        "rows out": lambda: timed(bench.rows_out),
        "rows in": lambda: bench.rows_in(trusted=False),
        "rows in, trusted": lambda: bench.rows_in(trusted=True),
        "private memcpy": lambda: timed(bench.private_memcpy),
        "private out": lambda: timed(bench.private_out),
        "private in": lambda: bench.private_in(trusted=False),
        "private in, trusted": lambda: bench.private_in(trusted=True),
        "capture": lambda: timed(bench.capture),
        "whole restore": bench.whole_restore,
    }
    bench.private_memcpy()
    samples: dict[str, list[Seconds]] = {name: [] for name in cases}
    for i in range(repeats + 1):
        for name, case in cases.items():
            seconds = case()
            if i:
                samples[name].append(seconds)
    # last, as it moves slot 0 on: the cases above copy the same bytes every time
    samples["decode"] = [bench.decode() for _ in range(repeats)]
    return samples


def table(bench: Bench, samples: dict[str, list[Seconds]]) -> list[str]:
    lines = [f"{'':20}{'GB/s: median (range)':>28}{'share of memcpy':>18}{'of its CPU time':>18}"]
    for kind, n_bytes in (("rows", N_ROWS * bench.row_bytes), ("private", bench.private_bytes)):
        base = samples[f"{kind} memcpy"]
        for name, seconds in samples.items():
            if not name.startswith(kind):
                continue
            walls, cpus = ([s[i] for s in seconds] for i in (0, 1))
            rate = [n_bytes / wall / 1e9 for wall in walls]
            shares = [median([b[i] for b in base]) / median(own) for i, own in ((0, walls), (1, cpus))]
            lines.append(
                f"{name:20}{median(rate):10.2f} ({min(rate):5.2f} ..{max(rate):6.2f}){shares[0]:18.2f}{shares[1]:18.2f}"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="State out and in against memcpy")
    parser.add_argument("--layers", type=int, default=48, help="48 is the real geometry")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="for the decode; 0 = physical cores")
    parser.add_argument("--model", type=Path, help="another model file; default: generated")
    arguments = parser.parse_args()

    options = LlamaOptions(n_ctx=N_ROWS + 256, n_slots=2, n_batch=256, n_ubatch=256, n_threads=arguments.threads)
    with LlamaBackend(arguments.model or model_file(arguments.layers), options) as backend:
        bench = Bench(backend)
        samples = measure(bench, arguments.repeats)
        token, capture, restore = (median([s[0] for s in samples[n]]) for n in ("decode", "capture", "whole restore"))
        lines = [
            f"{backend.info.arch}: {bench.row_bytes:,} bytes a row, {bench.private_bytes / 1e6:.1f} MB private",
            *table(bench, samples),
            f"goal: at least {GOAL} of memcpy, out and in",
            f"one capture (private + {N_TAIL} rows): {1e3 * capture:.1f} ms = {capture / token:.2f} tokens of decode "
            f"({1e3 * token:.1f} ms each here; the real weights cost more)",
            f"one whole restore of {N_ROWS} tokens, cells set: {1e3 * restore:.1f} ms",
        ]
        data = {
            "row_bytes": bench.row_bytes,
            "private_bytes": bench.private_bytes,
            "n_rows": N_ROWS,
            "seconds_wall_cpu": samples,
        }
    report("state", lines, data)


if __name__ == "__main__":
    main()
