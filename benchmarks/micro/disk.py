"""The disk tier against the disk itself: everything as ratios of one run.

    python benchmarks/micro/disk.py [--folder DIR] [--tokens 16384] [--runs 5] [--json FILE]

Geometry: rows and private state of a Flash-Next-sized model (27,648 bytes a row, 118 MB private).

restore   a checkpoint into RAM, checked, against reading the same files one after the other with one
          thread, into the same RAM (and, which no reader that keeps the bytes can do, into one hot
          1 MiB buffer), and against the checksum's speed over RAM; page cache warm, then cold
          (dropped with posix_fadvise)
write     a checkpoint, durable, against writing the same bytes with the same number of fsyncs
sharing   six checkpoints of one conversation: blocks on disk / unique bytes
start     1,000 manifests: the whole start-up against reading the manifests' own bytes

Each figure is the best of ``--runs`` alternating runs, since other load only ever adds time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from gufo_gguf.cache.types import Origin
from gufo_gguf.store.disk import DiskStore
from gufo_gguf.store.jobs import ChunkJob, WriteJob, WriteResult
from gufo_gguf.store.parts import restore_parts
from gufo_gguf.store.scan import Loaded
from gufo_gguf.store.types import BufferSource, CheckpointMeta, Damage, Part

CHUNK_ROWS = 256
ROW_BYTES = 27_648
PRIVATE_BYTES = 118 << 20
ARTICLE_BOUNDARIES = (22_528, 47_104, 69_632, 94_208, 95_434, 95_439)
MIB = 1 << 20


def best_of(runs: int, *tasks: Callable[[], float]) -> list[float]:
    """Seconds of each task, the best of its runs; the tasks take turns."""
    best = [float("inf")] * len(tasks)
    for _ in range(runs):
        for i, task in enumerate(tasks):
            best[i] = min(best[i], task())
    return best


def timed(task: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    task()
    return clock() - start


class Conversation:
    """Rows and states made of one random block, so that memory stays small and nothing compresses."""

    def __init__(self, n_tokens: int, row_bytes: int, private_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.tokens = np.random.default_rng(1).integers(0, 150_000, n_tokens, dtype=np.int32)
        self.chunk_bytes = CHUNK_ROWS * row_bytes
        noise = np.random.default_rng(2).bytes(max(self.chunk_bytes, private_bytes))
        self.chunk = memoryview(noise)[: self.chunk_bytes]
        self.private = memoryview(noise)[:private_bytes]

    def job(self, boundary: int) -> WriteJob:
        meta = CheckpointMeta("bench", self.tokens[:boundary], Origin.PROMPT, CHUNK_ROWS, self.row_bytes)
        tail = BufferSource(self.chunk[: meta.tail_bytes]) if meta.tail_bytes else None
        chunks = tuple(ChunkJob(i, BufferSource(self.chunk)) for i in range(meta.n_chunks))
        return WriteJob(meta, chunks, BufferSource(self.private), tail, None)


def write(store: DiskStore, jobs: list[WriteJob], step_bytes: int = MIB) -> None:
    writer = store.writer(lambda record: record.sequence, staging_bytes=step_bytes, queue_bytes=1 << 40)
    for job in jobs:
        writer.enqueue(job)
        while not (progress := writer.step(step_bytes)).idle:
            for outcome in progress.outcomes:
                if outcome.result is not WriteResult.DURABLE:
                    sys.exit(f"write failed: {outcome}")


def files_of(root: Path) -> list[Path]:
    return sorted(p for name in ("chunks", "private") for p in (root / "v1" / name).iterdir())


def read_sequentially(files: list[Path], buffer: memoryview) -> None:
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        while os.readv(fd, [buffer]):
            pass
        os.close(fd)


def drop_cache(files: list[Path]) -> None:
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def bench_restore(folder: Path, n_tokens: int, runs: int) -> dict[str, float]:
    root = folder / "restore"
    store = DiskStore.open(str(root), 1 << 40)
    conversation = Conversation(n_tokens, ROW_BYTES, PRIVATE_BYTES)
    write(store, [conversation.job(n_tokens)])
    (record,) = store.catalogue.records()
    files = files_of(root)
    n_bytes = sum(p.stat().st_size for p in files)
    parts = restore_parts(store.layout, record.chunks, record.private)
    ram = {p.name + str(p.offset): memoryview(np.ones(p.n_bytes, dtype=np.uint8).data) for p in parts}
    hot = memoryview(bytearray(MIB))
    everything = list(ram.values())

    def finish(pieces: object) -> None:
        for piece in pieces:  # type: ignore[attr-defined]
            if isinstance(piece, Damage):
                sys.exit(f"restore failed: {piece}")

    def into(part: Part) -> memoryview:
        return ram[part.name + str(part.offset)]

    def direct() -> float:
        return timed(lambda: finish(store.restore(record, destination=into)))

    def staged() -> float:
        def copy() -> None:
            for piece in store.restore(record):
                if isinstance(piece, Damage):
                    sys.exit(f"restore failed: {piece}")
                into(piece.part)[piece.offset : piece.offset + len(piece.data)] = piece.data

        return timed(copy)

    def hash_ram() -> float:
        def run() -> None:
            for view in everything:
                xxhash.xxh3_128_digest(view)

        return timed(run)

    def read() -> float:
        return timed(lambda: read_sequentially(files, hot))

    def cold(task: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            drop_cache(files)
            return task()

        return run

    def read_into_ram() -> float:
        def run() -> None:
            for part in parts:
                fd = os.open(root / part.folder / part.name, os.O_RDONLY)
                view = into(part)
                for at in range(0, part.n_bytes, MIB):
                    os.preadv(fd, [view[at : at + MIB]], part.offset + at)
                os.close(fd)

        return timed(run)

    t_direct, t_staged, t_read, t_ram, t_hash = best_of(runs, direct, staged, read, read_into_ram, hash_ram)
    c_direct, c_read = best_of(max(2, runs // 2), cold(direct), cold(read))
    store.close()
    gb = n_bytes / 1e9
    limit, ram_limit = gb / max(t_read, t_hash), gb / max(t_ram, t_hash)
    return {
        "bytes": n_bytes,
        "files": len(files),
        "sequential read, hot buffer, GB/s": gb / t_read,
        "sequential read into the same RAM GB/s": gb / t_ram,
        "checksum GB/s": gb / t_hash,
        "restore GB/s": gb / t_direct,
        "restore / min(read into RAM, checksum)": gb / t_direct / ram_limit,
        "restore / min(read in a hot buffer, checksum)": gb / t_direct / limit,
        "restore through 1 MiB staging, copied, GB/s": gb / t_staged,
        "staged restore / min(read into RAM, checksum)": gb / t_staged / ram_limit,
        "cold read GB/s": gb / c_read,
        "cold restore GB/s": gb / c_direct,
        "cold restore / cold read": c_read / c_direct,
    }


def bench_write(folder: Path, n_tokens: int, runs: int) -> dict[str, float]:
    n_tokens = max(CHUNK_ROWS, n_tokens // 4)
    conversation = Conversation(n_tokens, ROW_BYTES, PRIVATE_BYTES // 4)
    job = conversation.job(n_tokens)
    n_bytes = sum(c.source.n_bytes for c in job.chunks) + job.private_bytes
    number = itertools.count()

    def ours() -> float:
        root = folder / f"write{next(number)}"
        store = DiskStore.open(str(root), 1 << 40)
        t = timed(lambda: write(store, [job]))
        store.close()
        shutil.rmtree(root)
        return t

    def raw() -> float:
        root = folder / f"raw{next(number)}"
        root.mkdir()

        def run() -> None:
            for i, source in enumerate([*(c.source for c in job.chunks), job.private]):
                assert source is not None
                fd = os.open(root / str(i), os.O_WRONLY | os.O_CREAT, 0o600)
                view = conversation.chunk if source.n_bytes == len(conversation.chunk) else conversation.private
                for at in range(0, len(view), MIB):
                    os.write(fd, view[at : at + MIB])
                os.fsync(fd)
                os.close(fd)

        t = timed(run)
        shutil.rmtree(root)
        return t

    t_ours, t_raw = best_of(runs, ours, raw)
    tracemalloc.start()
    ours()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "bytes": n_bytes,
        "write GB/s": n_bytes / 1e9 / t_ours,
        "raw write + fsync GB/s": n_bytes / 1e9 / t_raw,
        "write / raw": t_raw / t_ours,
        "peak Python memory while writing, MiB": peak / MIB,
    }


def bench_sharing(folder: Path) -> dict[str, float]:
    """The article's six boundaries, with rows and states a tenth as large."""
    row_bytes, private_bytes = ROW_BYTES // 10 // 16 * 16, PRIVATE_BYTES // 10
    root = folder / "sharing"
    store = DiskStore.open(str(root), 1 << 40)
    conversation = Conversation(ARTICLE_BOUNDARIES[-1], row_bytes, private_bytes)
    jobs = [conversation.job(b) for b in ARTICLE_BOUNDARIES]
    write(store, jobs)
    usage = store.catalogue.usage()
    store.close()
    rows = ARTICLE_BOUNDARIES[-1] // CHUNK_ROWS * CHUNK_ROWS * row_bytes
    own = sum(job.private_bytes for job in jobs)
    whole = sum(job.meta.n_tokens * row_bytes + private_bytes for job in jobs)
    on_disk = sum(p.stat().st_blocks * 512 for p in root.rglob("*") if p.is_file())
    shutil.rmtree(root)
    return {
        "as complete copies, bytes": whole,
        "unique bytes": rows + own,
        "on disk, bytes": on_disk,
        "on disk / unique": on_disk / (rows + own),
        "accounted / on disk": usage.used_bytes / on_disk,
    }


def bench_start(folder: Path, runs: int, n: int = 1000) -> dict[str, float]:
    """1,000 checkpoints of twenty conversations, up to 8,000 tokens deep, tiny rows."""
    root = folder / "start"
    store = DiskStore.open(str(root), 1 << 40)
    write(
        store,
        [
            WriteJob(
                CheckpointMeta(f"scope {c}", tokens[: 160 * (k + 1)], Origin.PROMPT, CHUNK_ROWS, 16),
                tuple(
                    ChunkJob((c, i), BufferSource(bytes(CHUNK_ROWS * 16))) for i in range(160 * (k + 1) // CHUNK_ROWS)
                ),
                BufferSource(bytes(100)),
                BufferSource(bytes(160 * (k + 1) % CHUNK_ROWS * 16)) if 160 * (k + 1) % CHUNK_ROWS else None,
                None,
            )
            for c in range(20)
            for tokens in [np.arange(8000, dtype=np.int32)]
            for k in range(n // 20)
        ],
    )
    store.close()
    manifests = root / "v1" / "manifests"
    n_bytes = sum(p.stat().st_size for p in manifests.iterdir())

    def start() -> None:
        again = DiskStore.open(str(root), 1 << 40)
        if sum(isinstance(found, Loaded) for found in again.load()) != n:
            sys.exit("a checkpoint is missing")
        again.close()

    def read() -> None:
        for name in os.listdir(manifests):
            with open(manifests / name, "rb") as f:
                f.read()

    t_start, t_read = best_of(runs, lambda: timed(start), lambda: timed(read))
    p_start, p_read = best_of(runs, lambda: timed(start, time.process_time), lambda: timed(read, time.process_time))
    shutil.rmtree(root)
    return {
        "manifests": n,
        "bytes": n_bytes,
        "start ms": t_start * 1e3,
        "reading the manifests ms": t_read * 1e3,
        "start / reading": t_start / t_read,
        "start / reading, processor time": p_start / p_read,
    }


AIMS = {
    "restore / min(read into RAM, checksum)": (">=", 0.8),
    "on disk / unique": ("<=", 1.02),
    "start / reading": ("<=", 3.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", help="a folder on the disk to measure (default: the temporary folder)")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        folder = Path(made)
        benches: dict[str, Callable[[], dict[str, float]]] = {
            "restore": lambda: bench_restore(folder, args.tokens, args.runs),
            "write": lambda: bench_write(folder, args.tokens, args.runs),
            "sharing": lambda: bench_sharing(folder),
            "start": lambda: bench_start(folder, args.runs),
        }
        for name, bench in benches.items():
            results[name] = bench()
            print(f"\n{name}")
            for label, value in results[name].items():
                sign, aim = AIMS.get(label, ("", 0.0))
                met = {"": "", ">=": "ok" if value >= aim else "MISSED", "<=": "ok" if value <= aim else "MISSED"}[sign]
                shown = f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"
                print(f"  {label:48} {shown:>16}" + (f"   aim {sign} {aim}: {met}" if sign else ""), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
