"""Byte accounting: every byte of the RAM tier is promised before it is used, and counted once.

    reserve(n) -> Reservation | Shortfall      a promise, or both sizes of what is missing
    hold(reservation, account, n)              part of the promise now belongs to an object
    close(reservation)                         what was not held goes back
    release(account, n)                        an object is gone

The ledger knows no objects: chunks, private states, tails and logits are held by whoever makes
them, and ``check.py`` recounts the objects against the accounts.  A borrowed chunk is held like a
resident one: its backing memory is reserved at admission, so that preserving it later never has to
allocate.

Rejected: evicting from inside ``reserve``.  Policy would hide in the accounting, and a refused
capture could not say what it would have taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class InvariantBroken(Exception):
    """The cache's tables contradict each other.  ``CacheManager`` catches it and latches the cache off."""


class Account(StrEnum):
    CHUNKS = "chunks"
    PRIVATE = "private"
    TAIL = "tail"
    LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class Shortfall:
    need_bytes: int
    free_bytes: int
    budget_bytes: int


@dataclass(slots=True)
class Reservation:
    """A promise of ``left_bytes``, shrinking as parts of it are held."""

    number: int
    left_bytes: int


class Ledger:
    """used = held + reserved <= budget, at any time."""

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"a budget of {budget_bytes} bytes")
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0
        self._held: dict[Account, int] = dict.fromkeys(Account, 0)
        self._open: dict[int, Reservation] = {}
        self._next = 1

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    @property
    def reserved_bytes(self) -> int:
        return sum(r.left_bytes for r in self._open.values())

    @property
    def used_bytes(self) -> int:
        return self.held_bytes + self.reserved_bytes

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes

    def held_on(self, account: Account) -> int:
        return self._held[account]

    def reserve(self, n_bytes: int) -> Reservation | Shortfall:
        """Promise n_bytes, or say what is missing; nothing changes then."""
        if n_bytes < 0:
            raise InvariantBroken(f"reservation of {n_bytes} bytes")
        if n_bytes > self.free_bytes:
            return Shortfall(n_bytes, self.free_bytes, self.budget_bytes)
        reservation = Reservation(self._next, n_bytes)
        self._next += 1
        self._open[reservation.number] = reservation
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return reservation

    def hold(self, reservation: Reservation, account: Account, n_bytes: int) -> None:
        """Move part of a promise to an account."""
        if self._open.get(reservation.number) is not reservation:
            raise InvariantBroken(f"reservation {reservation.number} is not open")
        if not 0 <= n_bytes <= reservation.left_bytes:
            raise InvariantBroken(f"{n_bytes} bytes held of a reservation with {reservation.left_bytes} left")
        reservation.left_bytes -= n_bytes
        self._held[account] += n_bytes

    def close(self, reservation: Reservation) -> None:
        """Give back what was not held."""
        if self._open.pop(reservation.number, None) is not reservation:
            raise InvariantBroken(f"reservation {reservation.number} is closed twice")

    def release(self, account: Account, n_bytes: int) -> None:
        if not 0 <= n_bytes <= self._held[account]:
            raise InvariantBroken(f"{n_bytes} bytes released of {self._held[account]} on {account}")
        self._held[account] -= n_bytes

    def open_reservations(self) -> int:
        return len(self._open)
