"""Each call fails once, at its n-th use, until the scenario runs without the fault; and disks that stay bad.

After every failure: nothing half is visible, nothing acknowledged is lost (also by a power cut right
then), the accounts are right, and the same store works again once the fault is over.
"""

from __future__ import annotations

import errno
import random

import pytest

from gufo_gguf.core.errors import StoreError
from gufo_gguf.store.disk import DiskStore
from gufo_gguf.store.faults import Fault, FaultyFS, Mode
from gufo_gguf.store.fs import PosixFileSystem
from gufo_gguf.store.jobs import Outcome, WriteResult
from gufo_gguf.store.simfs import SimFS
from gufo_gguf.store.types import Damage, DamageReason
from tests.store.world import Spec, World, check_disk, expected_bytes, restored_bytes

A1, A2 = Spec("a", 150), Spec("a", 256, logits=True)
FORK = Spec("f", 200, parent="a", shared=128)
AFTER = Spec("z", 100)
SPECS = {s.name: s for s in (A1, A2, FORK, AFTER)}

WRITING_CALLS = ("create", "write", "sync", "size", "close", "link", "remove", "sync_folder")
ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EINTR)


def life(world: World) -> set[str]:
    """Publish, share, retire; returns what was acknowledged and not retired."""
    for spec in (A1, A2):
        world.write(spec)
    if A1.name in world.visible():
        world.writer.retire([world.record(A1.name)])
        world.run()
    world.write(FORK)
    return world.visible()


@pytest.mark.parametrize("call", WRITING_CALLS)
@pytest.mark.parametrize("mode", [Mode.ERROR, Mode.DONE_BUT_ERROR])
def test_every_writing_call_fails_once(call: str, mode: Mode) -> None:
    fail_at_every(call, mode, (errno.ENOSPC if call in ("create", "write") else errno.EIO,), n_images=2)


@pytest.mark.slow
@pytest.mark.parametrize("call", WRITING_CALLS)
@pytest.mark.parametrize("mode", [Mode.ERROR, Mode.DONE_BUT_ERROR])
def test_every_writing_call_fails_once_in_every_way(call: str, mode: Mode) -> None:
    fail_at_every(call, mode, ERRORS, n_images=24)


def fail_at_every(call: str, mode: Mode, errors: tuple[int, ...], n_images: int) -> None:
    rng = random.Random(call)
    n_runs = 0
    for number in errors:
        at = 0
        while True:
            sim = SimFS()
            fs = FaultyFS(sim)
            world = World(fs, specs=dict(SPECS))
            fs.counts.clear()
            fs.fault = Fault(call, at, mode, number)
            life(world)
            fired, fs.fault = fs.fired, None
            for image in list(sim.images(n_images, rng)):
                check_disk(image, SPECS, world.visible())
            if world.writer.suspended is not None:
                assert world.writer.probe()
                assert world.writer.suspended is None
            world.write_durably(AFTER)
            world.writer.sweep()
            world.run()
            assert world.store.catalogue.check() == []
            usage = world.store.catalogue.usage()
            assert usage.reserved_bytes == usage.debris_bytes == 0
            assert usage.used_bytes == sim.used_bytes()
            for name in world.visible():
                assert restored_bytes(world.store, world.record(name)) == expected_bytes(SPECS[name])
            visible = world.visible()
            world.store.close()
            assert sim.n_open == 0
            assert check_disk(sim, SPECS, visible) == visible
            n_runs += 1
            at += 1
            if not fired:
                break
    assert n_runs > 2


@pytest.mark.parametrize("call", ["write", "read", "read_file"])
def test_short_writes_and_reads_are_completed(call: str) -> None:
    sim = SimFS()
    fs = FaultyFS(sim, Fault(call, 0, Mode.SHORT, forever=True))
    world = World(fs, specs=dict(SPECS))
    assert life(world) == {A2.name, FORK.name}
    for name in world.visible():
        assert restored_bytes(world.store, world.record(name)) == expected_bytes(SPECS[name])
    world.store.close()
    again = World(fs, specs=dict(SPECS))
    assert again.damage == []
    assert again.visible() == {A2.name, FORK.name}
    assert fs.fired


@pytest.mark.parametrize("call", ["open", "size", "read", "close"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_every_reading_call_of_a_restore_fails_once(call: str, number: int) -> None:
    sim = SimFS()
    world = World(sim, specs=dict(SPECS))
    record = world.write_durably(A2)
    world.store.close()
    at = 0
    while True:
        fs = FaultyFS(sim)
        world = World(fs, specs=dict(SPECS))
        record = world.record(A2.name)
        fs.counts.clear()
        fs.fault = Fault(call, at, Mode.ERROR, number)
        got = restored_bytes(world.store, record, threads=2, staging_bytes=1024)
        if fs.fired and call == "close":  # says nothing about the bytes
            assert got == expected_bytes(A2)
        elif fs.fired:
            assert isinstance(got, Damage)
            assert got.reason is DamageReason.UNREADABLE
            assert got.permanent == (number == errno.EIO)
        fs.fault = None
        assert sim.n_open == 1  # the lock: every file was closed
        world.store.close()
        if not fs.fired:
            assert got == expected_bytes(A2)
            break
        at += 1
    assert at >= 4


def test_an_interrupted_read_or_write_goes_on() -> None:
    sim = SimFS()
    for call in ("read", "write"):
        for at in range(4):
            fs = FaultyFS(sim.clone(), Fault(call, at, Mode.ERROR, errno.EINTR))
            world = World(fs, specs=dict(SPECS))
            record = world.write_durably(A1)
            assert restored_bytes(world.store, record) == expected_bytes(A1)
            assert fs.fired


@pytest.mark.parametrize("call", ["make_folder", "entries", "names", "read_file", "close", "sync_folder", "lock"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EROFS])
def test_every_call_of_a_start_fails_once(call: str, number: int) -> None:
    sim = SimFS()
    world = World(sim, specs=dict(SPECS))
    for spec in (A1, A2):
        world.write_durably(spec)
    world.store.close()
    at = 0
    while True:
        fs = FaultyFS(sim, Fault(call, at, Mode.ERROR, number))
        store = None
        try:
            store = DiskStore(fs, 1 << 30)
            found = list(store.load())
        except StoreError as e:
            assert "(simulated)" in str(e)
            if store is not None:
                store.close()
        else:
            damage = [f for f in found if isinstance(f, Damage)]
            assert all(not d.permanent or number == errno.EIO for d in damage)
            assert len(damage) == (1 if fs.fired and call != "close" else 0)
            assert len(found) == 2
            if damage:
                # What the unread manifest needs must survive this run's clean-up.
                writer = store.writer(lambda r: r.sequence)
                writer.sweep()
                while not writer.step(4096).idle:
                    pass
            store.close()
        assert check_disk(sim.clone(killed=True), SPECS, {A1.name, A2.name}) == {A1.name, A2.name}
        at += 1
        if not fs.fired:
            break
    assert at > 1


def test_a_full_disk_suspends_with_one_reason_and_comes_back() -> None:
    sim = SimFS(capacity_bytes=9_000)
    world = World(sim, specs=dict(SPECS))
    world.write_durably(A1)
    first = world.writer.enqueue(A2.job())
    second = world.writer.enqueue(FORK.job())
    world.run()
    by_job = {o.job: o for o in world.outcomes}
    assert by_job[first].result is WriteResult.FAILED
    assert by_job[second].result is WriteResult.SUSPENDED
    assert by_job[first].detail == by_job[second].detail == "the cache folder (simulated): the disk is full"
    refused = world.writer.enqueue(FORK.job())
    assert isinstance(refused, Outcome)
    assert refused.result is WriteResult.SUSPENDED
    # Reading goes on meanwhile.
    assert restored_bytes(world.store, world.record(A1.name)) == expected_bytes(A1)
    sim.capacity_bytes = 1 << 20
    assert world.writer.probe()
    world.write_durably(A2)
    world.store.close()
    assert check_disk(sim, SPECS, {A1.name, A2.name}) == {A1.name, A2.name}


def test_a_disk_that_turns_read_only() -> None:
    sim = SimFS()
    world = World(sim, specs=dict(SPECS))
    world.write_durably(A1)
    sim.read_only = True
    assert world.write(A2).result is WriteResult.FAILED
    assert world.writer.suspended == "the cache folder (simulated): the disk is read-only"
    assert not world.writer.probe()
    assert restored_bytes(world.store, world.record(A1.name)) == expected_bytes(A1)
    with pytest.raises(StoreError, match="Read-only"):
        DiskStore(_read_only(sim), 1)
    sim.read_only = False
    assert world.writer.probe()
    world.write_durably(A2)
    assert world.store.catalogue.check() == []


def _read_only(sim: SimFS) -> SimFS:
    copy = sim.clone(killed=True)
    copy.read_only = True
    return copy


def test_a_folder_that_goes_away(tmp_path) -> None:
    root = tmp_path / "cache"
    world = World(PosixFileSystem(str(root)), specs=dict(SPECS))
    record = world.write_durably(A1)
    import shutil

    shutil.rmtree(root)
    outcome = world.write(A2)
    assert outcome.result is WriteResult.FAILED
    assert "gone" in outcome.detail
    got = restored_bytes(world.store, record)
    assert isinstance(got, Damage)
    assert got.reason is DamageReason.MISSING
    assert not world.writer.probe()
    world.store.close()


def test_probe_leaves_nothing_behind() -> None:
    sim = SimFS()
    fs = FaultyFS(sim)
    world = World(fs, specs=dict(SPECS))
    for call in ("create", "write", "sync", "close", "remove"):
        for mode in (Mode.ERROR, Mode.DONE_BUT_ERROR):
            fs.counts.clear()
            fs.fault = Fault(call, 0, mode, errno.EIO)
            world.writer.probe()
            fs.fault = None
            assert world.writer.probe()
            world.writer.sweep()
            world.run()
            assert sim.entries("v1/tmp") == []
            assert world.store.catalogue.usage().used_bytes == 0
