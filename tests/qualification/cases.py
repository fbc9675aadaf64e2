"""What is qualified: architectures x paths x KV types x positions x neighbours.

A *variant* is an architecture with the settings that change its memory kind.  The full matrix is
for ``make qualify``; the test suite runs a pairwise selection: every value of every factor meets
every value of every other factor at least once.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum


class Path(StrEnum):
    """Where the checkpoint goes, relative to where it was taken."""

    SAME = "same slot"
    KEPT = "same slot, rows kept"
    FRESH = "another slot, fresh"
    DIRTY = "another slot, dirty"
    CONTEXT = "another context"
    PROCESS = "another process"


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    arch: str
    memory: str
    """The memory kind that the backend must report."""
    swa_full: bool = False
    has_kv: bool = True


VARIANTS: tuple[Variant, ...] = (
    Variant("llama", "llama", "kv"),
    Variant("qwen4exp", "qwen4exp", "hybrid_idx"),
    Variant("qwen35", "qwen35", "hybrid"),
    Variant("qwen35moe", "qwen35moe", "hybrid"),
    Variant("qwen3next", "qwen3next", "hybrid"),
    Variant("lfm2", "lfm2", "hybrid"),
    Variant("granitehybrid", "granitehybrid", "hybrid"),
    Variant("falcon-h1", "falcon-h1", "hybrid"),
    Variant("mamba2", "mamba2", "recurrent", has_kv=False),
    Variant("gemma3-ring", "gemma3", "iswa"),
    Variant("gemma3-full", "gemma3", "iswa", swa_full=True),
)
BY_NAME = {variant.name: variant for variant in VARIANTS}

KV_TYPES = ("f16", "q8_0")
WEIGHTS = ("f16", "q8_0")
RANDOM = 0
"""Stands for one random position, different for each variant and KV type."""
POSITIONS = (1, 255, 256, 257, 777, 2048, RANDOM)
POSITION_MAX = 2048


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint, restored in one way.  The test's id is ``str(case)``."""

    variant: str
    path: Path
    kv: str
    position: int
    joint: bool
    """Taken after decoding in the same passes as a neighbour, and continued beside it."""
    weights: str

    @property
    def n_tokens(self) -> int:
        if self.position != RANDOM:
            return self.position
        key = zlib.crc32(f"{self.variant}/{self.kv}/{self.weights}".encode())
        return random.Random(key).randrange(258, POSITION_MAX)

    @property
    def group(self) -> Case:
        """Cases of one group share the uninterrupted run and the checkpoint."""
        return Case(self.variant, Path.SAME, self.kv, self.position, self.joint, self.weights)

    def __str__(self) -> str:
        where = self.path.replace(" ", "_").replace(",", "")
        at = f"random{self.n_tokens}" if self.position == RANDOM else str(self.position)
        return f"{self.variant}-{where}-kv_{self.kv}-w_{self.weights}-at{at}-{'joint' if self.joint else 'alone'}"


def full(weights: tuple[str, ...] = ("f16",)) -> Iterator[Case]:
    """Every combination, grouped: all paths of one checkpoint follow each other."""
    for variant, kv, weight, position, joint in itertools.product(
        VARIANTS, KV_TYPES, weights, POSITIONS, (False, True)
    ):
        if variant.has_kv or kv == KV_TYPES[0]:  # without KV the KV type is no setting
            for path in Path:
                yield Case(variant.name, path, kv, position, joint, weight)


def pairwise(seed: int = 1) -> list[Case]:
    """A small selection in which every pair of values of two factors occurs; the same every time.

    Greedy: of some random candidates that hold an uncovered pair, take the one that covers most.
    """
    levels: list[tuple[object, ...]] = [
        tuple(variant.name for variant in VARIANTS),
        tuple(Path),
        KV_TYPES,
        POSITIONS,
        (False, True),
        WEIGHTS,
    ]
    chosen: list[Case] = []
    rng = random.Random(seed)
    open_pairs = {
        ((i, a), (j, b)) for i, j in itertools.combinations(range(len(levels)), 2) for a in levels[i] for b in levels[j]
    }

    def pairs(row: tuple[object, ...]) -> set[tuple[tuple[int, object], tuple[int, object]]]:
        return set(itertools.combinations(enumerate(row), 2)) & open_pairs

    while open_pairs:
        (i, a), (j, b) = min(open_pairs, key=str)
        candidates = []
        for _ in range(60):
            row = [rng.choice(level) for level in levels]
            row[i], row[j] = a, b
            candidates.append(tuple(row))
        best = max(candidates, key=lambda row: len(pairs(row)))
        open_pairs -= pairs(best)
        chosen.append(Case(**dict(zip((f.name for f in fields(Case)), best, strict=True))))  # type: ignore[arg-type]
    return chosen
