"""The power is cut after every operation; every disk that may result is opened and examined.

What is recorded: publishing (alone, sharing, resuming loose chunks), retiring, evicting for room,
quarantine, giving up half-way, a restart that cleans up, and all of that with a kill -9 in between,
so that a new process starts on names that were never synced.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from gufo_gguf.store.disk import DiskStore
from gufo_gguf.store.scan import Loaded, reclaim
from gufo_gguf.store.simfs import Operation, SimFS
from gufo_gguf.store.types import Damage, DamageReason
from tests.store.world import STEP_BYTES, Spec, World, check_disk

A1, A2, A3 = Spec("a", 150), Spec("a", 256, logits=True), Spec("a", 300)
FORK = Spec("f", 200, parent="a", shared=128)
OTHER = Spec("o", 140)


class Cutter:
    """Cuts the power after each operation of a file system and examines the disks."""

    def __init__(self, limit: int, seed: int) -> None:
        self.limit = limit
        self.rng = random.Random(seed)
        self.n_boundaries = 0
        self.n_images = 0
        self.n_distinct = 0
        self.seen: set[tuple[object, frozenset[str]]] = set()

    def watch(self, fs: SimFS, specs: dict[str, Spec], must: Callable[[], set[str]]) -> None:
        def cut(_: Operation) -> None:
            fs.on_operation = None
            try:
                self.examine(fs, specs, must())
            finally:
                fs.on_operation = cut

        fs.on_operation = cut
        self.examine(fs, specs, must())

    def examine(self, fs: SimFS, specs: dict[str, Spec], must: set[str]) -> None:
        self.n_boundaries += 1
        for image in fs.images(self.limit, self.rng):
            self.n_images += 1
            key = (image.fingerprint(), frozenset(must))
            if key not in self.seen:
                self.seen.add(key)
                self.n_distinct += 1
                check_disk(image, specs, must)


def scenario(cutter: Cutter) -> SimFS:
    """Everything a store does in its life, watched."""
    fs = SimFS(block_bytes=4096)
    specs = {s.name: s for s in (A1, A2, A3, FORK, OTHER)}
    cutter.watch(fs, specs, set)  # making the folders
    world = World(fs, budget_bytes=120_000, specs=specs)
    cutter.watch(fs, specs, world.visible)
    world.write_durably(A1)
    world.write_durably(A2)
    # Half of a write, then a newer one that takes over what is finished of it.
    first = world.writer.enqueue(FORK.job())
    for _ in range(4):
        world.take(world.writer.step(STEP_BYTES))
    world.writer.enqueue(Spec("f", 260, parent="a", shared=128).job(), supersedes=(int(str(first)),))
    specs["f@260"] = Spec("f", 260, parent="a", shared=128)
    world.run()
    assert world.visible() == {A1.name, A2.name, "f@260"}
    world.writer.retire([world.record(A1.name)])
    world.run()
    world.write_durably(A3)
    # Room for OTHER only by evicting, in rank order, checkpoints that share chunks with survivors.
    for i in range(3):
        specs[f"x{i}@330"] = Spec(f"x{i}", 330)
        world.write_durably(specs[f"x{i}@330"])
    assert world.retired
    # A damaged private file takes its checkpoint along, a damaged chunk all that need it.
    survivor = world.store.catalogue.records()[-1]
    world.writer.quarantine(Damage(world.store.layout.chunks, survivor.chunks[0].key + ".chunk", DamageReason.CHECKSUM))
    world.run()
    world.write_durably(OTHER)
    # A write given up in the middle leaves debris only.
    world.writer.enqueue(Spec("gone", 200).job())
    for _ in range(5):
        world.writer.step(STEP_BYTES)
    return fs


def restart_scenario(cutter: Cutter, fs: SimFS, specs: dict[str, Spec], must: set[str]) -> None:
    """A new process on this disk, cut at each operation of its start and its clean-up."""
    cutter.watch(fs, specs, lambda: must)
    store = DiskStore(fs, 1 << 30)
    loaded = {f.record.labels["name"] for f in store.load() if isinstance(f, Loaded)}
    assert must <= loaded
    # Once the start has synced what it saw, what it shows must stay.
    cutter.watch(fs, specs, lambda: loaded)
    for _ in reclaim(fs, store.layout, store.catalogue):
        pass
    store.close()


def run(limit: int, restart_every: int) -> Cutter:
    cutter = Cutter(limit, seed=1)
    snapshots: list[tuple[SimFS, dict[str, Spec], set[str]]] = []
    original = cutter.examine

    def examine(fs: SimFS, specs: dict[str, Spec], must: set[str]) -> None:
        if cutter.n_boundaries % restart_every == 0:
            snapshots.append((fs.clone(killed=True), specs, set(must)))
        original(fs, specs, must)

    cutter.examine = examine  # type: ignore[method-assign]
    scenario(cutter)
    cutter.examine = original  # type: ignore[method-assign]
    for fs, specs, must in snapshots:
        restart_scenario(cutter, fs, specs, must)
    return cutter


def report(cutter: Cutter) -> None:
    print(
        f"\n{cutter.n_boundaries} operation boundaries, {cutter.n_images} crash images, "
        f"{cutter.n_distinct} of them distinct: all consistent"
    )


def test_no_power_cut_leaves_half_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    cutter = run(limit=16, restart_every=12)
    with capsys.disabled():
        report(cutter)
    assert cutter.n_boundaries > 300
    assert cutter.n_images > 3_000


@pytest.mark.long
def test_no_power_cut_leaves_half_a_checkpoint_exhaustively(capsys: pytest.CaptureFixture[str]) -> None:
    cutter = run(limit=1024, restart_every=1)
    with capsys.disabled():
        report(cutter)


@pytest.mark.parametrize("skipped", ["sync", "chunks", "private", "manifests"])
def test_leaving_out_a_sync_is_noticed(skipped: str) -> None:
    """The check itself: a store without one of its syncs must fail it."""

    class Careless(SimFS):
        def sync(self, handle: int) -> None:
            if skipped != "sync":
                super().sync(handle)

        def sync_folder(self, folder: str) -> None:
            if not folder.endswith("/" + skipped):
                super().sync_folder(folder)

    cutter = Cutter(limit=64, seed=2)
    fs = Careless()
    specs = {A1.name: A1}
    world = World(fs, specs=specs)
    cutter.watch(fs, specs, world.visible)
    with pytest.raises(AssertionError):
        world.write_durably(A1)
        world.writer.retire([world.record(A1.name)])
        world.run()
