"""The measured conversation of the design, on a model with Flash-Next's state: one run, one table.

    python -m benchmarks.gpu.article [--experts 12] [--tokens 95439] [--model FILE] [--folder DIR]

Cold, live, RAM after another conversation used the slot, edits near the end and in the middle, disk
after a restart (files in the page cache, and dropped from it); what the captures take in RAM and on
disk against full copies; decoding with the cache on and off, and while the disk is written.
``benchmarks.gpu.over_http`` asks it of servers, llama-server among them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.common import Table, median, report
from benchmarks.gpu.load import N_WARM, arguments, edited, edits, place, text
from gufo_gguf.backend.llama import LlamaOptions
from gufo_gguf.engine.engine import Engine, EngineOptions
from gufo_gguf.engine.types import Finished, GenerateRequest, SamplingParams, as_tokens

GREEDY = SamplingParams(temperature=0.0)
_READ_BYTES = 512 << 10
_N_DECODE = 257


def ask(engine: Engine, tokens: list[int], n: int = 1) -> Finished:
    """One greedy answer; all but the last 5 tokens are what the next turn sends again."""
    stable = (len(tokens) - 5,)
    *_, event = engine.submit(GenerateRequest(as_tokens(tokens), sampling=GREEDY, max_tokens=n, stable=stable))
    assert isinstance(event, Finished)
    if event.error is not None:
        raise event.error
    return event


class Rows(Table):
    def row(self, name: str, end: Finished, more: str = "") -> Finished:
        t, r = end.timings, end.report
        self.data[name] = {
            "ttft_ms": t.prompt_ms,
            "restore_ms": r.restore_ms,
            "capture_ms": r.capture_ms,
            "cached": t.cache_n,
            "prefilled": t.prompt_n,
            "source": str(r.reuse_source),
            "captured": r.captured,
        }
        self.say(
            f"{name:36s} {t.prompt_ms / 1e3:8.3f} s   restore {r.restore_ms:8.1f} ms   capture {r.capture_ms:7.1f} ms"
            f"   {t.cache_n:6d} reused {t.prompt_n:6d} prefilled  ({r.reuse_source}){more}"
        )
        return end


def conversation(path: Path, settings: EngineOptions, n: int) -> Rows:
    table = Rows()
    assert settings.cache_disk is not None
    base = text(1, n)
    turn2 = base + text(2, 60)
    turn3 = turn2 + text(4, 60)
    with Engine.load(path, settings) as engine:
        ask(engine, text(99, N_WARM))
        cold = table.row("cold", ask(engine, base))
        ram = engine.cache_status()["ram"]
        table.row("live, next turn", ask(engine, turn2))
        table.data["writing"] = _decode_beside_writer(engine, table)
        table.row("another conversation", ask(engine, text(3, 4000)))
        table.row("RAM, slot was overwritten", ask(engine, turn3))
        table.say(
            f"{len(cold.report.captured)} captures of the cold request: {ram['unique_bytes'] / 1e9:.2f} GB in RAM, "
            f"as full copies {ram['whole_bytes'] / 1e9:.2f} GB"
        )
        for name, at in edits(n).items():
            end = ask(engine, edited(base, at))
            table.row(name, end, f"  {max(0, at - end.timings.cache_n)} unchanged tokens recomputed")
        _settle(engine)
        status, problems = engine.cache_status()["disk"], engine.check()
    table.say(
        f"on disk {status['used_bytes'] / 1e9:.2f} GB in {status['checkpoints']} checkpoints; "
        f"check(): {problems or 'nothing'}"
    )
    files = [f for f in settings.cache_disk.rglob("*") if f.is_file()]
    with Engine.load(path, settings) as engine:
        ask(engine, text(99, N_WARM))
        warm = table.row("disk, after a restart", ask(engine, turn3))
        n_restored = _state_bytes(engine, warm)
        decode_on = decode_rate(engine, turn3 + text(5, 8))
    table.data["streams"] = _compare_with_files(table, "page cache warm", warm, n_restored, files, dropped=False)
    _drop(files)
    with Engine.load(path, settings) as engine:
        ask(engine, text(99, N_WARM))
        dropped = table.row("disk, page cache dropped", ask(engine, turn3))
    table.data["streams_dropped"] = _compare_with_files(
        table, "page cache dropped", dropped, n_restored, files, dropped=True
    )
    with Engine.load(path, EngineOptions(llama=settings.llama, cache=False)) as engine:
        ask(engine, text(99, N_WARM))
        decode_off = decode_rate(engine, turn3 + text(5, 8))  # cold: nothing is reused
    share = decode_on / decode_off
    table.say(f"decode with the cache on {decode_on:.1f} tok/s, off {decode_off:.1f}: {share:.3f}   (goal 0.98)")
    table.data |= {"ram": ram, "disk": status, "decode_on": decode_on, "decode_off": decode_off}
    return table


def decode_rate(engine: Engine, tokens: list[int]) -> float:
    """Tokens per second of one long answer."""
    end = ask(engine, tokens, n=_N_DECODE)
    return 1e3 * (end.timings.predicted_n - 1) / end.timings.predicted_ms


def _settle(engine: Engine, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while engine.cache_status()["disk"]["waiting"] and time.monotonic() < deadline:
        time.sleep(0.1)


def _decode_beside_writer(engine: Engine, table: Rows) -> dict[str, Any]:
    """Short answers of another conversation while the checkpoints go to disk, and the same afterwards."""
    prompt = text(7, 300)
    rates: dict[str, list[float]] = {"writing": [], "quiet": []}

    def once(into: str, i: int) -> None:
        end = ask(engine, prompt + text(70 + i, 4), n=48)
        rates[into].append(1e3 * (end.timings.predicted_n - 1) / end.timings.predicted_ms)

    def written() -> int:
        return int(engine.cache_status()["disk"]["used_bytes"])

    deadline = time.monotonic() + 20
    begun = written()
    while written() == begun and engine.cache_status()["disk"]["waiting"] and time.monotonic() < deadline:
        time.sleep(0.02)  # rows are being preserved, nothing is written yet
    before = written()
    for i in range(12):
        if not engine.cache_status()["disk"]["waiting"]:
            break
        once("writing", i)
    n_bytes = written() - before
    _settle(engine)
    for i in range(12, 18):
        once("quiet", i)
    if rates["writing"]:
        share = median(rates["writing"]) / median(rates["quiet"])
        table.say(
            f"decode of a neighbour while {n_bytes / 1e6:.0f} MB go to disk: {median(rates['writing']):.1f} tok/s, "
            f"afterwards {median(rates['quiet']):.1f}: {share:.3f}   (goal 0.9)"
        )
    return {**rates, "bytes": n_bytes}


def _drop(files: list[Path]) -> None:
    """Out of the page cache, so that the next reader goes to the disk."""
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _state_bytes(engine: Engine, end: Finished) -> int:
    inventory = engine.info.inventory
    assert inventory is not None
    return end.report.restored_tokens * inventory.row_bytes + inventory.private_bytes


def _compare_with_files(
    table: Rows, name: str, end: Finished, n_restored: int, files: list[Path], *, dropped: bool
) -> dict[str, float]:
    """The restore's rate against reading the folder's files one after the other, and against their checksum."""
    if dropped:
        _drop(files)
    buffer = np.empty(_READ_BYTES, np.uint8)
    n_bytes, started = 0, time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while n := file.readinto(buffer.data):
                n_bytes += n
    read = n_bytes / (time.perf_counter() - started)
    block = np.ones(64 << 20, np.uint8)
    started = time.perf_counter()
    for _ in range(4):
        summed = xxhash.xxh3_128()
        for at in range(0, block.nbytes, _READ_BYTES):
            summed.update(block[at : at + _READ_BYTES].data)
    checksum = 4 * block.nbytes / (time.perf_counter() - started)
    rate = n_restored / (end.report.restore_ms / 1e3)
    table.say(
        f"disk to slot, {name}: {rate / 1e9:.2f} GB/s; reading alone {read / 1e9:.2f}, checksum alone "
        f"{checksum / 1e9:.2f}: {rate / min(read, checksum):.2f} of the slower   (goal 0.8)"
    )
    return {"restore": rate, "read": read, "checksum": checksum}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--staging", type=int, default=1, help="MiB of staging for the disk tier")
    args = parser.parse_args()
    with place(args) as (path, folder):
        options = LlamaOptions(n_ctx=args.tokens + 4096, n_slots=1, n_threads=args.threads)
        settings = EngineOptions(
            llama=options,
            cache_disk=folder / "cache",
            cache_disk_bytes=32 << 30,
            cache_disk_staging_bytes=args.staging << 20,
            cache_ram_bytes=24 << 30,
        )
        table = conversation(path, settings, args.tokens)
        report("gpu-article", table.lines, table.data)


if __name__ == "__main__":
    main()
