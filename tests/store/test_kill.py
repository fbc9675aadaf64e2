"""Kill -9 at every file system call of a process's life, and at random ones under load."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.kill_loop import Moment, every_spec, one_kill


@pytest.fixture
def root() -> Iterator[str]:
    """In memory where that exists: what a killed process leaves does not depend on the disk below."""
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        yield str(Path(folder) / "cache")


CALLS = ("make_folder", "sync_folder", "entries", "names", "create", "write", "sync", "size", "close", "link", "remove")


def kill_at(root: str, moments: list[Moment], seed: int) -> Counter[str]:
    specs = every_spec()
    names: set[str] = set()
    died_in: Counter[str] = Counter()
    for i, moment in enumerate(moments):
        names, call = one_kill(root, names, specs, seed + i, moment)
        died_in[call] += 1
    assert names
    return died_in


def test_killed_at_calls_of_every_kind(root: str) -> None:
    moments = [Moment("lock", 0)] + [
        Moment(call, at) for at in (0, 2, 4) for call in CALLS if call != "names" or at == 0
    ]
    moments += [Moment("write", at, half=True) for at in (0, 2, 9)]
    assert kill_at(root, moments, seed=100).keys() == {"lock", *CALLS}


@pytest.mark.long
def test_killed_at_every_call(root: str) -> None:
    kill_at(root, [Moment("*", at, half) for at in range(400) for half in (False, True)], seed=1000)
