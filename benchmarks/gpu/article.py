"""The measured conversation of the design, on a model with Flash-Next's state: one run, one table.

    python -m benchmarks.gpu.article [--experts 12] [--tokens 95439] [--model FILE] [--folder DIR]

Cold, live, RAM after another conversation used the slot, disk after a restart, edits near the end and
in the middle; what six captures take in RAM and on disk against full copies; and the transfers as
shares of pinned copies measured in the same run (through torch where a GPU is there, memcpy else).
Random weights: only shapes matter here, the text means nothing.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import median, report
from gufo_gguf.backend.base import Span
from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions
from gufo_gguf.engine.engine import Engine, EngineOptions
from gufo_gguf.engine.types import Finished, GenerateRequest, SamplingParams, as_tokens
from gufo_gguf.models.shape import shape_geometry, write_shape

GREEDY = SamplingParams(temperature=0.0)
CHUNK = 256


def text(seed: int, n: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, 500, n)]


def ask(engine: Engine, tokens: list[int], n: int = 1) -> Finished:
    stable = (len(tokens) - 5,)
    *_, event = engine.submit(GenerateRequest(as_tokens(tokens), sampling=GREEDY, max_tokens=n, stable=stable))
    assert isinstance(event, Finished)
    if event.error is not None:
        raise event.error
    return event


def line(name: str, end: Finished) -> tuple[str, dict[str, Any]]:
    t, r = end.timings, end.report
    data = {
        "ttft_ms": t.prompt_ms,
        "restore_ms": r.restore_ms,
        "capture_ms": r.capture_ms,
        "cached": t.cache_n,
        "prefilled": t.prompt_n,
        "source": str(r.reuse_source),
        "captured": r.captured,
    }
    return (
        f"{name:34s} {t.prompt_ms / 1e3:8.2f} s   restore {r.restore_ms:8.1f} ms   capture {r.capture_ms:7.1f} ms   "
        f"{t.cache_n:6d} reused {t.prompt_n:6d} prefilled  ({r.reuse_source})",
        data,
    )


def transfers(path: Path, options: LlamaOptions, n_tokens: int) -> tuple[list[str], dict[str, Any]]:
    """Rows and private state out and in, as shares of a copy of the same bytes in the same run."""
    with LlamaBackend(path, options) as backend:
        inventory = backend.info.inventory
        assert inventory is not None
        tokens = as_tokens(text(1, n_tokens))
        for at in range(0, n_tokens, 2048):
            backend.decode([Span(0, tokens[at : at + 2048], True)])
        rows = n_tokens // CHUNK * CHUNK
        chunk_bytes = CHUNK * inventory.row_bytes
        memory = backend.alloc(rows // CHUNK * chunk_bytes)
        chunks = [memory[i * chunk_bytes : (i + 1) * chunk_bytes] for i in range(rows // CHUNK)]
        private = backend.alloc(inventory.private_bytes)
        backend_pinned = backend.pinned
        tail = backend.alloc(CHUNK * inventory.row_bytes)
        rest = n_tokens - rows
        out: dict[str, list[float]] = {k: [] for k in ("rows_out", "private_out", "rows_in", "private_in", "finish")}
        for _ in range(4):
            t = time.perf_counter()
            for i, chunk in enumerate(chunks):
                backend.rows_out(0, i * CHUNK, CHUNK, chunk)
            out["rows_out"].append(time.perf_counter() - t)
            if rest:
                backend.rows_out(0, rows, rest, tail)
            t = time.perf_counter()
            backend.private_out(0, private)
            out["private_out"].append(time.perf_counter() - t)
            backend.begin_restore(0, tokens, trusted=True)
            t = time.perf_counter()
            backend.load_pieces(0, [(i * CHUNK, CHUNK, c, CHUNK) for i, c in enumerate(chunks)])
            backend.wait_restore(0)
            out["rows_in"].append(time.perf_counter() - t)
            if rest:
                backend.load_pieces(0, [(rows, rest, tail, rest)])
            t = time.perf_counter()
            backend.load_private(0, private)
            backend.wait_restore(0)
            out["private_in"].append(time.perf_counter() - t)
            t = time.perf_counter()
            backend.finish_restore(0)
            out["finish"].append(time.perf_counter() - t)
        limit = copy_rates(memory.nbytes, inventory.private_bytes)
    best = {k: min(v) for k, v in out.items()}
    row_gb, private_gb = memory.nbytes / 1e9, inventory.private_bytes / 1e9
    lines = [
        f"{inventory.row_bytes} bytes a row, {inventory.private_bytes / 1e6:.1f} MB private; pinned: {backend_pinned}; peer: {limit['kind']}",
        f"rows out    {row_gb / best['rows_out']:6.1f} GB/s   {limit['rows_out'] / best['rows_out']:.2f} of the copy",
        f"rows in     {row_gb / best['rows_in']:6.1f} GB/s   {limit['rows_in'] / best['rows_in']:.2f} of the copy   (goal 0.9)",
        f"private out {private_gb / best['private_out']:6.1f} GB/s   {best['private_out'] / limit['private_out']:.2f} x the copy's time   (goal 1.2)",
        f"private in  {private_gb / best['private_in']:6.1f} GB/s   {best['private_in'] / limit['private_in']:.2f} x the copy's time",
        f"cells and checks at finish {1e3 * best['finish']:.1f} ms; whole restore "
        f"{(best['rows_in'] + best['private_in'] + best['finish']) / limit['rows_in']:.2f} x the rows' copy   (goal 1.6)",
    ]
    return lines, {"seconds": out, "copy_seconds": limit}


def copy_rates(rows_bytes: int, private_bytes: int) -> dict[str, Any]:
    """Seconds of plain copies of the same sizes: pinned host <-> device, or memcpy without a GPU."""
    try:
        import torch

        if not torch.cuda.is_available():
            raise ImportError
    except ImportError:
        a, b = np.ones(rows_bytes, np.uint8), np.zeros(rows_bytes, np.uint8)

        def host(n: int) -> float:
            best = 1e9
            for _ in range(4):
                t = time.perf_counter()
                b[:n] = a[:n]
                best = min(best, time.perf_counter() - t)
            return best

        return {
            "kind": "memcpy",
            "rows_in": host(rows_bytes),
            "rows_out": host(rows_bytes),
            "private_out": host(private_bytes),
            "private_in": host(private_bytes),
        }

    def device(n: int, *, to_device: bool) -> float:
        pinned = torch.empty(n, dtype=torch.uint8, pin_memory=True)
        gpu = torch.empty(n, dtype=torch.uint8, device="cuda")
        best = 1e9
        for _ in range(4):
            torch.cuda.synchronize()
            t = time.perf_counter()
            gpu.copy_(pinned, non_blocking=True) if to_device else pinned.copy_(gpu, non_blocking=True)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - t)
        return best

    return {
        "kind": "cuda pinned",
        "rows_in": device(rows_bytes, to_device=True),
        "rows_out": device(rows_bytes, to_device=False),
        "private_in": device(private_bytes, to_device=True),
        "private_out": device(private_bytes, to_device=False),
    }


def conversation(path: Path, options: LlamaOptions, n: int, folder: Path) -> tuple[list[str], dict[str, Any]]:
    lines: list[str] = []
    data: dict[str, Any] = {}
    disk = folder / "cache"

    def open_engine(**more: Any) -> Engine:
        return Engine.load(
            path,
            EngineOptions(llama=options, cache_disk=disk, cache_disk_bytes=32 << 30, cache_ram_bytes=24 << 30, **more),
        )

    def note(name: str, end: Finished) -> Finished:
        shown, values = line(name, end)
        lines.append(shown)
        print("  ... " + shown, flush=True)  # a run that is cut off has said what it measured
        data[name] = values
        return end

    base = text(1, n)
    with open_engine() as engine:
        ask(engine, text(99, 600))  # the first passes of a process are slower
        cold = note("cold", ask(engine, base))
        ram = engine.cache_status()["ram"]
        turn2 = base + text(2, 60)
        note("live, next turn", ask(engine, turn2))
        note("another conversation", ask(engine, text(3, 4000)))
        turn3 = turn2 + text(4, 60)
        note("RAM, slot was overwritten", ask(engine, turn3))
        print(f"  ... six captures: {ram}", flush=True)
        for name, at in (
            ("edit near the end", round(n * 85385 / 95439)),
            ("edit in the middle", round(n * 47734 / 95439)),
        ):
            edited = list(base)
            edited[at] = (edited[at] + 1) % 500
            end = note(f"{name}, token {at}", ask(engine, edited))
            lines[-1] += f"  {max(0, at - end.timings.cache_n)} unchanged tokens recomputed"
        deadline = time.monotonic() + 60
        while engine.cache_status()["disk"]["waiting"] and time.monotonic() < deadline:
            time.sleep(0.2)
        status = engine.cache_status()["disk"]
        problems = engine.check()
    lines.append(
        f"{len(cold.report.captured)} captures of the cold request: {ram['unique_bytes'] / 1e9:.2f} GB in RAM, full copies {ram['whole_bytes'] / 1e9:.2f} GB"
    )
    print(f"  ... disk: {status}", flush=True)
    lines.append(
        f"on disk {status['used_bytes'] / 1e9:.2f} GB in {status['checkpoints']} checkpoints; check(): {problems or 'nothing'}"
    )
    with open_engine() as engine:
        ask(engine, text(99, 600))
        note("disk, after a restart", ask(engine, turn3))
        decode_on = decode_rate(engine, turn3)
    with Engine.load(path, EngineOptions(llama=options, cache=False)) as engine:
        ask(engine, turn3)
        decode_off = decode_rate(engine, turn3)
    lines.append(
        f"decode with the cache on {decode_on:.1f} tok/s, off {decode_off:.1f}: {decode_on / decode_off:.3f}   (goal 0.98)"
    )
    data |= {"ram": ram, "disk": status, "decode_on": decode_on, "decode_off": decode_off}
    return lines, data


def decode_rate(engine: Engine, tokens: list[int]) -> float:
    rates = []
    for i in range(3):
        end = ask(engine, tokens + text(50 + i, 8), n=64)
        rates.append(1e3 * (end.timings.predicted_n - 1) / end.timings.predicted_ms)
    return median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=95_439)
    parser.add_argument("--experts", type=int, default=12)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--n-embd", type=int)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--skip", choices=["transfers", "conversation"], action="append", default=[])
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        path = args.model
        if path is None:
            path = folder / "flash-next.gguf"
            started = time.perf_counter()
            geometry = shape_geometry(
                "flash-next",
                args.experts,
                **{k: v for k, v in (("n_layer", args.layers), ("n_embd", args.n_embd)) if v},
            )
            write_shape("flash-next", geometry, path, ftype="q8_0")
            print(
                f"model: {path.stat().st_size / 1e9:.2f} GB written in {time.perf_counter() - started:.0f} s",
                flush=True,
            )
        options = LlamaOptions(n_ctx=args.tokens + 4096, n_slots=1, n_threads=args.threads)
        if "transfers" not in args.skip:
            report("gpu-transfers", *transfers(path, options, args.tokens))
        if "conversation" not in args.skip:
            report("gpu-article", *conversation(path, options, args.tokens, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
