"""Kill -9 a process that writes, evicts and restores; look at what it left; start the next one on it.

    python -m tests.store.kill_loop --runs 1000 [--folder DIR] [--seed N]

The child forks off, opens the folder and works until it is killed: after a random number of file
system calls, before or in the middle of the next.  It tells the parent what it has acknowledged and
what it is about to give up, through a pipe, so that the parent knows what must be there.  After each
kill the parent opens the folder as the next process would, and restores and compares everything.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gufo_gguf.store.disk import DiskStore
from gufo_gguf.store.faults import FaultyFS, Mode
from gufo_gguf.store.fs import FileSystem, PosixFileSystem
from gufo_gguf.store.jobs import Outcome, WriteResult
from gufo_gguf.store.scan import Loaded, reclaim
from tests.store.world import Spec, World, expected_bytes, restored_bytes

BUDGET_BYTES = 400_000


@dataclass(frozen=True)
class Moment:
    """The ``at``-th call of this name ("*": of any), from 0."""

    call: str
    at: int
    half: bool = False


class DeadlyFS(FaultyFS):
    """Kills its own process at the n-th call of a name: before it, or (writes) half-way through it."""

    def __init__(self, inner: FileSystem, moment: Moment, last_words: Callable[[str], None]) -> None:
        super().__init__(inner)
        self.moment = moment
        self.last_words = last_words

    def _mode(self, call: str) -> Mode | None:
        if self.moment.call not in ("*", call):
            return None
        n = self.counts.get("", 0)
        self.counts[""] = n + 1
        if n < self.moment.at:
            return None
        if n == self.moment.at and self.moment.half and call == "write":
            return Mode.SHORT
        self.last_words(call)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def spec_for(rng: random.Random) -> Spec:
    """One of a few hundred checkpoints of a few branching conversations."""
    parent = f"c{rng.randrange(4)}"
    branch = rng.randrange(4)
    shared = 64 * branch
    return Spec(f"{parent}-{branch}", shared + 2 + 37 * rng.randrange(8), parent, shared, branch == 2)


def every_spec() -> dict[str, Spec]:
    rng = random.Random(0)
    specs = (spec_for(rng) for _ in range(4000))
    return {s.name: s for s in specs}


def child(root: str, seed: int, moment: Moment, pipe: int) -> None:
    """Work until death.  Reports '+name', '-name' and '!call' lines."""

    def say(line: str) -> None:
        os.write(pipe, (line + "\n").encode())

    rng = random.Random(seed)
    fs = DeadlyFS(PosixFileSystem(root), moment, lambda call: say("!" + call))
    world = World(fs, BUDGET_BYTES, seed, every_spec())
    world.writer.sweep()
    while True:
        action = rng.random()
        if action < 0.7:
            spec = spec_for(rng)
            if spec.name not in world.visible():
                assert not isinstance(world.writer.enqueue(spec.job()), Outcome)
        elif action < 0.85 and world.visible():
            record = rng.choice(world.store.catalogue.records())
            say("-" + record.labels["name"])
            world.writer.retire([record])
        elif world.visible():
            record = rng.choice(world.store.catalogue.records())
            assert restored_bytes(world.store, record) == expected_bytes(world.specs[record.labels["name"]])
        while not (progress := world.writer.step(512)).idle:
            for gone in progress.retired:
                say("-" + gone.labels["name"])
            for outcome in progress.outcomes:
                assert outcome.result is WriteResult.DURABLE, outcome
                assert outcome.record is not None
                say("+" + outcome.record.labels["name"])


def examine(root: str, must: set[str], specs: dict[str, Spec]) -> set[str]:
    """What the next process finds; asserts that it is whole, right and accounted for."""
    store = DiskStore(PosixFileSystem(root), BUDGET_BYTES)
    names = set()
    for found in store.load():
        assert isinstance(found, Loaded), found
        names.add(found.record.labels["name"])
        assert restored_bytes(store, found.record, threads=1) == expected_bytes(specs[found.record.labels["name"]])
    assert must <= names, f"lost: {must - names}"
    for _ in reclaim(store.fs, store.layout, store.catalogue):
        pass
    assert store.catalogue.check() == []
    on_disk = sum(e.disk_bytes for folder in store.layout.folders for e in store.fs.entries(folder))
    assert store.catalogue.usage().used_bytes == on_disk <= BUDGET_BYTES
    store.close()
    return names


def one_kill(root: str, must: set[str], specs: dict[str, Spec], seed: int, moment: Moment) -> tuple[set[str], str]:
    """Run a child to its death; returns (what is there now, the call it died in)."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            child(root, seed, moment, write_end)
        except BaseException as e:
            os.write(write_end, f"?{e!r}\n".encode())
        finally:
            os._exit(1)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        said = pipe.read().splitlines()
    _, status = os.waitpid(pid, 0)
    errors = [line for line in said if line.startswith("?")]
    assert not errors and os.WIFSIGNALED(status), errors
    must = set(must)
    died_in = ""
    for line in said:
        if line[0] == "+":
            must.add(line[1:])
        elif line[0] == "-":
            must.discard(line[1:])
        else:
            died_in = line[1:]
    return examine(root, must, specs), died_in


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="an empty folder to work in (a temporary one is made without it)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        root = str(Path(args.folder or made) / "cache")
        rng = random.Random(args.seed)
        specs = every_spec()
        names: set[str] = set()
        calls: Counter[str] = Counter()
        for i in range(args.runs):
            moment = Moment("*", rng.randrange(900), rng.random() < 0.5)
            names, call = one_kill(root, names, specs, rng.randrange(1 << 30), moment)
            calls[call] += 1
            if (i + 1) % 100 == 0:
                print(f"{i + 1} kills, {len(names)} checkpoints on disk, none wrong", flush=True)
        print(f"{args.runs} kills, by call: {dict(calls.most_common())}")


if __name__ == "__main__":
    main()
