"""Every single failure, one at a time: nothing leaks, nothing wrong is served, and trying again works."""

from __future__ import annotations

import numpy as np
import pytest

from gufo_gguf.backend.base import Span
from gufo_gguf.backend.fake import FailNth
from gufo_gguf.cache import manager as manager_module
from gufo_gguf.cache.events import EventKind
from gufo_gguf.cache.ledger import Reservation, Shortfall
from gufo_gguf.cache.types import (
    CapturePoint,
    CaptureRefused,
    CaptureTicket,
    FromBuffer,
    FromSlot,
    Lease,
    Origin,
    ReuseSource,
    Tokens,
)
from gufo_gguf.core.errors import BackendError
from tests.cache.rig import Rig, Run, join, state_of, text

KINDS = {"hybrid": (24, 64), "rows": (24, 0)}
SYSTEM = text(50, 1)
SCRIPT: list[tuple[Tokens, tuple[int, ...]]] = [
    (join(SYSTEM, text(20, 2)), (66,)),
    (join(SYSTEM, text(20, 2), text(16, 3)), (80,)),
    (join(SYSTEM, text(30, 4)), (74,)),
    (text(30, 6), ()),
    (join(SYSTEM, text(33, 7)), (78,)),
    (join(SYSTEM, text(20, 2), text(16, 3), text(10, 5)), (90,)),
    (join(SYSTEM, text(30, 4)), (74,)),
]


def make(kind: str, n_slots: int, faults: FailNth | None = None, budget: int = 1 << 20) -> Rig:
    """A world for the script; checked after each request instead of after each step."""
    row_bytes, private_bytes = KINDS[kind]
    return Rig(
        check=False,
        row_bytes=row_bytes,
        private_bytes=private_bytes,
        n_slots=n_slots,
        n_ctx=128,
        n_ubatch=32,
        n_batch=64,
        chunk_rows=16,
        faults=faults,
        budget=budget,
        learned_min=8,
        learned_merge=4,
        grid_step=32,
        grid_end_margin=4,
    )


def attempt(rig: Rig, tokens: Tokens, stable: tuple[int, ...], verify: bool) -> Run:
    """A request that is tried again from the start when the backend fails while it computes."""
    while True:
        run = None
        try:
            run = rig.start(rig.view(tokens, stable))
            assert run is not None
            while not run.prefilled:
                rig.prefill(run)
        except BackendError:
            slot = 0 if run is None else run.slot
            rig.manager.fail_slot(slot, "in_doubt")
            rig.backend.abort_restore(slot)
            rig.slot_recipe[slot] = ()
            rig.settle()
            continue
        rig.finish(run)
        if verify:
            assert rig.manager.check() == []
            rig.verify(run.slot)
        return run


def play(rig: Rig, *, verify: bool = True) -> list[Run]:
    runs = []
    for tokens, stable in SCRIPT:
        runs.append(attempt(rig, tokens, stable, verify))
        try:
            rig.spill(64)
        except BackendError:
            rig.settle()
    return runs


def empty(rig: Rig) -> None:
    """Everything that is held can be given back, to the last byte."""
    table = rig.manager.tables
    for checkpoint in table.checkpoints.all():
        table.checkpoints.remove(checkpoint.id, "test")
    rig.settle()
    assert (table.ledger.used_bytes, len(table.chunks), table.buffers.in_use(), rig.pool) == (0, 0, {}, {})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_slots", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "op",
    ["rows_out", "private_out", "load_rows", "load_private", "finish_restore", "begin_restore", "truncate", "decode"],
)
def test_the_nth_call_fails(kind: str, n_slots: int, op: str) -> None:
    if kind == "rows" and op in ("private_out", "load_private"):
        pytest.skip("a memory without private state never makes this call")
    nth, fired = 0, True
    while fired:
        nth += 1
        faults = FailNth(nth, [op])
        rig = make(kind, n_slots, faults)
        play(rig)
        fired = faults.fired is not None
        assert rig.manager.off is None
        play(rig, verify=False)
        again = play(rig, verify=False)
        assert all(run.admission.source is not ReuseSource.NONE for run in again), "trying again works"
        empty(rig)
    assert nth > 1, f"the script never calls {op}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_nth_allocation_fails(kind: str) -> None:
    nth, fired = 0, True
    while fired:
        nth += 1
        rig = make(kind, 1)
        faults = FailNth(nth)

        def buffer(name: int, rig: Rig = rig, faults: FailNth = faults, get: object = rig.buffer) -> object:
            if name not in rig.pool and faults.hit("alloc"):
                raise BackendError("no memory")
            return get(name)  # type: ignore[operator]

        rig.tolerant = True
        rig.buffer = buffer  # type: ignore[method-assign, assignment]
        play(rig)
        fired = faults.fired is not None
        play(rig)
        assert all(run.admission.source is not ReuseSource.NONE for run in play(rig))
        empty(rig)
    assert nth > 10


@pytest.mark.parametrize("kind", KINDS)
def test_the_nth_reservation_is_short(kind: str) -> None:
    nth, fired = 0, True
    while fired:
        nth += 1
        rig = make(kind, 2)
        ledger, faults = rig.manager.tables.ledger, FailNth(nth)
        real = ledger.reserve

        def reserve(n_bytes: int, faults: FailNth = faults, real: object = real) -> Reservation | Shortfall:
            if faults.hit("reserve"):
                return Shortfall(n_bytes, 0, 0)
            return real(n_bytes)  # type: ignore[operator, no-any-return]

        ledger.reserve = reserve  # type: ignore[method-assign]
        play(rig)
        fired = faults.fired is not None
        assert rig.manager.off is None, "a shortfall is a value"
        assert all(run.admission.source is not ReuseSource.NONE for run in play(rig))
        empty(rig)
    assert nth > 3


@pytest.mark.parametrize("budget", range(200, 12_000, 1900))
def test_every_budget_is_kept(budget: int) -> None:
    for kind in KINDS:
        rig = make(kind, 1, budget=budget)
        play(rig)
        play(rig)
        stats = rig.manager.stats()
        assert stats.peak_bytes <= budget and stats.off is None
        assert sum(len(b) for b in rig.pool.values()) <= budget, "memory in use never exceeds what was promised"
        empty(rig)


def test_a_refused_capture_evicts_nothing() -> None:
    """Optional captures spare other families' last copies: too little is left, so nothing goes."""
    rig = Rig(n_ctx=512, budget=6_500, grid_max=0)
    rig.ask(text(100, 1))
    rig.ask(text(100, 2))
    before = [c.id for c in rig.manager.tables.checkpoints.all()]
    run = rig.start(rig.view(text(120, 3)))
    assert run is not None
    rig.decode({0: run.prompt.tokens})
    refused = rig.manager.reserve_capture(run.admission.lease, CapturePoint(120, Origin.GRID, required=False))
    assert isinstance(refused, CaptureRefused) and refused.reason == "no_room"
    assert [c.id for c in rig.manager.tables.checkpoints.all()] == before
    wanted = rig.manager.reserve_capture(run.admission.lease, CapturePoint(120, Origin.PROMPT, required=True))
    assert isinstance(wanted, CaptureTicket), "a required one takes the place of the least recently used"
    assert [c.id for c in rig.manager.tables.checkpoints.all()] == before[1:]


def test_stale_leases_are_refused_everywhere() -> None:
    rig = Rig(n_ctx=512, grid_max=0)
    old = rig.ask(text(100, 1)).admission
    run = rig.start(rig.view(text(80, 2)))
    assert run is not None and run.admission.lease.slot == old.lease.slot
    rig.decode({0: text(80, 2)})
    manager, events = rig.manager, len(rig.events)
    manager.extend(old.lease, text(5))
    manager.preserved(old.lease, old.preserve)
    manager.abandon(old, "late")
    manager.release(old.lease)
    assert not manager.ready(old)
    assert manager.fail_slot(old.lease, "late") == ()
    refused = manager.reserve_capture(old.lease, CapturePoint(80, Origin.PROMPT, True))
    assert isinstance(refused, CaptureRefused) and refused.reason == "stale_lease"
    assert manager.plan_captures(old.lease, rig.view(text(80, 2)), 0, 64) == ()
    assert len(rig.events) == events and manager.check() == []
    slot = manager.tables.slots[0]
    assert slot.n_tokens == 80 and manager.tables.slots.leased(run.admission.lease) is slot
    assert manager.tables.slots.leased(Lease(7, 1)) is None


def test_a_late_copy_does_not_count() -> None:
    """A spill whose slot was taken meanwhile: the rows were preserved by the admission, or are lost."""
    rig = Rig(n_ctx=512, grid_max=0)
    rig.ask(text(100, 1))
    late = rig.manager.plan_spill(1000)
    assert late
    rig.ask(text(90, 2))
    rig.manager.preserve_done(late)
    assert rig.manager.check() == []
    run = rig.ask(join(text(100, 1), text(5, 3)))
    assert run.admission.n_reused == 100
    rig.verify(run.slot)


def test_rows_that_were_not_preserved_take_their_checkpoints_along() -> None:
    rig = Rig(n_ctx=512, grid_max=0)
    rig.ask(text(100, 1))
    view = rig.view(text(90, 2))
    admission = rig.manager.acquire(view, rig.manager.lookup(view))
    assert admission is not None and admission.preserve
    assert rig.manager.ready(admission), "the request runs"
    assert [e.reason for e in rig.of_kind(EventKind.REMOVE)] == ["not_preserved"]
    assert rig.manager.check() == []
    rig.manager.release(admission.lease)
    assert rig.manager.lookup(rig.view(join(text(100, 1), text(5, 3)))).best is None


def test_a_broken_invariant_latches_the_cache_off_and_requests_go_cold(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(n_ctx=512, n_slots=2, grid_max=0)
    rig.ask(text(100, 1))
    rig._check, rig.tolerant = False, True
    run = rig.start(rig.view(join(text(100, 1), text(20, 2))))
    assert run is not None
    monkeypatch.setattr(rig.manager.tables.index, "lookup", lambda prompt: 1 // 0)
    monkeypatch.setattr(manager_module._logger, "propagate", True)
    for seed in (3, 4):
        cold = rig.start(rig.view(join(text(100, 1), text(20, seed))))
        if cold is None:
            break
        assert cold.admission.source is ReuseSource.NONE
        while not cold.prefilled:
            rig.prefill(cold)
        reference = Rig(n_slots=2)
        reference.backend.decode([Span(cold.slot, cold.prompt.tokens, True)])
        assert np.array_equal(state_of(rig.backend, cold.slot), state_of(reference.backend, cold.slot))
        rig.finish(cold)
    assert rig.manager.off is not None and "ZeroDivisionError" in rig.manager.off
    assert [e.kind for e in rig.events].count(EventKind.LATCH) == 1
    assert "broken" not in rig.manager.check()[0] and rig.manager.check() != []
    assert any(record.levelname == "CRITICAL" for record in caplog.records), "said loudly"
    refused = rig.manager.reserve_capture(run.admission.lease, CapturePoint(1, Origin.PROMPT, True))
    assert isinstance(refused, CaptureRefused) and refused.reason == "disabled"
    rig.finish(run)
    assert all(slot.state == "idle" for slot in rig.manager.tables.slots)


def test_a_cache_that_is_disabled_still_leases_slots() -> None:
    rig = Rig(n_ctx=512, grid_max=0)
    rig.manager.off = "disabled"
    for _ in range(2):
        run = rig.ask(text(100, 1))
        assert run.admission.source is ReuseSource.NONE and run.captured == []
    assert rig.manager.check() == [] and rig.events == []


def test_without_a_ram_tier_live_frontiers_still_continue() -> None:
    rig = Rig(ram=False, n_slots=2)
    rig.ask(text(100, 1), reply=text(5, 2))
    run = rig.ask(join(text(100, 1), text(5, 2), text(30, 3)))
    assert (run.admission.source, run.admission.n_reused, run.captured) == (ReuseSource.LIVE, 105, [])
    rig.verify(run.slot)


def test_the_source_of_a_restore_fails_meanwhile() -> None:
    """Rows read out of another slot, which turns out to be in doubt before the restore is done."""
    rig = Rig(n_ctx=512, n_slots=2, grid_max=0, learned_min=100)
    a = text(200, 1)
    rig.ask(a)
    live = rig.start(rig.view(join(a, text(20, 2))))
    assert live is not None and live.slot == 0
    got = rig.acquire(rig.view(join(a, text(20, 3))))
    assert got is not None
    plan = got[2].restore
    assert plan is not None and {p.source.slot for p in plan.pieces if isinstance(p.source, FromSlot)} == {0}
    gone = rig.manager.fail_slot(live.admission.lease, "in_doubt")
    assert plan.checkpoint in gone
    rig.settle()
    named = {p.source.buffer for p in plan.pieces if isinstance(p.source, FromBuffer)} | {plan.private}
    assert named <= rig.pool.keys(), "what the plan names lives until the plan has ended"
    assert not rig.manager.ready(got[2])
    rig.backend.abort_restore(1)
    rig.settle()
    assert not named & rig.pool.keys()
    assert rig.manager.tables.slots[1].n_tokens == 0
    assert rig.manager.tables.slots.leased(got[2].lease) is not None, "the request goes cold in the same lease"
    assert rig.manager.lookup(rig.view(join(a, text(20, 4)))).best is None


def test_a_checkpoint_evicted_while_its_rows_are_being_preserved() -> None:
    rig = Rig(n_ctx=512, n_slots=2, grid_max=0)
    rig.ask(text(200, 1))
    second = rig.acquire(rig.view(text(100, 2)))
    first = rig.acquire(rig.view(text(90, 3)))
    assert first is not None and second is not None
    assert (first[2].lease.slot, len(first[2].preserve)) == (0, 12)
    table = rig.manager.tables.checkpoints
    for checkpoint in table.all():
        table.remove(checkpoint.id, "test")
    rig.settle()
    rig.preserve(first[2].preserve)
    rig.manager.preserved(first[2].lease, first[2].preserve)
    rig.settle()
    for each in (first, second):
        run = rig.carry_out(*each)
        while not run.prefilled:
            rig.prefill(run)
        rig.finish(run)
        rig.verify(run.slot)
    assert all(c.refs > 0 for c in rig.manager.tables.chunks.all())
