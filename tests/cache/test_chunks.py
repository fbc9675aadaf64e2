"""Chunks against a slow model of bytes: provenance, homes, endangered rows, the last reference.

The model writes a unique stamp for every computed run of rows.  A chunk remembers its stamp, a slot
is a list of stamps, backing memory holds stamps.  If the table ever says that a slot or a buffer
holds a chunk whose stamp is not there, sharing is wrong.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gufo_gguf.cache.buffers import Buffers
from gufo_gguf.cache.chunks import ChunkTable, Maker, Residence
from gufo_gguf.cache.ledger import Account, Ledger, Reservation
from gufo_gguf.cache.types import BufferId, ChunkId

ROWS, BYTES, N_SLOTS, DEPTH = 4, 32, 3, 6


class ChunkMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(1 << 20)
        self.buffers = Buffers()
        self.table = ChunkTable(N_SLOTS, ROWS, BYTES, self.ledger, self.buffers)
        self.slots: list[list[int]] = [[] for _ in range(N_SLOTS)]
        """Stamps of the full runs of rows in each slot."""
        self.backing: dict[BufferId, int] = {}
        self.stamp_of: dict[ChunkId, int] = {}
        self.holders: list[tuple[ChunkId, ...]] = []
        """Chunks that each retained checkpoint references."""
        self.next_stamp = 1

    @rule(slot=st.integers(0, N_SLOTS - 1), n=st.integers(1, 3))
    def compute(self, slot: int, n: int) -> None:
        for _ in range(min(n, DEPTH - len(self.slots[slot]))):
            self.slots[slot].append(self.next_stamp)
            self.next_stamp += 1

    @rule(data=st.data(), slot=st.integers(0, N_SLOTS - 1))
    def capture(self, data: Any, slot: int) -> None:
        depth = data.draw(st.integers(0, len(self.slots[slot])))
        known = [self.table.at(slot, i) for i in range(depth)]
        self.table.ref(c for c in known if c is not None)
        reservation = self.ledger.reserve(known.count(None) * BYTES)
        assert isinstance(reservation, Reservation)
        chunks = []
        for i, chunk in enumerate(known):
            if chunk is None:
                chunk = self.table.borrow(slot, i, Maker(slot, 1, self.next_stamp), reservation).id
                self.stamp_of[chunk] = self.slots[slot][i]
            chunks.append(chunk)
        self.ledger.close(reservation)
        self.holders.append(tuple(chunks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        gone = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        last = {c for c in gone if not any(c in h for h in self.holders)}
        assert self.table.unref(gone) == len(last) * BYTES
        for chunk in gone:
            assert (chunk in self.table) == (chunk not in last), "freed with the last reference, not before"

    @rule(slot=st.integers(0, N_SLOTS - 1), keep=st.integers(0, DEPTH * ROWS), preserve=st.booleans())
    def overwrite(self, slot: int, keep: int, preserve: bool) -> None:
        """Everything from row ``keep`` on goes, with or without copying what exists nowhere else."""
        endangered = self.table.endangered(slot, keep)
        expected = [
            c
            for i, c in enumerate(self.table.row_map(slot))
            if c is not None
            and (i + 1) * ROWS > keep
            and self.table.get(c).residence is Residence.BORROWED
            and not any(self.table.at(other, i) == c for other in range(N_SLOTS) if other != slot)
        ]
        assert [c.id for c in endangered] == expected
        self.table.leave_safe(slot, keep)
        if preserve:
            for chunk in endangered:
                self.backing[chunk.buffer] = self.slots[slot][chunk.index]
                self.table.mark_resident(chunk.id)
        lost = self.table.leave(slot, keep)
        assert lost == ([] if preserve else expected)
        for chunk_id in lost:
            for holder in [h for h in self.holders if chunk_id in h]:
                self.holders.remove(holder)
                self.table.unref(holder)
        del self.slots[slot][keep // ROWS :]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), slot=st.integers(0, N_SLOTS - 1))
    def restore(self, data: Any, slot: int) -> None:
        chunks = data.draw(st.sampled_from(self.holders))
        kept = self.table.shared_prefix(slot, chunks)
        assert kept == next((i for i, c in enumerate(chunks) if self.table.at(slot, i) != c), len(chunks))
        self.overwrite(slot, kept * ROWS, preserve=True)
        rows = []
        for i, chunk_id in enumerate(chunks):
            chunk = self.table.get(chunk_id)
            if i < kept:
                rows.append(self.slots[slot][i])
            elif chunk.residence is Residence.RESIDENT:
                rows.append(self.backing[chunk.buffer])
            else:
                rows.append(self.slots[min(chunk.homes)][i])
        self.slots[slot] = rows
        self.table.inherit(slot, chunks)

    @rule(slot=st.integers(0, N_SLOTS - 1), n=st.integers(1, 4))
    def spill(self, slot: int, n: int) -> None:
        for chunk in self.table.borrowed_in(slot)[:n]:
            self.backing[chunk.buffer] = self.slots[slot][chunk.index]
            self.table.mark_resident(chunk.id)

    @invariant()
    def bytes_are_where_the_table_says(self) -> None:
        referenced = {c for h in self.holders for c in h}
        assert referenced == {c.id for c in self.table.all()}
        for chunk in self.table.all():
            stamp = self.stamp_of[chunk.id]
            assert chunk.refs == sum(h.count(chunk.id) for h in self.holders)
            for home in chunk.homes:
                assert self.slots[home][chunk.index] == stamp
            if chunk.residence is Residence.RESIDENT:
                assert self.backing[chunk.buffer] == stamp
            else:
                assert chunk.homes, "a chunk that lies nowhere"
        for slot in range(N_SLOTS):
            for i, chunk_id in enumerate(self.table.row_map(slot)):
                assert chunk_id is None or slot in self.table.get(chunk_id).homes
                assert chunk_id is None or self.table.get(chunk_id).index == i
        assert self.ledger.held_on(Account.CHUNKS) == len(self.table) * BYTES == self.ledger.used_bytes
        assert len(self.buffers.in_use()) == len(self.table)


TestChunks = ChunkMachine.TestCase
TestChunks.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
