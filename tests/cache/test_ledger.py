"""The ledger against a slow model: nothing is promised twice, nothing stays behind."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from gufo_gguf.cache.ledger import Account, InvariantBroken, Ledger, Reservation, Shortfall


class LedgerMachine(RuleBasedStateMachine):
    """The model is a list of live objects (account, bytes) and a list of open promises."""

    reservations = Bundle("reservations")

    @initialize(budget=st.integers(0, 500))
    def setup(self, budget: int) -> None:
        self.ledger = Ledger(budget)
        self.objects: list[tuple[Account, int]] = []
        self.promised: dict[int, int] = {}
        self.peak = 0

    def used(self) -> int:
        return sum(n for _, n in self.objects) + sum(self.promised.values())

    @rule(target=reservations, n_bytes=st.integers(0, 200))
    def reserve(self, n_bytes: int) -> Reservation | Shortfall:
        free = self.ledger.budget_bytes - self.used()
        got = self.ledger.reserve(n_bytes)
        if n_bytes > free:
            assert got == Shortfall(n_bytes, free, self.ledger.budget_bytes)
        else:
            assert isinstance(got, Reservation)
            self.promised[got.number] = n_bytes
            self.peak = max(self.peak, self.used())
        return got

    @rule(reservation=reservations, account=st.sampled_from(Account), share=st.floats(0, 1.5))
    def hold(self, reservation: Reservation | Shortfall, account: Account, share: float) -> None:
        if isinstance(reservation, Shortfall):
            return
        n_bytes = int(share * reservation.left_bytes) + (share > 1)
        if reservation.number not in self.promised or n_bytes > self.promised[reservation.number]:
            with pytest.raises(InvariantBroken):
                self.ledger.hold(reservation, account, n_bytes)
            return
        self.ledger.hold(reservation, account, n_bytes)
        self.promised[reservation.number] -= n_bytes
        self.objects.append((account, n_bytes))

    @rule(reservation=consumes(reservations))
    def close(self, reservation: Reservation | Shortfall) -> None:
        if isinstance(reservation, Reservation):
            self.ledger.close(reservation)
            del self.promised[reservation.number]
            with pytest.raises(InvariantBroken):
                self.ledger.close(reservation)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.objects:
            account, n_bytes = self.objects.pop(data.draw(st.integers(0, len(self.objects) - 1)))
            self.ledger.release(account, n_bytes)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for account in Account:
            assert self.ledger.held_on(account) == sum(n for a, n in self.objects if a is account)
        assert self.ledger.used_bytes == self.used() <= self.ledger.budget_bytes
        assert self.ledger.free_bytes == self.ledger.budget_bytes - self.used()
        assert self.ledger.peak_bytes == self.peak
        assert self.ledger.open_reservations() == len(self.promised)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_releasing_more_than_is_held_is_a_broken_invariant() -> None:
    ledger = Ledger(100)
    got = ledger.reserve(10)
    assert isinstance(got, Reservation)
    ledger.hold(got, Account.TAIL, 10)
    with pytest.raises(InvariantBroken, match="11 bytes released of 10"):
        ledger.release(Account.TAIL, 11)
    with pytest.raises(InvariantBroken):
        ledger.release(Account.PRIVATE, 1)
