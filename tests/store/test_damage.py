"""Damage of every kind is found, named, quarantined with all that depends on it, and never served."""

from __future__ import annotations

import random

import pytest

from gufo_gguf.store.catalogue import DiskRecord
from gufo_gguf.store.check import check_store
from gufo_gguf.store.fs import FileKind
from gufo_gguf.store.manifest import ManifestError, NewerFormat, decode
from gufo_gguf.store.simfs import SimFS
from gufo_gguf.store.types import Damage, DamageReason
from tests.store.world import CHUNK_BYTES, Spec, World, check_disk, expected_bytes, restored_bytes

A1, A2 = Spec("a", 150), Spec("a", 256, logits=True)
FORK = Spec("f", 200, parent="a", shared=128)
OTHER = Spec("o", 140)
ALL = (A1, A2, FORK, OTHER)
NEED_A0 = {A1.name, A2.name, FORK.name}


@pytest.fixture
def disk() -> SimFS:
    fs = SimFS()
    world = World(fs)
    for spec in ALL:
        world.write_durably(spec)
    world.store.close()
    return fs


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def reopened(fs: SimFS) -> World:
    return World(fs, specs={s.name: s for s in ALL}, names_prefix=1)


def record_of(fs: SimFS, spec: Spec) -> DiskRecord:
    world = reopened(fs.clone(killed=True))
    return world.record(spec.name)


def serve_all(world: World, threads: int = 2) -> tuple[set[str], list[Damage]]:
    """Restore everything as an engine would: damage quarantines, right bytes are served."""
    served, found = set(), []
    for record in world.store.catalogue.records():
        if world.store.catalogue.get(record.key) is None:
            continue  # quarantined by an earlier one
        got = restored_bytes(world.store, record, threads=threads)
        if isinstance(got, Damage):
            found.append(got)
            world.writer.quarantine(got)
        else:
            name = record.labels["name"]
            assert got == expected_bytes(world.specs[name]), name
            served.add(name)
    world.run()
    return served, found


def test_every_bit_of_a_manifest(disk: SimFS) -> None:
    key = record_of(disk, A2).key
    name = key + ".manifest"
    data = disk.content("v1/manifests", name)
    for bit in range(len(data) * 8):
        with pytest.raises(ManifestError) as caught:
            decode(bytes(flipped(data, bit)), key)
        assert not isinstance(caught.value, NewerFormat)
    for bit in range(0, len(data) * 8, 101):  # and through the whole start-up
        fs = disk.clone()
        fs.put("v1/manifests", name, flipped(data, bit))
        world = reopened(fs)
        assert [(d.name, d.reason, d.permanent) for d in world.damage] == [(name, DamageReason.FORMAT, True)], bit
        assert world.visible() == {s.name for s in ALL} - {A2.name}
        world.store.close()


def test_the_rest_survives_a_lost_manifest(disk: SimFS) -> None:
    name = record_of(disk, A2).key + ".manifest"
    disk.put("v1/manifests", name, b"GUFOCKPT")
    kept = {s.name for s in ALL} - {A2.name}
    specs = {s.name: s for s in ALL}
    assert check_disk(disk, specs, kept, may_be_damaged=True) == kept
    assert name not in {e.name for e in disk.entries("v1/manifests")}
    assert check_disk(disk, specs, kept) == kept


def test_random_bits_of_payload_files(disk: SimFS) -> None:
    rng = random.Random(3)
    files = [(f, e.name) for f in ("v1/chunks", "v1/private") for e in disk.entries(f)]
    for _ in range(500):
        folder, name = rng.choice(files)
        fs = disk.clone()
        data = disk.content(folder, name)
        fs.put(folder, name, flipped(data, rng.randrange(len(data) * 8)))
        world = reopened(fs)
        needing = {r.labels["name"] for r in world.store.catalogue.dependents(name.partition(".")[0])}
        assert needing
        served, found = serve_all(world, threads=1)
        assert served == {s.name for s in ALL} - needing
        assert [(d.folder, d.name, d.reason) for d in found] == [(folder, name, DamageReason.CHECKSUM)]
        world.store.close()


def test_truncated_at_every_step_and_grown(disk: SimFS) -> None:
    for folder in ("v1/chunks", "v1/private"):
        for entry in disk.entries(folder):
            data = disk.content(folder, entry.name)
            for n in (*range(0, len(data), 256), len(data) - 1, len(data) + 1):
                fs = disk.clone()
                fs.put(folder, entry.name, (data + b"\0")[:n])
                world = reopened(fs)
                needing = {d.detail for d in world.damage}
                assert {(d.folder, d.name, d.reason) for d in world.damage} == {(folder, entry.name, DamageReason.SIZE)}
                served, found = serve_all(world, threads=1)
                assert found == []
                assert len(served) == len(ALL) - len(needing)
                world.store.close()


def test_a_large_chunk_truncated_at_every_4_kib_after_the_start() -> None:
    """Shrunk between start-up and restore, so that the restore itself must find it."""
    big = Spec("big", 64)
    fs = SimFS()
    world = World(fs)
    world.write_durably(big)
    record = world.record(big.name)
    name = record.chunks[0].key + ".chunk"
    data = fs.content("v1/chunks", name)
    for n in range(0, CHUNK_BYTES, 256):
        fs.put("v1/chunks", name, data[:n])
        got = restored_bytes(world.store, record)
        assert isinstance(got, Damage)
        assert (got.name, got.reason) == (name, DamageReason.SIZE)


def test_two_chunks_swapped(disk: SimFS) -> None:
    record = record_of(disk, A2)
    one, two = record.chunks[2].key + ".chunk", record.chunks[3].key + ".chunk"
    data = disk.content("v1/chunks", one), disk.content("v1/chunks", two)
    disk.put("v1/chunks", one, data[1])
    disk.put("v1/chunks", two, data[0])
    world = reopened(disk)
    served, found = serve_all(world)
    assert served == {s.name for s in ALL} - {A2.name}
    assert [d.reason for d in found] == [DamageReason.CHECKSUM]


def test_two_manifests_swapped(disk: SimFS) -> None:
    one, two = (record_of(disk, s).key + ".manifest" for s in (A2, OTHER))
    data = disk.content("v1/manifests", one), disk.content("v1/manifests", two)
    disk.put("v1/manifests", one, data[1])
    disk.put("v1/manifests", two, data[0])
    world = reopened(disk)
    assert sorted((d.name, d.reason) for d in world.damage) == sorted((n, DamageReason.FORMAT) for n in (one, two))
    assert world.visible() == {A1.name, FORK.name}


@pytest.mark.parametrize("moment", ["before the start", "before the restore"])
def test_a_shared_chunk_deleted(disk: SimFS, moment: str) -> None:
    name = record_of(disk, A1).chunks[0].key + ".chunk"
    if moment == "before the start":
        disk.remove("v1/chunks", name)
        world = reopened(disk)
        assert {(d.name, d.reason) for d in world.damage} == {(name, DamageReason.MISSING)}
        assert len(world.damage) == 3
        assert world.visible() == {OTHER.name}
        world.writer.sweep()
        world.run()
    else:
        world = reopened(disk)
        disk.remove("v1/chunks", name)
        served, found = serve_all(world)
        assert served == {OTHER.name}
        assert [(d.name, d.reason) for d in found] == [(name, DamageReason.MISSING)]
        assert set(world.retired) == NEED_A0
    world.store.close()
    assert check_disk(disk, world.specs, {OTHER.name}) == {OTHER.name}


def test_a_damaged_chunk_is_never_referenced_again(disk: SimFS) -> None:
    world = reopened(disk)
    record = world.record(A1.name)
    for i in range(2):
        world.writer.bind(A1.chunk_ids()[i], record.chunks[i].key)
    name = record.chunks[0].key + ".chunk"
    disk.put("v1/chunks", name, bytes(CHUNK_BYTES))
    got = restored_bytes(world.store, record)
    assert isinstance(got, Damage)
    assert {r.labels["name"] for r in world.writer.quarantine(got)} == NEED_A0
    # RAM still has the chunk: the same rows are written to a file of their own.
    again = world.write_durably(Spec("a", 190))
    assert again.chunks[0].key != record.chunks[0].key
    assert restored_bytes(world.store, again) == expected_bytes(Spec("a", 190))


def test_an_unreadable_file_is_hidden_but_not_deleted(disk: SimFS) -> None:
    world = reopened(disk)
    record = world.record(A1.name)
    damage = Damage(
        "v1/chunks", record.chunks[0].key + ".chunk", DamageReason.UNREADABLE, "Permission denied", permanent=False
    )
    assert {r.labels["name"] for r in world.writer.quarantine(damage)} == NEED_A0
    world.writer.sweep()
    world.run()
    assert world.visible() == {OTHER.name}
    world.store.close()
    everything = {s.name for s in ALL}
    assert check_disk(disk, world.specs, everything) == everything


def test_the_folder_check_finds_what_a_restore_would(disk: SimFS) -> None:
    assert check_store(disk).damage == ()
    record = record_of(disk, A1)
    name = record.chunks[1].key + ".chunk"
    disk.put("v1/chunks", name, flipped(disk.content("v1/chunks", name), 77))
    disk.put("v1/manifests", record_of(disk, OTHER).key + ".manifest", b"x" * 80)
    before = disk.n_operations
    seen: list[tuple[int, int]] = []
    report = check_store(disk, progress=lambda done, total: seen.append((done, total)))
    assert disk.n_operations == before  # it only reads
    assert report.n_checkpoints == len(ALL)
    assert len(report.lost) == len(ALL)
    assert {d.name for d in report.damage} == {name, record_of(disk, A1).key[:0] + report.damage[0].name}
    assert {d.reason for d in report.damage} == {DamageReason.CHECKSUM, DamageReason.FORMAT}
    assert report.n_unlisted == 3  # OTHER's chunks and private file
    assert seen[-1] == (report.n_bytes, report.n_bytes)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)


def test_foreign_files_links_and_folders_are_left_alone(tmp_path) -> None:
    from gufo_gguf.store.fs import PosixFileSystem

    root = tmp_path / "cache"
    world = World(PosixFileSystem(str(root)))
    world.write_durably(A1)
    world.store.close()
    key = "ab" * 16
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    (root / "v1" / "notes.txt").write_text("mine")
    (root / "v1" / "chunks" / "README").write_text("mine")
    (root / "v1" / "chunks" / f"{key.upper()}.chunk").write_text("mine")
    (root / "v1" / "chunks" / f"{key}.chunk").symlink_to(outside)
    (root / "v1" / "tmp" / f"{key}.private").mkdir()
    (root / "v1" / "tmp" / f"{key}.chunk").symlink_to(outside)
    (root / "v1" / "manifests" / f"{key}.manifest").symlink_to(outside)
    (root / "v1" / "private" / f"{key}.private").write_bytes(b"debris of ours")
    fs = PosixFileSystem(str(root))
    again = World(fs, specs=world.specs)
    again.writer.sweep()
    again.run()
    assert again.damage == []
    assert again.visible() == {A1.name}
    assert outside.read_bytes() == b"precious"
    left = {p.relative_to(root / "v1").as_posix() for p in (root / "v1").rglob("*")}
    for kept in (
        "notes.txt", "chunks/README", f"chunks/{key.upper()}.chunk", f"chunks/{key}.chunk",
        f"tmp/{key}.private", f"tmp/{key}.chunk", f"manifests/{key}.manifest",
    ):  # fmt: skip
        assert kept in left
    assert f"private/{key}.private" not in left
    kinds = {e.name: e.kind for e in fs.entries("v1/tmp")}
    assert kinds == {f"{key}.private": FileKind.FOLDER, f"{key}.chunk": FileKind.LINK}
    again.store.close()


def test_a_link_in_the_place_of_a_chunk_is_not_followed(tmp_path) -> None:
    from gufo_gguf.store.fs import PosixFileSystem

    root = tmp_path / "cache"
    world = World(PosixFileSystem(str(root)))
    record = world.write_durably(A1)
    chunk = root / "v1" / "chunks" / (record.chunks[0].key + ".chunk")
    moved = tmp_path / "moved"
    chunk.rename(moved)
    chunk.symlink_to(moved)
    got = restored_bytes(world.store, record)
    assert isinstance(got, Damage)
    assert (got.reason, got.permanent) == (DamageReason.NOT_A_FILE, False)
    chunk.unlink()
    import os

    os.mkfifo(chunk)  # must not hang
    got = restored_bytes(world.store, record)
    assert isinstance(got, Damage)
    assert got.reason is DamageReason.NOT_A_FILE
    world.store.close()
