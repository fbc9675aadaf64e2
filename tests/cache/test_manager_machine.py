"""The manager as a whole under random requests, edits, forks, cancels, failures and spills.

The model is the oracle of ``rig.py``: whatever a slot holds must be byte for byte what its recipe
of passes and cuts gives on a fresh backend.  ``check()`` must be empty after each step, and the
fake refuses every restore whose rows and private state do not belong together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gufo_gguf.cache.events import EventKind, decode, encode
from gufo_gguf.cache.replay import Replay
from gufo_gguf.cache.types import (
    CapturePoint,
    CaptureTicket,
    InputMark,
    MissReason,
    Origin,
    PromptView,
    ReuseSource,
    Tokens,
)
from tests.cache.rig import Rig, Run, join, mark, text

KINDS = {"hybrid": (24, 64), "rows": (24, 0), "recurrent": (0, 64)}
STEPS = settings(max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
N_CTX = 160


class ManagerMachine(RuleBasedStateMachine):
    kind = "hybrid"

    @initialize(
        n_slots=st.integers(1, 3),
        budget=st.sampled_from([1 << 20, 1 << 20, 16_000, 8_000, 4_000, 2_000, 700, 0]),
        max_checkpoints=st.sampled_from([128, 128, 3, 1]),
    )
    def setup(self, n_slots: int, budget: int, max_checkpoints: int) -> None:
        row_bytes, private_bytes = KINDS[self.kind]
        self.rig = Rig(
            row_bytes=row_bytes,
            private_bytes=private_bytes,
            chunk_rows=8,
            budget=budget,
            n_slots=n_slots,
            n_ctx=N_CTX,
            n_ubatch=16,
            n_batch=32,
            max_checkpoints=max_checkpoints,
            grid_step=16,
            grid_end_margin=4,
            learned_min=12,
            learned_merge=4,
        )
        self.runs: list[Run] = []
        self.histories: list[tuple[Tokens, tuple[InputMark, ...]]] = [(text(40, 1), ())]
        self.counter = 100

    def fresh(self, n: int) -> Tokens:
        self.counter += 1
        return text(n, self.counter)

    def view(self, data: Any, history: Tokens, inputs: tuple[InputMark, ...]) -> PromptView:
        history = history[: N_CTX - 20]
        n = len(history)
        stable = tuple(sorted({b for b in (n - 6, n - 2) if b > 0})) if data.draw(st.booleans()) else ()
        if data.draw(st.integers(0, 9)) == 9:
            inputs = (*inputs, mark(data.draw(st.integers(0, n)), "an image"))
        mode = data.draw(st.integers(0, 11))
        read, write = mode != 10, mode < 10
        return self.rig.view(history, stable, inputs=inputs, read=read, write=write)

    def start(self, data: Any) -> Run | None:
        run = self.rig.start(self.view(data, *self.next_prompt(data)))
        if run is None:
            assert len(self.runs) == len(self.rig.manager.tables.slots), "a request waits although a slot is free"
            return None
        return self.opened(run)

    def opened(self, run: Run) -> Run:
        assert run.prompt.read or run.admission.source is ReuseSource.NONE
        self.rig.verify(run.slot)
        self.histories.append((run.prompt.tokens, run.prompt.inputs))
        self.runs.append(run)
        return run

    def close(self, run: Run) -> None:
        self.runs.remove(run)
        self.rig.finish(run)
        self.rig.verify(run.slot)
        slot = self.rig.manager.tables.slots[run.slot]
        if slot.indexed:
            self.histories.append((np.array(slot.history.view()), slot.inputs))

    def next_prompt(self, data: Any) -> tuple[Tokens, tuple[InputMark, ...]]:
        history, inputs = data.draw(st.sampled_from(self.histories[-12:]))
        kind = data.draw(st.sampled_from(["turn", "edit", "resend", "new"]))
        if kind == "turn":
            return join(history, self.fresh(data.draw(st.integers(1, 30)))), inputs
        if kind == "edit":
            kept = data.draw(st.integers(1, len(history)))
            inputs = tuple(m for m in inputs if m.position < kept)
            return join(history[:kept], self.fresh(data.draw(st.integers(1, 40)))), inputs
        return (history, inputs) if kind == "resend" else (self.fresh(data.draw(st.integers(1, 60))), ())

    # -- requests --------------------------------------------------------------------------------
    @rule(data=st.data(), passes=st.sampled_from([99, 99, 99, 2, 1, 0]), reply=st.integers(0, 12))
    def whole_request(self, data: Any, passes: int, reply: int) -> None:
        """A request from start to end, or cancelled after a few passes."""
        run = self.start(data)
        if run is None:
            return
        while not run.prefilled and passes:
            self.rig.prefill(run)
            passes -= 1
        if run.prefilled:
            self.rig.generate(run, self.fresh(reply))
        self.close(run)

    @rule(data=st.data())
    def open_request(self, data: Any) -> None:
        """A request that stays in its slot while others come and go."""
        self.start(data)

    @rule(data=st.data(), in_order=st.booleans(), slot_fails=st.booleans())
    def two_at_once(self, data: Any, in_order: bool, slot_fails: bool) -> None:
        """Two admissions open at the same time, carried out in either order; a slot may fail between."""
        both = [self.rig.acquire(self.view(data, *self.next_prompt(data))) for _ in range(2)]
        if slot_fails and self.runs:
            run = self.runs.pop(data.draw(st.integers(0, len(self.runs) - 1)))
            self.rig.manager.fail_slot(run.admission.lease, "in_doubt")
            self.lose(run.slot)
            self.rig.tolerant = True  # the slot may have been the source of a restore
        self.rig.spill(8)
        for got in both if in_order else reversed(both):
            if got is not None:
                self.opened(self.rig.carry_out(*got))
        self.rig.tolerant = False

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), limit=st.sampled_from([1000, 7, 1]))
    def joint_pass(self, data: Any, limit: int) -> None:
        """One pass of some of the open requests together: the rest of a prefill, or one token each."""
        chosen = [r for r in self.runs if data.draw(st.booleans())] or self.runs[:1]
        todo = [r for r in chosen if not r.prefilled]
        if todo:
            self.rig.prefill(*todo, limit=min(limit, 32 // len(todo)))
        else:
            self.rig.decode({r.slot: self.fresh(1) for r in chosen if r.position < N_CTX - 8})
            for r in chosen:
                r.position += r.position < N_CTX - 8

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def close_request(self, data: Any) -> None:
        self.close(self.runs[data.draw(st.integers(0, len(self.runs) - 1))])

    @rule(max_rows=st.sampled_from([1, 20, 1000]))
    def spill(self, max_rows: int) -> None:
        self.rig.spill(max_rows)

    @rule(data=st.data(), evict=st.booleans())
    def write_to_disk(self, data: Any, evict: bool) -> None:
        retained = self.rig.manager.tables.checkpoints.all()
        if retained:
            chosen = retained[-1 - data.draw(st.integers(0, len(retained) - 1))].id
            self.rig.persist(chosen)
            if evict:
                self.rig.manager.tables.checkpoints.remove(chosen, "test", ghost=MissReason.EVICTED)

    @precondition(lambda self: self.rig.disk)
    @rule(data=st.data(), damaged=st.booleans())
    def gone_from_disk(self, data: Any, damaged: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.rig.disk)))
        del self.rig.disk[number]
        self.rig.manager.durable.remove(number, MissReason.QUARANTINED if damaged else MissReason.EVICTED)

    # -- trouble ---------------------------------------------------------------------------------
    def lose(self, slot: int) -> None:
        self.rig.backend.abort_restore(slot)
        self.rig.slot_recipe[slot] = ()

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), by_number=st.booleans())
    def slot_fails(self, data: Any, by_number: bool) -> None:
        run = self.runs.pop(data.draw(st.integers(0, len(self.runs) - 1)))
        self.rig.manager.fail_slot(run.slot if by_number else run.admission.lease, "in_doubt")
        self.lose(run.slot)
        self.rig.manager.release(run.admission.lease)  # late: refused

    @rule(data=st.data(), quarantine=st.booleans(), preserve=st.booleans())
    def restore_fails(self, data: Any, quarantine: bool, preserve: bool) -> None:
        """An admission that is given up before or after its preservation."""
        manager = self.rig.manager
        tokens, inputs = self.next_prompt(data)
        view = self.rig.view(tokens[: N_CTX - 20], inputs=inputs)
        admission = manager.acquire(view, manager.lookup(view))
        if admission is None:
            return
        if preserve:
            self.rig.preserve(admission.preserve)
            manager.preserved(admission.lease, admission.preserve)
        assert manager.check() == []
        manager.abandon(admission, "in_doubt", quarantine=quarantine)
        assert not manager.ready(admission), "an abandoned admission cannot become ready"
        self.lose(admission.lease.slot)
        manager.release(admission.lease)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), slot_fails=st.booleans())
    def capture_fails(self, data: Any, slot_fails: bool) -> None:
        """A reserved capture that is abandoned, or whose slot fails before the commit."""
        manager = self.rig.manager
        run = self.runs[data.draw(st.integers(0, len(self.runs) - 1))]
        n = manager.tables.slots[run.slot].n_tokens
        ticket = manager.reserve_capture(run.admission.lease, CapturePoint(n, Origin.FRONTIER, required=True))
        if not isinstance(ticket, CaptureTicket):
            return
        assert manager.check() == []
        if slot_fails:
            manager.fail_slot(run.admission.lease, "in_doubt")
            self.lose(run.slot)
            self.runs.remove(run)
        manager.abandon_capture(ticket, "in_doubt")
        manager.abandon_capture(ticket, "twice")
        assert not manager.commit_capture(ticket)

    # -- always ----------------------------------------------------------------------------------
    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.settle()
        stats = self.rig.manager.stats()
        assert stats.off is None
        assert stats.used_bytes <= stats.budget_bytes and stats.peak_bytes <= stats.budget_bytes
        assert self.rig.pool.keys() <= self.rig.manager.tables.buffers.in_use().keys()
        # Rows that a plan forgot to preserve would be lost in silence.
        assert not [e for e in self.rig.of_kind(EventKind.REMOVE) if e.reason == "not_preserved"]

    def teardown(self) -> None:
        """The log alone rebuilds what is retained, and its sums are those of the tables."""
        if not hasattr(self, "rig"):
            return
        replay = Replay(decode(encode(event)) for event in self.rig.events)
        retained = self.rig.manager.tables.checkpoints
        rebuilt = {(r.checkpoint, r.boundary, r.last_use_seq) for r in replay.retained().values()}
        assert rebuilt == {(c.id, c.n_tokens, c.last_use_seq) for c in retained.all()}
        assert replay.total_bytes() == retained.unique_bytes


class HybridMachine(ManagerMachine):
    kind = "hybrid"


class RowsOnlyMachine(ManagerMachine):
    kind = "rows"


class RecurrentMachine(ManagerMachine):
    kind = "recurrent"


class LongHybrid(HybridMachine):
    """The same under the slow mark, much longer."""


class LongRowsOnly(RowsOnlyMachine):
    pass


class LongRecurrent(RecurrentMachine):
    pass


TestHybrid = HybridMachine.TestCase
TestHybrid.settings = STEPS
TestRowsOnly = RowsOnlyMachine.TestCase
TestRowsOnly.settings = STEPS
TestRecurrent = RecurrentMachine.TestCase
TestRecurrent.settings = STEPS
LONG = settings(STEPS, max_examples=1000, stateful_step_count=60)
TestLongHybrid = pytest.mark.long(LongHybrid.TestCase)
TestLongHybrid.settings = LONG
TestLongRowsOnly = pytest.mark.long(LongRowsOnly.TestCase)
TestLongRowsOnly.settings = LONG
TestLongRecurrent = pytest.mark.long(LongRecurrent.TestCase)
TestLongRecurrent.settings = LONG
