"""Write, restart, restore; sharing on disk; budget; the queue."""

from __future__ import annotations

import numpy as np
import pytest

from gufo_gguf.store.catalogue import EvictionPlan
from gufo_gguf.store.fs import PosixFileSystem
from gufo_gguf.store.jobs import Outcome, WriteResult
from gufo_gguf.store.simfs import SimFS
from gufo_gguf.store.types import Damage, PartKind, SourceGone
from tests.store.world import CHUNK_BYTES, STEP_BYTES, Spec, World, check_disk, expected_bytes, restored_bytes

A1, A2, A3 = Spec("a", 150), Spec("a", 256, logits=True), Spec("a", 300)
FORK = Spec("f", 200, parent="a", shared=128)


def test_what_was_written_comes_back_after_a_restart() -> None:
    fs = SimFS()
    world = World(fs)
    for spec in (A1, A2, A3, FORK):
        world.write_durably(spec)
    world.store.close()
    again = World(fs, specs=world.specs)
    assert again.damage == []
    assert again.visible() == {s.name for s in (A1, A2, A3, FORK)}
    for spec in (A1, A2, A3, FORK):
        record = again.record(spec.name)
        assert restored_bytes(again.store, record) == expected_bytes(spec)
        tokens = again.store.tokens(record)
        assert not isinstance(tokens, Damage)
        assert np.array_equal(tokens, spec.tokens())
        assert record.has_logits == spec.logits


def test_on_a_real_file_system(tmp_path) -> None:
    fs = PosixFileSystem(str(tmp_path / "deep" / "cache"))
    world = World(fs)
    for spec in (A1, A2, FORK):
        world.write_durably(spec)
    world.store.close()
    fs = PosixFileSystem(str(tmp_path / "deep" / "cache"))
    again = World(fs, specs=world.specs)
    for spec in (A1, A2, FORK):
        assert restored_bytes(again.store, again.record(spec.name)) == expected_bytes(spec)
    assert (tmp_path / "deep" / "cache" / "v1").stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "deep" / "cache" / "v1" / "tmp").iterdir()) == []
    again.store.close()


def test_sharing_is_by_inherited_chunk_and_counts_once() -> None:
    fs = SimFS()
    world = World(fs)
    world.write_durably(A1)  # 2 chunks
    world.write_durably(A2)  # + 2
    world.write_durably(FORK)  # shares 2, + 1
    assert len(fs.entries("v1/chunks")) == 5
    unique, shared = world.store.catalogue.shares(world.record(A1.name))
    assert shared == 2 * CHUNK_BYTES
    assert unique < CHUNK_BYTES * 4


def test_chunks_of_the_first_owner_outlive_it() -> None:
    fs = SimFS()
    world = World(fs)
    for spec in (A1, A2, FORK):
        world.write_durably(spec)
    world.writer.retire([world.record(A1.name)])
    world.run()
    assert world.visible() == {A2.name, FORK.name}
    for spec in (A2, FORK):
        assert restored_bytes(world.store, world.record(spec.name)) == expected_bytes(spec)
    world.store.close()
    assert check_disk(fs, world.specs, {A2.name, FORK.name}) == {A2.name, FORK.name}


def test_after_a_restart_a_restored_chunk_is_shared_again() -> None:
    fs = SimFS()
    world = World(fs)
    world.write_durably(A1)
    world.store.close()
    again = World(fs, names_prefix=1)
    record = again.record(A1.name)
    for i in range(len(record.chunks)):
        again.writer.bind(A2.chunk_ids()[i], record.chunks[i].key)
    before = len(fs.entries("v1/chunks"))
    new = again.write_durably(A2)
    assert len(fs.entries("v1/chunks")) == before + 2
    assert [new.chunks[i] for i in range(2)] == [record.chunks[i] for i in range(2)]


def test_the_budget_holds_at_every_operation_and_victims_go_in_rank_order() -> None:
    budget = 100_000
    fs = SimFS(block_bytes=4096)
    world = World(fs, budget_bytes=budget)
    over = []
    fs.on_operation = lambda _: over.append(fs.used_bytes()) if fs.used_bytes() > budget else None
    for i in range(8):
        outcome = world.write(Spec(f"c{i}", 200))
        assert outcome.result is WriteResult.DURABLE
        assert world.store.catalogue.usage().used_bytes == fs.used_bytes()
        assert world.store.catalogue.usage().reserved_bytes == 0
    assert over == []
    assert world.retired == [f"c{i}@200" for i in range(len(world.retired))]
    assert world.visible() == {f"c{i}@200" for i in range(len(world.retired), 8)}
    assert 0 < len(world.retired) < 8


def test_what_can_never_fit_is_refused_and_nothing_is_evicted_for_it() -> None:
    world = World(SimFS(block_bytes=4096), budget_bytes=60_000)
    world.write_durably(A1)
    outcome = world.write(Spec("huge", 64 * 40))
    assert outcome.result is WriteResult.TOO_LARGE
    assert world.visible() == {A1.name}
    assert world.store.catalogue.usage().reserved_bytes == 0


def test_pinned_records_keep_their_files_until_unpinned() -> None:
    fs = SimFS()
    world = World(fs)
    record = world.write_durably(A1)
    assert world.store.catalogue.pin_record(record.key) is record
    world.writer.retire([record])
    world.run()
    assert world.visible() == set()
    assert restored_bytes(world.store, record) == expected_bytes(A1)
    world.store.catalogue.unpin_record(record)
    world.writer.sweep()
    world.run()
    assert fs.entries("v1/chunks") == fs.entries("v1/private") == []


def test_plan_room_changes_nothing_and_respects_rank_none() -> None:
    world = World(SimFS(block_bytes=4096), budget_bytes=40_000)
    world.write_durably(A1)
    catalogue = world.store.catalogue
    plan = catalogue.plan_room(30_000, lambda r: r.sequence)
    assert isinstance(plan, EvictionPlan)
    assert [r.labels["name"] for r in plan.victims] == [A1.name]
    assert not isinstance(catalogue.plan_room(30_000, lambda _: None), EvictionPlan)
    assert world.visible() == {A1.name}


def test_a_newer_checkpoint_supersedes_a_waiting_and_a_running_one() -> None:
    fs = SimFS()
    world = World(fs)
    for spec in (A1, A2, A3):
        world.specs[spec.name] = spec
    first = world.writer.enqueue(A1.job())
    for _ in range(8):  # the first chunk is through, the second under way
        world.take(world.writer.step(STEP_BYTES))
    n_chunks = len(fs.entries("v1/chunks"))
    assert n_chunks >= 1
    second = world.writer.enqueue(A2.job(), supersedes=(first,))
    third = world.writer.enqueue(A3.job(), supersedes=(second,))
    world.run()
    results = {o.job: o.result for o in world.outcomes}
    assert results == {
        first: WriteResult.SUPERSEDED,
        second: WriteResult.SUPERSEDED,
        third: WriteResult.DURABLE,
    }
    # What the first had finished was not written again.
    assert len(fs.entries("v1/chunks")) == 4
    world.store.close()
    assert check_disk(fs, world.specs, {A3.name}) == {A3.name}


def test_the_queue_refuses_what_would_pin_too_much() -> None:
    world = World(SimFS())
    world.writer = world.store.writer(lambda r: r.sequence, staging_bytes=STEP_BYTES, queue_bytes=4_000)
    assert not isinstance(world.writer.enqueue(A1.job()), Outcome)  # 2 chunks, private, tail: 3,100 bytes
    refused = world.writer.enqueue(A3.job())
    assert isinstance(refused, Outcome)
    assert refused.result is WriteResult.QUEUE_FULL
    world.run()
    assert world.visible() == {A1.name}
    assert world.writer.pinned_bytes() == 0


def test_steps_move_at_most_what_they_may() -> None:
    fs = SimFS()
    world = World(fs)
    sizes = []
    fs.on_operation = lambda op: sizes.append(op.call)
    world.writer.enqueue(A3.job())
    total = 0
    while True:
        before = len(sizes)
        progress = world.writer.step(100)
        assert progress.n_bytes <= 100
        assert len([c for c in sizes[before:] if c in ("write", "sync", "sync_folder")]) <= 1
        total += progress.n_bytes
        if progress.idle:
            break
    want = expected_bytes(A3)
    assert total == sum(len(v) for v in want.values())


def test_a_source_that_goes_away_ends_its_job_only() -> None:
    class Gone:
        n_bytes = CHUNK_BYTES

        def read(self, offset: int, out: memoryview) -> None:
            raise SourceGone("slot 3 failed")

    fs = SimFS()
    world = World(fs)
    job = A1.job()
    broken = job.chunks[1].__class__(job.chunks[1].chunk, Gone())
    number = world.writer.enqueue(type(job)(job.meta, (job.chunks[0], broken), job.private, job.tail, job.logits))
    world.run()
    assert [(o.job, o.result) for o in world.outcomes] == [(number, WriteResult.SOURCE_GONE)]
    assert world.writer.suspended is None
    world.write_durably(FORK)
    world.store.close()
    assert check_disk(fs, {FORK.name: FORK}, {FORK.name}) == {FORK.name}


def test_jobs_whose_parts_do_not_fit_their_tokens_are_a_bug() -> None:
    world = World(SimFS())
    job = A1.job()
    with pytest.raises(ValueError, match="1 chunks"):
        world.writer.enqueue(type(job)(job.meta, job.chunks[:1], job.private, job.tail, job.logits))
    with pytest.raises(ValueError, match="tail"):
        world.writer.enqueue(type(job)(job.meta, job.chunks, job.private, None, job.logits))


def test_parts_can_be_left_out_and_delivered_in_place() -> None:
    world = World(SimFS())
    record = world.write_durably(A3)
    want = expected_bytes(A3)
    got = restored_bytes(world.store, record, first_chunk=2, kinds=frozenset({PartKind.CHUNK, PartKind.TAIL}))
    assert got == {k: v for k, v in want.items() if k[0] is PartKind.TAIL or (k[0] is PartKind.CHUNK and k[1] >= 2)}
    buffers = {k: bytearray(len(v)) for k, v in want.items()}
    got = restored_bytes(
        world.store, record, destination=lambda p: memoryview(buffers[(p.kind, p.index)]), staging_bytes=4
    )
    assert got == want
    assert {k: bytes(v) for k, v in buffers.items()} == want


@pytest.mark.parametrize("staging_bytes", [1, 3, 100, 1 << 20, 8 << 20])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_restore_in_pieces_of_any_size(staging_bytes: int, threads: int) -> None:
    fs = SimFS()
    world = World(fs)
    record = world.write_durably(A1)
    assert restored_bytes(world.store, record, staging_bytes=staging_bytes, threads=threads) == expected_bytes(A1)
    assert fs.n_open == 1  # the lock
