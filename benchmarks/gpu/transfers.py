"""State between slot and host memory, as shares of a plain copy of the same bytes in the same run.

    python -m benchmarks.gpu.transfers [--tokens 95439] [--model FILE]

First the parts, each waited for; then the whole restore as the engine does it (rows queued, private
state queued, cells set meanwhile, one wait), into an emptied slot and over another conversation.
Then what copies cost a neighbour that decodes: one 256-row piece after each of its passes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.common import median, report
from benchmarks.gpu.copies import plain_copy
from benchmarks.gpu.load import arguments, place, text
from gufo_gguf.backend.base import Bytes, Span
from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions
from gufo_gguf.cache.types import Inventory, Tokens
from gufo_gguf.engine.types import as_tokens

CHUNK = 256
_REPEATS = 5
_PASSES = 40
"""Decode passes of one sample."""


class Held:
    """A slot's state in host memory, as the cache keeps it: chunks side by side, a tail, private bytes."""

    def __init__(self, backend: LlamaBackend, inventory: Inventory, tokens: Tokens) -> None:
        self.backend, self.tokens = backend, tokens
        n_full, self.n_tail = divmod(len(tokens), CHUNK)
        chunk_bytes = CHUNK * inventory.row_bytes
        self.rows = backend.alloc(n_full * chunk_bytes)
        self.chunks = [self.rows[i * chunk_bytes : (i + 1) * chunk_bytes] for i in range(n_full)]
        self.tail = backend.alloc(max(1, self.n_tail * inventory.row_bytes))
        self.private = backend.alloc(inventory.private_bytes)
        self.tail_first = n_full * CHUNK

    def pieces(self) -> list[tuple[int, int, Bytes]]:
        return [(i * CHUNK, CHUNK, chunk) for i, chunk in enumerate(self.chunks)]

    def take(self, slot: int) -> None:
        self.backend.pieces_out(slot, self.pieces())
        if self.n_tail:
            self.backend.rows_out(slot, self.tail_first, self.n_tail, self.tail)
        self.backend.private_out(slot, self.private)

    def load_chunks(self, slot: int) -> None:
        self.backend.load_pieces(slot, [(first, n, chunk, n) for first, n, chunk in self.pieces()])

    def load_rest(self, slot: int) -> None:
        if self.n_tail:
            self.backend.load_pieces(slot, [(self.tail_first, self.n_tail, self.tail, self.n_tail)])
        self.backend.load_private(slot, self.private)

    def restore(self, slot: int) -> None:
        self.backend.begin_restore(slot, self.tokens, trusted=True)
        self.load_chunks(slot)
        self.load_rest(slot)
        self.backend.finish_restore(slot)


def fill(backend: LlamaBackend, slot: int, tokens: Tokens) -> None:
    backend.truncate(slot, 0)
    for at in range(0, len(tokens), backend.info.n_batch):
        backend.decode([Span(slot, tokens[at : at + backend.info.n_batch], True)])


def parts(backend: LlamaBackend, held: Held, other: Tokens) -> dict[str, list[float]]:
    """Seconds of each part, waited for, and of whole restores."""
    out: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], None]) -> None:
        started = time.perf_counter()
        action()
        out.setdefault(name, []).append(time.perf_counter() - started)

    def load(action: Callable[[int], None]) -> None:
        action(0)
        backend.wait_restore(0)

    for _ in range(_REPEATS):
        timed("rows_out", lambda: backend.pieces_out(0, held.pieces()))
        timed("private_out", lambda: backend.private_out(0, held.private))
        backend.truncate(0, 0)
        backend.begin_restore(0, held.tokens, trusted=True)
        timed("rows_in", lambda: load(held.load_chunks))
        timed("private_in", lambda: load(held.load_rest))
        timed("cells", lambda: backend.finish_restore(0))
        timed("empty", lambda: backend.truncate(0, 0))
        timed("restore_into_empty", lambda: held.restore(0))
        timed("restore_over_as_long", lambda: held.restore(0))
        fill(backend, 0, other)
        timed("restore_over_short", lambda: held.restore(0))
    return out


def transfers(path: Path, n_tokens: int, n_threads: int) -> None:
    options = LlamaOptions(n_ctx=n_tokens + 4096, n_slots=1, n_threads=n_threads)
    with LlamaBackend(path, options) as backend:
        inventory = backend.info.inventory
        assert inventory is not None
        fill(backend, 0, as_tokens(text(1, n_tokens)))
        held = Held(backend, inventory, as_tokens(text(1, n_tokens)))
        held.take(0)
        out = parts(backend, held, as_tokens(text(3, 4000)))
        rows, private = plain_copy(held.rows.nbytes), plain_copy(inventory.private_bytes)
        pinned = backend.pinned
    best = {k: min(v) for k, v in out.items()}
    row_gb, private_gb = held.rows.nbytes / 1e9, inventory.private_bytes / 1e9
    whole = {k: v / rows.to_device for k, v in best.items() if k.startswith("restore")}
    lines = [
        f"{inventory.row_bytes} bytes a row, {private_gb * 1e3:.1f} MB private, {n_tokens} tokens; "
        f"pinned: {pinned}; peer: {rows.kind}, {row_gb / rows.to_host:.1f} GB/s out, {row_gb / rows.to_device:.1f} in",
        f"rows out    {row_gb / best['rows_out']:6.1f} GB/s   {rows.to_host / best['rows_out']:.2f} of the copy",
        f"rows in     {row_gb / best['rows_in']:6.1f} GB/s   {rows.to_device / best['rows_in']:.2f} of the copy"
        "   (goal 0.9)",
        f"private out {private_gb / best['private_out']:6.1f} GB/s   {best['private_out'] / private.to_host:.2f} x "
        "the copy's time   (goal 1.2)",
        f"private in  {private_gb / best['private_in']:6.1f} GB/s   {best['private_in'] / private.to_device:.2f} x "
        "the copy's time (with the tail)",
        f"cells alone, all new {1e3 * best['cells']:.1f} ms; emptying the slot {1e3 * best['empty']:.1f} ms",
        "whole restore over the rows' copy   (goal 1.6): "
        + ", ".join(f"{k.removeprefix('restore_').replace('_', ' ')} {v:.2f}" for k, v in whole.items()),
    ]
    limits = {k: [limit.to_host, limit.to_device] for k, limit in (("rows", rows), ("private", private))}
    report("gpu-transfers", lines, {"seconds": out, "copy_seconds_out_in": limits, "tokens": n_tokens})


def _rows_leave(held: Held) -> Iterator[None]:
    for first, n, chunk in itertools.cycle(held.pieces()):
        held.backend.rows_out(0, first, n, chunk)
        yield


def _rows_arrive(held: Held) -> Iterator[None]:
    """A restore in pieces, begun again when it is through."""
    while True:
        held.backend.begin_restore(0, held.tokens, trusted=True)
        for first, n, chunk in held.pieces():
            held.backend.load_rows(0, first, n, chunk, n)
            yield
        held.backend.abort_restore(0)


def _passes(backend: LlamaBackend, between: Iterator[None]) -> float:
    """Seconds of decode passes of slot 1, a step of ``between`` after each."""
    token = np.zeros(1, np.int32)
    backend.decode([Span(1, token, True)])
    backend.logits(1)
    started = time.perf_counter()
    for _ in range(_PASSES):
        backend.decode([Span(1, token, True)])
        backend.logits(1)
        next(between)
    return time.perf_counter() - started


def neighbour(path: Path, n_tokens: int, n_threads: int) -> None:
    """Decode speed of slot 1 alone, and with one piece of slot 0's rows moved after each pass."""
    options = LlamaOptions(n_ctx=n_tokens + 4096, n_slots=2, n_threads=n_threads)
    with LlamaBackend(path, options) as backend:
        inventory = backend.info.inventory
        assert inventory is not None
        fill(backend, 0, as_tokens(text(1, n_tokens)))
        fill(backend, 1, as_tokens(text(2, n_tokens)))
        held = Held(backend, inventory, as_tokens(text(1, n_tokens)))
        held.take(0)
        samples: dict[str, list[float]] = {"alone": [], "out": [], "in": []}
        for _ in range(_REPEATS):
            samples["alone"].append(_passes(backend, itertools.repeat(None)))
            samples["out"].append(_passes(backend, _rows_leave(held)))
            samples["in"].append(_passes(backend, _rows_arrive(held)))
            backend.abort_restore(0)
            held.restore(0)
    speed = {k: _PASSES / median(v) for k, v in samples.items()}
    out, into = speed["out"] / speed["alone"], speed["in"] / speed["alone"]
    piece_mb = CHUNK * inventory.row_bytes / 1e6
    lines = [
        f"decode at {n_tokens} tokens: {speed['alone']:.1f} tok/s alone; with a piece of {CHUNK} rows "
        f"({piece_mb:.1f} MB) of another slot after each pass: "
        f"out {speed['out']:.1f} ({out:.3f}), in {speed['in']:.1f} ({into:.3f})   (goal 0.9)"
    ]
    report("gpu-neighbour", lines, {"seconds": samples, "passes": _PASSES, "tokens": n_tokens})


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--neighbour-tokens", type=int, default=32_768)
    parser.add_argument("--skip", choices=["transfers", "neighbour"], action="append", default=[])
    args = parser.parse_args()
    with place(args) as (path, _):
        if "transfers" not in args.skip:
            transfers(path, args.tokens, args.threads)
        if "neighbour" not in args.skip:
            neighbour(path, min(args.neighbour_tokens, args.tokens), args.threads)


if __name__ == "__main__":
    main()
