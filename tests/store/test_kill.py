"""Kill -9 at every file system call of a process's life, and at random ones under load."""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.kill_loop import every_spec, one_kill


@pytest.fixture
def root() -> Iterator[str]:
    """In memory where that exists: what a killed process leaves does not depend on the disk below."""
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        yield str(Path(folder) / "cache")


CALLS = {"make_folder", "sync_folder", "lock", "entries", "create", "write", "sync", "size", "close", "link", "remove"}


def kill_at(root: str, moments: list[tuple[int, bool]], seed: int) -> Counter[str]:
    specs = every_spec()
    names: set[str] = set()
    died_in: Counter[str] = Counter()
    for i, (at, half) in enumerate(moments):
        names, call = one_kill(root, names, specs, seed + i, at, half)
        died_in[call] += 1
    assert names
    return died_in


def test_killed_at_calls_of_every_kind(root: str) -> None:
    rng = random.Random(5)
    moments = [(at, False) for at in range(14)] + [(rng.randrange(500), bool(i % 2)) for i in range(24)]
    died_in = kill_at(root, moments, seed=100)
    assert died_in.keys() >= CALLS, CALLS - died_in.keys()


@pytest.mark.slow
def test_killed_at_every_call(root: str) -> None:
    kill_at(root, [(at, half) for at in range(400) for half in (False, True)], seed=1000)
