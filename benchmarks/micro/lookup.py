"""Cost of a lookup among 10,000 checkpoints of 100,000-token histories, as a ratio.

The unit is one numpy comparison of the prompt with one such history (``np.array_equal`` of two
100,000-token arrays), measured between the lookups of the same run.  Shapes:

    agents         100 conversations over one 6,000-token system prompt, 100 checkpoints along each
    turns          10 conversations of 1,000 turns; each turn leaves a dead end (a retry copy)
    edits          one conversation edited at 10,000 places: each history leaves it elsewhere
    relay          one conversation of 10,000 turns, each dropping the end of the turn before
    shrinking      100 histories, each leaving the last one later and ending earlier: a walk changes
                   track 100 times.  The worst case by construction, unlikely in use, not in the goal
    rows-only      as edits, plus live frontiers, for a model whose histories may be cut anywhere
    miss           a prompt that shares nothing, with 4,096 evicted checkpoints remembered

Usage: python benchmarks/micro/lookup.py [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from gufo_gguf.cache.index import Entry, PrefixIndex
from gufo_gguf.cache.types import MissReason, PromptView, Tier, Tokens

GOAL = 3.0
N_TOKENS = 100_000

History = tuple[Tokens, tuple[int, ...]]
"""Tokens and the boundaries of the checkpoints along them."""


def fresh(n: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 248_320, n, dtype=np.int32)


def joined(*parts: Tokens) -> Tokens:
    return np.concatenate(parts).astype(np.int32)


def agents(n: int) -> Iterator[History]:
    system = fresh(6_000, 0)
    per = min(100, n)
    for i in range(n // per):
        tokens = joined(system, fresh(N_TOKENS - len(system), i + 1))
        yield tokens, tuple(N_TOKENS * (k + 1) // per for k in range(per))


def turns(n: int) -> Iterator[History]:
    per = min(1_000, n // 2)
    step = N_TOKENS // per
    for i in range(n // 2 // per):
        tokens = fresh(N_TOKENS, i)
        for k in range(per):
            yield tokens, ((k + 1) * step,)
            yield joined(tokens[: (k + 1) * step], fresh(5, k)), ((k + 1) * step + 5,)


def edits(n: int) -> Iterator[History]:
    trunk = fresh(N_TOKENS, 0)
    yield trunk, (N_TOKENS,)
    for i in range(n - 1):
        at = 1 + i * (N_TOKENS - 2) // n
        tokens = joined(trunk[:at], fresh(50, i + 1))
        yield tokens, (len(tokens),)


def relay(n: int) -> Iterator[History]:
    """A conversation whose every turn drops the last 20 tokens (stripped reasoning) and goes on."""
    tokens = fresh(20, 0)
    for i in range(n):
        yield tokens, (len(tokens),)
        more = (N_TOKENS * (i + 2) + n - 1) // n - len(tokens)
        tokens = joined(tokens[:-20], fresh(20 + more, i + 1))


def shrinking(n: int) -> Iterator[History]:
    """100 histories, each leaving the last one later and ending earlier, then grids along them."""
    tokens = fresh(N_TOKENS + 1_000, 0)
    for i in range(100):
        per = max(1, n // 100)
        yield tokens, tuple(len(tokens) * (k + 1) // per for k in range(per))
        at = 900 * (i + 1)
        tokens = joined(tokens[:at], fresh(len(tokens) - 10 - at, i + 1))


SHAPES: dict[str, tuple[Callable[[int], Iterator[History]], bool]] = {
    "agents": (agents, False),
    "turns": (turns, False),
    "edits": (edits, False),
    "relay": (relay, False),
    "shrinking": (shrinking, False),
    "rows-only": (edits, True),
}


def build(histories: Iterator[History], *, rows_only: bool) -> tuple[PrefixIndex, Tokens, float]:
    """The index, the last of the longest histories, and the mean cost of an insert in µs."""
    index = PrefixIndex(rows_only=rows_only)
    number, deepest, spent = 0, np.empty(0, dtype=np.int32), 0.0
    for tokens, boundaries in histories:
        if len(tokens) >= min(len(deepest), N_TOKENS):
            deepest = tokens
        start = time.perf_counter()
        for boundary in boundaries:
            index.insert("m", tokens, Entry((Tier.RAM, number), boundary))
            number += 1
        spent += time.perf_counter() - start
    return index, deepest, 1e6 * spent / number


def ratio(index: PrefixIndex, prompt: Tokens, rounds: int) -> tuple[float, float, float]:
    """(lookup µs, comparison µs, ratio): medians of alternating measurements."""
    view = PromptView("m", prompt)
    one = prompt[:N_TOKENS].copy()
    other = one.copy()
    lookups, comparisons = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        index.lookup(view)
        middle = time.perf_counter()
        np.array_equal(one, other)
        end = time.perf_counter()
        lookups.append(1e6 * (middle - start))
        comparisons.append(1e6 * (end - middle))
    lookup, comparison = float(np.median(lookups)), float(np.median(comparisons))
    return lookup, comparison, lookup / comparison


def measure(shape: str, n: int, rounds: int) -> dict[str, float | int | str]:
    make, rows_only = SHAPES.get(shape, (agents, False))
    index, deepest, insert_us = build(make(n), rows_only=rows_only)
    prompt = joined(deepest, fresh(300, 99))
    if rows_only:
        for slot in range(4):
            at = 20_000 * (slot + 1)
            index.insert("m", joined(deepest[:at], fresh(100, slot)), Entry((Tier.LIVE, slot), at + 100))
    if shape == "miss":
        for number in range(min(4_096, n // 2)):
            index.remove((Tier.RAM, number), ghost=MissReason.EVICTED)
        prompt = fresh(N_TOKENS + 300, 12_345)
    if len(prompt) < N_TOKENS:
        raise SystemExit(f"{shape}: the prompt has only {len(prompt)} tokens")
    lookup, comparison, r = ratio(index, prompt, rounds)
    result = index.lookup(PromptView("m", prompt))
    return {
        "shape": shape,
        "checkpoints": len(index),
        "candidates": len(result.candidates),
        "common_prefix": result.common_prefix,
        "lookup_us": round(lookup, 1),
        "comparison_us": round(comparison, 1),
        "ratio": round(r, 2),
        "insert_us": round(insert_us, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, only 10,000 checkpoints")
    args = parser.parse_args()
    rounds = 101 if args.quick else 401
    rows = []
    print("shape      checkpoints candidates  lookup µs compare µs  ratio  insert µs")
    for shape in [*SHAPES, "miss"]:
        for n in [10_000] if args.quick else [100, 1_000, 10_000]:
            row = measure(shape, n, rounds)
            rows.append(row)
            print(
                f"{row['shape']:<10} {row['checkpoints']:>11,} {row['candidates']:>10,} {row['lookup_us']:>10} "
                f"{row['comparison_us']:>10} {row['ratio']:>6} {row['insert_us']:>10}"
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    hits = [r for r in rows if int(r["checkpoints"]) >= 10_000 and r["shape"] not in ("miss", "shrinking")]
    worst = max(hits, key=lambda r: float(r["ratio"]))
    print(f"worst of the hits at 10,000 checkpoints: {worst['ratio']} comparisons ({worst['shape']}); goal {GOAL}")


if __name__ == "__main__":
    main()
