"""Versions, permissions, the lock, start-up reads, and the read-only check of a folder in use."""

from __future__ import annotations

import hashlib
import os
import random
import re

import numpy as np
import pytest

from gufo_gguf.cache.types import Origin
from gufo_gguf.core.errors import StoreError
from gufo_gguf.store.check import check_store
from gufo_gguf.store.disk import DiskStore
from gufo_gguf.store.fs import Entry, FileSystem, PosixFileSystem
from gufo_gguf.store.layout import Layout
from gufo_gguf.store.manifest import ChunkTable, Manifest, encode
from gufo_gguf.store.scan import Loaded, reclaim
from gufo_gguf.store.simfs import SimFS
from gufo_gguf.store.types import CheckpointMeta, FileRef, PrivateFile, Section
from tests.store.world import Spec, World, check_disk, expected_bytes, restored_bytes

A1, A2, OTHER = Spec("a", 150), Spec("a", 256), Spec("o", 140)


def test_one_process_per_folder(tmp_path) -> None:
    root = str(tmp_path / "cache")
    ready_r, ready_w = os.pipe()
    done_r, done_w = os.pipe()
    child = os.fork()
    if child == 0:
        DiskStore.open(root, 1 << 20)
        os.write(ready_w, b"x")
        os.read(done_r, 1)
        os._exit(0)
    try:
        os.read(ready_r, 1)
        with pytest.raises(StoreError, match=re.escape(root) + f".*process {child}"):
            DiskStore.open(root, 1 << 20)
        assert check_store(PosixFileSystem(root, create=False)).damage == ()  # looking is allowed
    finally:
        os.write(done_w, b"x")
        os.waitpid(child, 0)
    # The file of a dead process locks nothing.
    store = DiskStore.open(root, 1 << 20)
    with pytest.raises(StoreError, match=f"process {os.getpid()}"):
        DiskStore.open(root, 1 << 20)
    store.close()
    DiskStore.open(root, 1 << 20).close()


def test_folders_are_private_and_somebody_elses_link_is_refused(tmp_path) -> None:
    root = tmp_path / "cache"
    (root / "v1").mkdir(parents=True, mode=0o755)
    DiskStore.open(str(root), 1 << 20).close()
    for folder in ("v1", *Layout().folders):
        assert (root / folder).stat().st_mode & 0o777 == 0o700
    for name in ("v1/chunks", "v1/manifests"):
        (root / name).rmdir()
        (root / name).symlink_to(tmp_path)
        with pytest.raises(StoreError, match="cannot be used"):
            DiskStore.open(str(root), 1 << 20)
        (root / name).unlink()


def test_a_folder_that_cannot_be_made_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=re.escape(str(tmp_path / "file" / "cache"))):
        DiskStore.open(str(tmp_path / "file" / "cache"), 1 << 20)


def test_a_later_layout_is_refused_and_left_alone() -> None:
    fs = SimFS()
    world = World(fs)
    world.write_durably(A1)
    world.store.close()
    fs.make_folder("v2")
    before = fs.fingerprint()
    with pytest.raises(StoreError, match=r"layout v2.*left alone"):
        DiskStore(fs, 1 << 20)
    with pytest.raises(StoreError, match="layout v2"):
        check_store(fs)
    assert fs.fingerprint() == before


def test_a_later_manifest_format_is_refused_and_left_alone() -> None:
    from tests.store.test_manifest import resealed

    fs = SimFS()
    world = World(fs)
    record = world.write_durably(A1)
    world.store.close()
    name = record.key + ".manifest"
    data = bytearray(fs.content("v1/manifests", name))
    data[8] = 9
    fs.put("v1/manifests", name, resealed(bytes(data)))
    before = fs.fingerprint()
    store = DiskStore(fs, 1 << 20)
    with pytest.raises(StoreError, match=r"format 9.*left alone"):
        list(store.load())
    store.close()
    assert fs.fingerprint() == before


def test_an_earlier_layout_is_emptied_and_counts_until_then() -> None:
    fs = SimFS()
    old = World(fs)
    old.write_durably(A1)
    old.store.close()
    fs.put("v1/chunks", "README", b"mine")
    used = fs.used_bytes()
    store = DiskStore(fs, 1 << 20, layout=Layout(version=2, older=(1,)))
    assert list(store.load()) == []
    assert store.catalogue.usage().used_bytes == used - fs.block_bytes  # all but the foreign file
    for _ in reclaim(fs, store.layout, store.catalogue):
        pass
    assert store.catalogue.usage().used_bytes == 0
    assert [e.name for folder in Layout().folders for e in fs.entries(folder)] == ["README"]


def thousand_manifests(fs: SimFS, n: int) -> None:
    """n checkpoints of ten conversations, chunks shared within each, written as files."""
    names = (hashlib.md5(f"k{i}".encode()).hexdigest() for i in range(1 << 20))
    chunks: dict[int, list[FileRef]] = {c: [] for c in range(10)}
    for i in range(n):
        held = chunks[i % 10]
        ref = FileRef(next(names), 64, bytes(16))
        fs.put("v1/chunks", ref.key + ".chunk", bytes(64))
        held.append(ref)
        meta = CheckpointMeta("s", np.arange(4 * len(held) + 1, dtype=np.int32), Origin.PROMPT, 4, 16)
        private = PrivateFile(next(names), Section(84, bytes(16)), Section(16, bytes(16)), Section(0, bytes(16)))
        fs.put("v1/private", private.key + ".private", bytes(100))
        key = next(names)
        fs.put("v1/manifests", key + ".manifest", encode(Manifest(key, i, meta, ChunkTable.of(held), private)))


def test_a_start_reads_manifests_and_nothing_else() -> None:
    fs = SimFS()
    DiskStore(fs, 1 << 30).close()
    thousand_manifests(fs, 1000)
    sizes = sum(e.n_bytes for e in fs.entries("v1/manifests"))
    store = DiskStore(fs, 1 << 30)
    found = list(store.load())
    assert len(found) == 1000
    assert all(isinstance(f, Loaded) for f in found)
    assert fs.bytes_read == {"v1/manifests": sizes}
    assert store.catalogue.check() == []
    assert store.catalogue.usage().used_bytes == fs.used_bytes()
    assert store.catalogue.next_sequence() == 1000
    assert [r.sequence for r in store.catalogue.records()] == list(range(1000))


def test_few_descriptors_however_many_files() -> None:
    fs = SimFS()
    world = World(fs)
    record = world.write_durably(Spec("long", 64 * 60 + 7))
    peak = 0

    class Counting(SimFS):
        pass

    original = fs.open

    def counted(folder: str, name: str) -> int:
        nonlocal peak
        handle = original(folder, name)
        peak = max(peak, fs.n_open - 1)
        return handle

    fs.open = counted  # type: ignore[method-assign]
    for threads in (1, 2, 4):
        peak = 0
        assert restored_bytes(world.store, record, threads=threads) == expected_bytes(Spec("long", 64 * 60 + 7))
        assert peak <= threads + 1
    assert fs.n_open == 1


@pytest.mark.parametrize(("threads", "staging_bytes", "started"), [(6, 1 << 20, 2), (6, 16 << 20, 6), (2, 16 << 20, 2)])
def test_no_more_threads_than_staging_feeds(threads: int, staging_bytes: int, started: int) -> None:
    import threading

    world = World(SimFS())
    record = world.write_durably(Spec("long", 64 * 60 + 7))
    before = threading.active_count()
    with world.store.restore(record, threads=threads, staging_bytes=staging_bytes) as pieces:
        going = iter(pieces)
        next(going)
        assert threading.active_count() == before + started
    assert threading.active_count() == before


def test_a_restore_given_up_half_way_leaves_no_descriptor_and_no_thread() -> None:
    import threading

    fs = SimFS()
    world = World(fs)
    record = world.write_durably(Spec("long", 64 * 60 + 7))
    before = threading.active_count()
    for n in range(1, 12):
        with world.store.restore(record) as pieces:
            for i, _ in enumerate(pieces):
                if i == n:
                    break
        assert threading.active_count() == before
        assert fs.n_open == 1


def test_an_error_in_a_restoring_thread_reaches_the_caller() -> None:
    fs = SimFS()
    world = World(fs)
    record = world.write_durably(A2)

    def broken(handle: int, out: memoryview, offset: int) -> int:
        raise RuntimeError("a bug")

    fs.read = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a bug"):
        restored_bytes(world.store, record)


class Evicting:
    """A file system that loses a checkpoint between the check's look at its manifest and its files."""

    def __init__(self, inner: SimFS, world: World) -> None:
        self.inner = inner
        self.world = world

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def open(self, folder: str, name: str) -> int:
        if folder != "v1/manifests" and A1.name in self.world.visible():
            self.world.writer.retire([self.world.record(A1.name), self.world.record(A2.name)])
            self.world.run()
        return self.inner.open(folder, name)

    def entries(self, folder: str) -> list[Entry]:
        return self.inner.entries(folder)


def test_the_check_of_a_folder_in_use_takes_eviction_for_eviction() -> None:
    fs = SimFS()
    world = World(fs)
    for spec in (A1, A2, OTHER):
        world.write_durably(spec)
    evicting: FileSystem = Evicting(fs, world)  # type: ignore[assignment]
    report = check_store(evicting)
    assert world.visible() == {OTHER.name}
    assert report.damage == ()


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_writes_evictions_and_restarts(seed: int) -> None:
    """A long random life under a small budget; the accounts and the bytes are right at every stop."""
    rng = random.Random(seed)
    fs = SimFS(block_bytes=4096)
    budget = 200_000
    specs: dict[str, Spec] = {}
    world = World(fs, budget, seed, specs)
    for turn in range(60):
        choice = rng.random()
        if choice < 0.6:
            parent = f"c{rng.randrange(3)}"
            shared = 64 * rng.randrange(3)
            spec = Spec(
                f"{parent}-{rng.randrange(2)}", shared + rng.randrange(1, 200), parent, shared, rng.random() < 0.3
            )
            # One name, one content: the lengths of the fork points must not differ within a branch.
            spec = specs.setdefault(spec.name, spec)
            if spec.name not in world.visible():
                world.write(spec)
        elif choice < 0.75 and world.visible():
            world.writer.retire([rng.choice(world.store.catalogue.records())])
            for _ in range(rng.randrange(10)):
                world.take(world.writer.step(512))
        elif choice < 0.9 and specs:
            world.writer.enqueue(rng.choice(list(specs.values())).job())
            for _ in range(rng.randrange(20)):
                world.take(world.writer.step(512))
            if rng.random() < 0.5:
                world.writer.abandon_all()
        else:
            world.store.close()
            fs = fs.clone(killed=True)
            world = World(fs, budget, seed * 1000 + turn + 1, specs)
        assert world.store.catalogue.check() == []
        assert fs.used_bytes() <= budget
        if turn % 10 == 9:
            world.run()
            assert world.store.catalogue.usage().used_bytes == fs.used_bytes()
            for record in world.store.catalogue.records():
                assert restored_bytes(world.store, record) == expected_bytes(specs[record.labels["name"]])
    world.store.close()
    check_disk(fs, specs, set())
