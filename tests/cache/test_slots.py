"""Slots: leases and generations against a slow model, histories, and the order in which slots are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gufo_gguf.cache.slots import History, SlotOffer, mostly_kept, slot_rank
from gufo_gguf.cache.types import Admission, Lease, Tokens
from tests.cache.rig import Rig, join, text


class LeaseMachine(RuleBasedStateMachine):
    """The model: one token list per valid lease; every other lease ever given is refused everywhere."""

    @initialize(n_slots=st.integers(1, 3))
    def setup(self, n_slots: int) -> None:
        self.rig = Rig(n_slots=n_slots, n_ctx=512)
        self.valid: dict[Lease, list[int]] = {}
        self.open: dict[Lease, Admission] = {}
        """Acquired, not yet ready."""
        self.stale: list[Lease] = []
        self.counter = 0

    @property
    def manager(self) -> Any:
        return self.rig.manager

    @rule()
    def acquire(self) -> None:
        self.counter += 1
        view = self.rig.view(text(9, 1_000 + self.counter))  # begins like nothing that a slot was given
        admission = self.manager.acquire(view, self.manager.lookup(view))
        if len(self.valid) == len(self.manager.tables.slots):
            assert admission is None
            return
        assert admission.lease not in self.valid and admission.lease not in self.stale
        assert admission.lease.slot not in {lease.slot for lease in self.valid}
        self.valid[admission.lease] = []
        self.open[admission.lease] = admission

    @precondition(lambda self: self.open)
    @rule(give_up=st.booleans())
    def carried_out(self, give_up: bool) -> None:
        lease, admission = self.open.popitem()
        if give_up:
            self.manager.abandon(admission, "test")
            assert not self.manager.ready(admission)
        else:
            assert self.manager.ready(admission)
            assert not self.manager.ready(admission), "only once"
        self.manager.abandon(admission, "late")
        assert lease in self.valid

    @rule(data=st.data(), n=st.integers(1, 20))
    def extend(self, data: Any, n: int) -> None:
        leases = sorted([*self.valid, *self.stale], key=lambda lease: (lease.slot, lease.generation))
        if not leases:
            return
        lease = data.draw(st.sampled_from(leases))
        tokens = text(n, n)
        self.manager.extend(lease, tokens)
        if lease in self.valid and lease not in self.open:
            self.valid[lease] += tokens.tolist()

    @precondition(lambda self: self.valid)
    @rule(data=st.data(), fail=st.booleans())
    def end(self, data: Any, fail: bool) -> None:
        lease = data.draw(st.sampled_from(sorted(self.valid, key=lambda lease: lease.slot)))
        if fail:
            self.manager.fail_slot(lease, "test")
        else:
            self.manager.release(lease)
        del self.valid[lease]
        self.open.pop(lease, None)
        self.stale.append(lease)

    @precondition(lambda self: self.stale)
    @rule(data=st.data(), what=st.sampled_from(["release", "fail", "preserved"]))
    def late(self, data: Any, what: str) -> None:
        lease = data.draw(st.sampled_from(self.stale))
        if what == "release":
            self.manager.release(lease)
        elif what == "fail":
            assert self.manager.fail_slot(lease, "late") == ()
        else:
            self.manager.preserved(lease, ())

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "rig"):
            return
        assert self.manager.check() == []
        for lease, tokens in self.valid.items():
            slot = self.manager.tables.slots.leased(lease)
            assert slot is not None
            if lease not in self.open:
                assert slot.history.view().tolist() == tokens
        for lease in self.stale:
            assert self.manager.tables.slots.leased(lease) is None


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_views_of_a_history_never_change() -> None:
    history = History()
    seen: list[tuple[Tokens, list[int]]] = []
    for i in range(40):
        history.append(text(i * 3, i))
        seen.append((history.view(), history.view().tolist()))
    fork = History(history.view(100))
    fork.append(text(50, 99))
    history.append(text(500, 98))
    for view, tokens in seen:
        assert view.tolist() == tokens
        assert not view.flags.writeable
    assert np.array_equal(fork.view(100), history.view(100))


def offer(
    slot: int, n_tokens: int = 0, keep: int = 0, endangered: int = 0, used: int = 0, old: bool = False
) -> SlotOffer:
    return SlotOffer(slot, n_tokens, keep, endangered, used, superseded=old)


def test_the_order_in_which_slots_are_taken_is_one_list() -> None:
    offers = {
        "a reply that the client changed": offer(8, 10_000, keep=5_000, endangered=600, used=98, old=True),
        "its own rows and little else": offer(5, 10_000, keep=9_000, endangered=600, used=99),
        "empty": offer(4),
        "empty, higher number": offer(6),
        "preserved, used long ago": offer(3, 8_000, used=10),
        "preserved, a parent that forked early": offer(7, 10_000, keep=6_000, used=15),
        "preserved, used lately": offer(2, 8_000, used=20),
        "borrowed, used long ago": offer(1, 8_000, endangered=256, used=5),
        "borrowed, used lately": offer(0, 8_000, endangered=256, used=30),
    }
    assert sorted(offers, key=lambda name: slot_rank(offers[name])) == list(offers)


def test_mostly_kept() -> None:
    assert mostly_kept(95_000, 97_000), "an edit of the last turn"
    assert mostly_kept(6_000, 6_000)
    assert not mostly_kept(6_000, 10_000), "a subagent off its parent"
    assert not mostly_kept(0, 0)


def test_a_fork_takes_an_empty_slot_and_an_edit_its_own() -> None:
    rig = Rig(n_slots=2, learned_min=100)
    system = text(400, 1)
    parent = join(system, text(400, 2))
    rig.ask(parent, (790,))
    rig.ask(join(system, text(10, 3)))  # shows the divergence at 400 and captures there
    fork = rig.ask(join(system, text(10, 4)))
    assert (fork.admission.n_reused, fork.slot) == (400, 1), "the parent's long history lives on in slot 0"
    edit = rig.ask(join(parent[:790], text(30, 5)))
    assert (edit.admission.n_reused, edit.slot) == (790, 0), "the rows are in place there"
    assert edit.admission.restore is not None and edit.admission.restore.keep_rows == 784


def test_requests_wait_while_every_slot_runs() -> None:
    rig = Rig(n_slots=2)
    runs = [rig.start(rig.view(text(20, i))) for i in (1, 2)]
    assert rig.start(rig.view(text(20, 3))) is None
    assert runs[1] is not None
    rig.prefill(runs[1])
    rig.finish(runs[1])
    third = rig.start(rig.view(text(20, 3)))
    assert third is not None and third.slot == 1
