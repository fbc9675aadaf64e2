"""The design's figures with their own numbers: 2,048-row chunks, figure 6 with 256.

Small figures run on the fake backend, bytes and all.  The measured conversation of 95,439 tokens
runs on the manager alone, with the real sizes: no byte of it has to exist to be counted.
"""

from __future__ import annotations

import pytest

from gufo_gguf.cache.chunks import Residence
from gufo_gguf.cache.events import EventKind, EventLog
from gufo_gguf.cache.manager import CacheManager
from gufo_gguf.cache.types import (
    CacheLimits,
    CapturePoint,
    CaptureTicket,
    ChunkId,
    FromBuffer,
    Origin,
    PromptView,
    ReuseSource,
    StateShape,
    Tokens,
)
from tests.cache.rig import Rig, join, text


def figure(**options: int) -> Rig:
    settings = {"chunk_rows": 2048, "n_ctx": 16_384, "n_batch": 2048, "n_ubatch": 512} | options
    return Rig(**settings)


def chunks_at(rig: Rig, n_tokens: int) -> tuple[ChunkId, ...]:
    """Chunks of the newest checkpoint at a boundary."""
    return next(c.parts.chunks for c in reversed(rig.manager.tables.checkpoints.all()) if c.n_tokens == n_tokens)


def boundaries(rig: Rig) -> list[int]:
    return sorted(c.n_tokens for c in rig.manager.tables.checkpoints.all())


def evict(rig: Rig, n_tokens: int) -> int:
    table = rig.manager.tables.checkpoints
    victim = next(c for c in table.all() if c.n_tokens == n_tokens)
    freed = table.remove(victim.id, "test")
    rig.settle()
    return freed


def test_figure_3_an_edit_restores_the_deepest_checkpoint_before_it() -> None:
    rig = figure()
    a = text(8192, 1)
    assert rig.ask(a).captured == [
        (2048, Origin.GRID),
        (4096, Origin.GRID),
        (6144, Origin.GRID),
        (8192, Origin.PROMPT),
    ]
    old = chunks_at(rig, 8192)
    edited = join(a[:7000], text(1192, 2))
    run = rig.ask(edited)
    assert (run.admission.source, run.admission.n_reused) == (ReuseSource.RAM, 6144)
    unchanged = 7000 - run.admission.n_reused
    assert (unchanged, len(edited) - 7000) == (856, 1192)
    rig.verify(run.slot)
    new = chunks_at(rig, 8192)
    assert new[:3] == old[:3], "the branch shares what it restored"
    assert new[3] != old[3], "rows of unchanged tokens that were computed again are new bytes"


def test_figure_4_checkpoints_of_one_conversation_share_every_full_chunk() -> None:
    rig = figure()
    rig.ask(text(8292, 1))
    assert boundaries(rig) == [2048, 4096, 6144, 8292]
    deepest = chunks_at(rig, 8292)
    for n_tokens in boundaries(rig):
        assert chunks_at(rig, n_tokens) == deepest[: n_tokens // 2048]
    assert rig.manager.stats().chunks == 4


@pytest.mark.parametrize("n_slots", [1, 3])
def test_figure_6_three_conversations_two_computations_one_copy(n_slots: int) -> None:
    rig = figure(chunk_rows=256, n_slots=n_slots)
    system = text(6000, 1)
    one = rig.ask(join(system, text(200, 2)))
    assert [b for b, _ in one.captured] == [2048, 4096, 6200]
    two = rig.ask(join(system, text(300, 3)))
    assert two.admission.n_reused == 4096
    assert (6000, Origin.LEARNED) in two.captured
    rig.verify(two.slot)
    three = rig.ask(join(system, text(400, 4)))
    assert three.admission.n_reused == 6000
    rig.verify(three.slot)
    shared = chunks_at(rig, 6400)[:23]
    assert shared == chunks_at(rig, 6300)[:23] == chunks_at(rig, 6000), "6,000 rows: 23 chunks of 256 and a tail of 112"
    makers = [rig.manager.tables.chunks.get(c).maker for c in shared]
    by = [(m.slot, m.generation) for m in makers]
    first, second = one.admission.lease, two.admission.lease
    assert by == [(first.slot, first.generation)] * 16 + [(second.slot, second.generation)] * 7


@pytest.mark.parametrize("n_slots", [1, 3])
def test_figure_6_with_a_template_that_says_where_the_system_prompt_ends(n_slots: int) -> None:
    """Three conversations, one computation."""
    rig = figure(chunk_rows=256, n_slots=n_slots)
    system = text(6000, 1)
    one = rig.ask(join(system, text(200, 2)), system_end=6000)
    assert one.captured == [(2048, Origin.GRID), (4096, Origin.GRID), (6000, Origin.SYSTEM), (6200, Origin.PROMPT)]
    for n, seed in ((300, 3), (400, 4)):
        run = rig.ask(join(system, text(n, seed)), system_end=6000)
        assert run.admission.n_reused == 6000
        assert run.captured == [(6144, Origin.GRID), (6000 + n, Origin.PROMPT)]
        rig.verify(run.slot)


def test_figure_7_two_cold_prefills_do_not_share_and_a_restore_does() -> None:
    rig = figure(n_slots=3, grid_max=0)
    shared = text(6144, 1)
    rig.ask(join(shared, text(100, 2)), stable=(6144,))
    b = chunks_at(rig, 6244)
    rig.ask(join(shared, text(150, 3)), stable=(6144,), read=False)
    a = chunks_at(rig, 6294)
    assert len(a) == len(b) == 3 and not set(a) & set(b), "cold prefills of the same text keep their own chunks"
    run = rig.ask(join(shared, text(2048, 4)))
    assert run.admission.n_reused == 6144
    c = chunks_at(rig, 8192)
    assert c[:3] == a and len(c) == 4, "the restore references three chunks and computes one"
    rig.verify(run.slot)


def test_figure_8_a_boundary_is_learned_by_the_first_that_diverges() -> None:
    rig = figure(n_slots=3)
    parent = text(10_000, 1)
    assert [b for b, _ in rig.ask(parent).captured] == [2048, 4096, 6144, 8192, 10_000]
    first = rig.ask(join(parent[:6000], text(700, 2)))
    assert first.admission.n_reused == 4096
    assert (6000, Origin.LEARNED) in first.captured
    second = rig.ask(join(parent[:6000], text(900, 3)))
    assert second.admission.n_reused == 6000, "only its own task is prefilled"
    rig.verify(second.slot)


def test_figure_11_retry_copies_then_cheap_ones_make_room_and_nothing_more() -> None:
    """In units of one private state = one chunk: 1 unit free, 5 needed."""
    unit, rows = 64 * 24, 64
    shape = StateShape(24, unit, 0, rows)
    budget = 4 * unit + 2 * unit + (3 * unit + (3 + 4 + 5) * 24) + 1 * unit
    log = EventLog()
    manager = CacheManager(shape, CacheLimits(budget, chunk_rows=rows), 1, 4096, log)

    def leave(tokens: Tokens, *points: CapturePoint) -> None:
        view = PromptView("scope", tokens)
        admission = manager.acquire(view, manager.lookup(view))
        assert admission is not None
        manager.preserved(admission.lease, admission.preserve)
        assert manager.ready(admission)
        at = admission.n_reused
        for point in points:
            manager.extend(admission.lease, tokens[at : point.boundary])
            at = point.boundary
            ticket = manager.reserve_capture(admission.lease, point)
            assert isinstance(ticket, CaptureTicket) and manager.commit_capture(ticket)
        manager.release(admission.lease)

    leave(text(256, 1), CapturePoint(192, Origin.PROMPT, True), CapturePoint(256, Origin.RETRY, False))
    for n, seed in ((3, 2), (4, 3), (5, 4)):
        leave(text(n, seed), CapturePoint(n, Origin.PROMPT, True))
    assert manager.tables.ledger.free_bytes == unit
    leave(text(256, 5), CapturePoint(256, Origin.PROMPT, True))
    removed = [(e.reason, e.boundary) for e in log.newest() if e.kind is EventKind.REMOVE]
    assert removed == [("retry", 256), ("cheap", 3), ("cheap", 4)]
    assert [c.n_tokens for c in manager.tables.checkpoints.all()] == [192, 5, 256]
    assert manager.check() == []


def test_figure_13_a_slot_changes_hands() -> None:
    rig = figure(n_slots=2)
    a = text(6144, 1)
    first = rig.ask(a)
    assert first.slot == 0 and rig.manager.stats().chunks_borrowed == 3
    spilled = [rig.spill(2048) for _ in range(4)]
    assert spilled == [1, 1, 1, 0], "piece by piece, until nothing is left"
    other = rig.start(rig.view(text(100, 9)))
    assert other is not None and other.slot == 1
    b = rig.start(rig.view(text(5000, 2)))
    assert b is not None and b.slot == 0 and b.admission.preserve == (), "all copied already"
    while not b.prefilled:
        rig.prefill(b)
    rig.finish(other)
    back = rig.start(rig.view(join(a, text(50, 3))))
    assert back is not None and (back.slot, back.admission.n_reused) == (1, 6144)
    plan = back.admission.restore
    assert plan is not None and all(isinstance(p.source, FromBuffer) for p in plan.pieces)
    rig.verify(1)
    rig.verify(0)


def test_figure_14_rows_are_preserved_once_and_freed_with_the_last_reference() -> None:
    rig = figure(grid_max=0)
    a = text(12_288, 1)
    rig.ask(a, stable=(8192,))
    assert (len(chunks_at(rig, 8192)), len(chunks_at(rig, 12_288))) == (4, 6)
    b = rig.ask(text(300, 2))
    assert len(b.admission.preserve) == 6 and rig.rows_copied == 12_288
    before = rig.manager.stats()
    assert evict(rig, 8192) == rig.shape.private_bytes, "private state only"
    after = rig.manager.stats()
    assert (before.chunks, after.chunks) == (6, 6)
    assert evict(rig, 12_288) == rig.shape.private_bytes + rig.shape.logits_bytes + 6 * rig.shape.chunk_bytes
    assert rig.manager.stats().chunks == 0


# -- the measured conversation ---------------------------------------------------------------------
PRIVATE, ROW, N = 133_000_000, 27_460, 95_439


def measured(budget: int = 32 << 30) -> tuple[CacheManager, EventLog]:
    log = EventLog()
    return CacheManager(StateShape(ROW, PRIVATE, 0), CacheLimits(budget), 1, 1 << 17, log), log


def play(manager: CacheManager, tokens: Tokens, stable: tuple[int, ...] = ()) -> tuple[int, list[int]]:
    """A request without a backend: (tokens reused, boundaries captured)."""
    view = PromptView("scope", tokens, stable)
    lookup = manager.lookup(view)
    admission = manager.acquire(view, lookup)
    assert admission is not None
    manager.preserved(admission.lease, admission.preserve)
    assert manager.ready(admission)
    captured, at = [], admission.n_reused
    for point in manager.plan_captures(admission.lease, view, lookup.common_prefix, 2048):
        manager.extend(admission.lease, tokens[at : point.boundary])
        at = point.boundary
        ticket = manager.reserve_capture(admission.lease, point)
        if isinstance(ticket, CaptureTicket):
            assert manager.commit_capture(ticket)
            captured.append(at)
    manager.extend(admission.lease, tokens[at:])
    manager.release(admission.lease)
    assert manager.check() == []
    return admission.n_reused, captured


def test_six_checkpoints_cost_one_copy_of_the_rows_and_six_private_states() -> None:
    manager, _ = measured()
    depths = [22_528, 47_104, 69_632, 94_208, 95_434, 95_439]
    assert play(manager, text(N), stable=(95_434,)) == (0, depths)
    whole = sum(n * ROW + PRIVATE for n in depths)
    assert abs(whole - 12.4e9) < 0.1e9
    assert manager.stats().whole_bytes == whole
    computed = N * ROW + len(depths) * PRIVATE
    stats = manager.stats()
    assert computed <= stats.unique_bytes <= 1.02 * computed
    assert 3.40e9 < stats.unique_bytes < 3.46e9, "the measured run reported 3.43 GB"
    assert stats.unique_bytes == stats.used_bytes == stats.admitted_bytes


@pytest.mark.parametrize(("edit", "restored", "unchanged"), [(85_384, 69_632, 15_752), (47_733, 47_104, 629)])
def test_edits_of_the_measured_conversation(edit: int, restored: int, unchanged: int) -> None:
    manager, _ = measured()
    a = text(N)
    play(manager, a, stable=(95_434,))
    edited = join(a[:edit], text(95_442 - edit, 2))
    reused, _ = play(manager, edited)
    assert (reused, edit - reused) == (restored, unchanged)
    if restored == 69_632:
        assert len(edited) - reused == 25_810


def test_a_small_budget_refuses_with_both_sizes_once_and_evicts_nothing() -> None:
    manager, log = measured(budget=1 << 30)
    play(manager, text(2000, 7))
    kept = manager.stats().checkpoints
    for seed in (1, 2):
        view = PromptView("scope", text(N, seed))
        admission = manager.acquire(view, manager.lookup(view))
        assert admission is not None
        manager.preserved(admission.lease, admission.preserve)
        assert manager.ready(admission)
        manager.extend(admission.lease, view.tokens)
        refused = manager.reserve_capture(admission.lease, CapturePoint(N, Origin.PROMPT, True))
        assert not isinstance(refused, CaptureTicket) and refused is not None
        assert (refused.reason, refused.budget_bytes) == ("too_large", 1 << 30)
        assert refused.need_bytes == N * ROW + PRIVATE
        manager.release(admission.lease)
    assert manager.stats().checkpoints == kept
    refusals = [e for e in log.newest() if e.kind is EventKind.REFUSE]
    assert [(e.reason, e.n_bytes) for e in refusals] == [("too_large", N * ROW + PRIVATE)], "said once"


def test_rows_in_backing_and_rows_in_a_slot_are_the_same_chunk() -> None:
    """Preserving moves no charge: backing was held from admission on."""
    rig = figure()
    rig.ask(text(6144, 1))
    used = rig.manager.stats().used_bytes
    rig.spill()
    assert rig.manager.stats().used_bytes == used
    assert {c.residence for c in rig.manager.tables.chunks.all()} == {Residence.RESIDENT}
