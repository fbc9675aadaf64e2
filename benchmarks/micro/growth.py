"""How the cache's decisions grow: checkpoints 10 to 10,000, tokens 1,000 to 200,000.

    python -m benchmarks.micro.growth [--quick]

ledger      reserve, hold, release: must not grow at all
plan        where a request of N tokens leaves checkpoints
evict       ranking N retained checkpoints once (the manager keeps at most 128)
encode      a manifest of N tokens to bytes, and back (decode)

Each line gives microseconds and the exponent of growth between its last two sizes (1 = linear), which is
what a bound can be put on; the times depend on the machine.  Lookup, publishing and restores have
benchmarks of their own beside this file.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np

from benchmarks.common import median, report
from gufo_gguf.cache.capture_plan import plan_captures
from gufo_gguf.cache.ledger import Account, Ledger, Reservation
from gufo_gguf.cache.retention import RetentionRecord, rank_victims
from gufo_gguf.cache.types import CacheLimits, CheckpointId, Origin, PromptView
from gufo_gguf.store.manifest import ChunkTable, Manifest, decode, encode
from gufo_gguf.store.types import CheckpointMeta, FileRef, PrivateFile, Section

CHECKPOINTS = (10, 100, 1_000, 10_000)
TOKENS = (1_000, 10_000, 100_000, 200_000)
_KEY, _SUM = "0123456789abcdef" * 2, b"\1" * 16


def ledger(n: int) -> Callable[[], object]:
    book = Ledger(1 << 40)

    def hold(n_bytes: int) -> None:
        got = book.reserve(n_bytes)
        assert isinstance(got, Reservation)
        book.hold(got, Account.PRIVATE, n_bytes)
        book.close(got)

    for _ in range(n):
        hold(1 << 10)

    def once() -> None:
        hold(64)
        book.release(Account.PRIVATE, 64)

    return once


def plan(n: int) -> Callable[[], object]:
    prompt = PromptView("s", np.arange(n, dtype=np.int32), stable=(n - 5,))
    limits = CacheLimits(ram_bytes=1 << 34)
    return lambda: plan_captures(
        prompt=prompt, start=256, start_has_checkpoint=False, common_prefix=n // 2, n_ubatch=512, limits=limits,
        grid_budget=4, private_rows=4_272,
    )  # fmt: skip


def evict(n: int) -> Callable[[], object]:
    """Conversations of ten checkpoints each."""
    records = [
        RetentionRecord(
            id=CheckpointId(i), origin=Origin.PROMPT, n_tokens=1_000 * (i % 10 + 1), private_bytes=1 << 20,
            row_bytes=(i % 10 + 1) << 20, last_use_seq=i * 7919 % n, admitted_bytes_at_last_use=i << 20, reuses=i % 3,
            covered=i % 10 < 9, branch_point=False, family=i // 10, parent=CheckpointId(i - 1) if i % 10 else None,
        )
        for i in range(n)
    ]  # fmt: skip
    return lambda: rank_victims(records, n << 20, n << 19, optional=True, newcomer_family=0)


def manifest(n: int) -> Manifest:
    tokens = np.arange(n, dtype=np.int32)
    meta = CheckpointMeta(scope="s", tokens=tokens, origin=Origin.PROMPT, chunk_rows=256, row_bytes=100)
    chunks = ChunkTable.of([FileRef(f"{i:032x}", 25_600, _SUM) for i in range(n // 256)])
    private = PrivateFile(_KEY, Section(1 << 20, _SUM), Section(n % 256 * 100, _SUM), Section(0, _SUM))
    return Manifest(_KEY, 1, meta, chunks, private)


def encoding(n: int) -> Callable[[], object]:
    m = manifest(n)
    return lambda: encode(m)


def decoding(n: int) -> Callable[[], object]:
    data = encode(manifest(n))
    return lambda: decode(data, _KEY)


CASES: dict[str, tuple[Callable[[int], Callable[[], object]], tuple[int, ...]]] = {
    "ledger": (ledger, CHECKPOINTS),
    "plan": (plan, TOKENS),
    "evict": (evict, CHECKPOINTS),
    "encode": (encoding, TOKENS),
    "decode": (decoding, TOKENS),
}


def measure_us(once: Callable[[], object], repeats: int) -> float:
    """The median of repeats, each over as many calls as take about a millisecond."""
    started = time.perf_counter()
    once()
    calls = max(1, round(1e-3 / max(1e-9, time.perf_counter() - started)))
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(calls):
            once()
        samples.append(1e6 * (time.perf_counter() - started) / calls)
    return median(samples)


def exponent(sizes: tuple[int, ...], values: list[float]) -> float:
    """Of the growth between the last two sizes."""
    return math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    repeats = 3 if parser.parse_args().quick else 11
    lines, data = [], {}
    for name, (make, sizes) in CASES.items():
        values = [measure_us(make(n), repeats) for n in sizes]
        data[name] = dict(zip(map(str, sizes), values, strict=True))
        cells = "  ".join(f"{n:>7,}: {v:>9.1f}" for n, v in zip(sizes, values, strict=True))
        lines.append(f"{name:<8} {cells} us   exponent {exponent(sizes, values):.2f}")
    report("growth", lines, {"us": data})


if __name__ == "__main__":
    main()
