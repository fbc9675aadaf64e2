"""Chunks: immutable runs of rows, shared by provenance, and where their bytes lie.

A chunk is rows [index * C, (index + 1) * C) of every append-only component, as one computation
wrote them.  Its bytes lie in backing memory (RESIDENT), or only in the slots that hold them by
computation or inheritance, its *homes* (BORROWED):

    slot 0   [ c1 )[ c2 )[ c3 )[ rows not in any checkpoint          row map of slot 0: c1 c2 c3
    slot 1   [ c1 )[ c2 )[ own rows ...                              row map of slot 1: c1 c2
    backing  [ c1 )                                                  c2: BORROWED, homes {0, 1}

One table holds both directions, chunk to homes and slot to row map, so that they cannot disagree.
A borrowed chunk whose last home is about to be overwritten is *endangered*: it must be copied
first.  If that failed it is LOST, and whoever references it has to go.  A chunk is freed with its
last reference, not with its last home.

Rejected: finding equal chunks by token hash (equal tokens are not equal bytes), and one home per
chunk (a copy could be saved whenever a second slot still holds the rows).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gufo_gguf.cache.buffers import Buffers
from gufo_gguf.cache.ledger import Account, InvariantBroken, Ledger, Reservation
from gufo_gguf.cache.types import BufferId, ChunkId


class Residence(StrEnum):
    BORROWED = "borrowed"
    RESIDENT = "resident"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Maker:
    """The computation that wrote a chunk: a slot in one generation, seen at a sequence number."""

    slot: int
    generation: int
    seq: int


@dataclass(slots=True)
class Chunk:
    id: ChunkId
    index: int
    """Covers rows [index * C, (index + 1) * C)."""
    buffer: BufferId
    """Reserved at admission, touched first when the chunk is preserved."""
    maker: Maker
    residence: Residence = Residence.BORROWED
    refs: int = 0
    """Checkpoints, open tickets and running preservations that need it."""
    homes: set[int] = field(default_factory=set)


class ChunkTable:
    """All chunks, and which of them each slot's rows are."""

    def __init__(self, n_slots: int, chunk_rows: int, chunk_bytes: int, ledger: Ledger, buffers: Buffers) -> None:
        self.chunk_rows = chunk_rows
        self.chunk_bytes = chunk_bytes
        self._ledger = ledger
        self._buffers = buffers
        self._chunks: dict[ChunkId, Chunk] = {}
        self._maps: list[list[ChunkId | None]] = [[] for _ in range(n_slots)]
        self._freed: list[ChunkId] = []
        self._next = 1

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._chunks

    def get(self, chunk: ChunkId) -> Chunk:
        found = self._chunks.get(chunk)
        if found is None:
            raise InvariantBroken(f"chunk {chunk} does not exist")
        return found

    def all(self) -> Iterable[Chunk]:
        return self._chunks.values()

    # -- life ------------------------------------------------------------------------------------
    def borrow(self, slot: int, index: int, maker: Maker, reservation: Reservation) -> Chunk:
        """A new chunk of rows that lie in ``slot``, with one reference; its backing is held from now on."""
        if self.at(slot, index) is not None:
            raise InvariantBroken(f"rows of chunk {index} in slot {slot} are already chunk {self.at(slot, index)}")
        self._ledger.hold(reservation, Account.CHUNKS, self.chunk_bytes)
        chunk = Chunk(ChunkId(self._next), index, self._buffers.new(self.chunk_bytes), maker, refs=1)
        self._next += 1
        self._chunks[chunk.id] = chunk
        self._enter(slot, index, chunk)
        return chunk

    def ref(self, chunks: Iterable[ChunkId]) -> None:
        for chunk in chunks:
            self.get(chunk).refs += 1

    def unref(self, chunks: Iterable[ChunkId]) -> int:
        """Drop one reference of each; returns the bytes of those that were the last."""
        freed = 0
        for chunk_id in chunks:
            chunk = self.get(chunk_id)
            if chunk.refs <= 0:
                raise InvariantBroken(f"chunk {chunk_id} has no reference to drop")
            chunk.refs -= 1
            if chunk.refs == 0:
                for slot in tuple(chunk.homes):
                    self._leave(slot, chunk)
                del self._chunks[chunk_id]
                self._freed.append(chunk_id)
                self._buffers.free(chunk.buffer)
                self._ledger.release(Account.CHUNKS, self.chunk_bytes)
                freed += self.chunk_bytes
        return freed

    def take_freed(self) -> list[ChunkId]:
        """Chunks that are gone for good; each is named once."""
        freed, self._freed = self._freed, []
        return freed

    def mark_resident(self, chunk_id: ChunkId) -> None:
        """The rows have been copied into the chunk's buffer."""
        chunk = self.get(chunk_id)
        if chunk.residence is not Residence.BORROWED:
            raise InvariantBroken(f"chunk {chunk_id} is {chunk.residence}; it cannot become resident")
        chunk.residence = Residence.RESIDENT

    # -- the slots' side -------------------------------------------------------------------------
    def row_map(self, slot: int) -> tuple[ChunkId | None, ...]:
        """Chunk i covers rows [i * C, (i + 1) * C) of what lies in the slot; None = no chunk yet."""
        return tuple(self._maps[slot])

    def at(self, slot: int, index: int) -> ChunkId | None:
        row_map = self._maps[slot]
        return row_map[index] if index < len(row_map) else None

    def shared_prefix(self, slot: int, chunks: Sequence[ChunkId]) -> int:
        """How many of these chunks, from the first on, are the slot's own rows."""
        n = 0
        for mine, theirs in zip(self._maps[slot], chunks, strict=False):
            if mine != theirs:
                break
            n += 1
        return n

    def endangered(self, slot: int, keep_rows: int) -> list[Chunk]:
        """Chunks beyond keep_rows that exist nowhere but in this slot, ascending: preserve them first."""
        return [
            chunk
            for chunk in self._beyond(slot, keep_rows)
            if chunk.residence is Residence.BORROWED and chunk.homes == {slot}
        ]

    def borrowed_in(self, slot: int) -> list[Chunk]:
        """Chunks without a copy in backing memory that this slot is a home of, ascending."""
        return [chunk for chunk in self._beyond(slot, 0) if chunk.residence is Residence.BORROWED]

    def inherit(self, slot: int, chunks: Sequence[ChunkId]) -> None:
        """The slot's rows [0, len(chunks) * C) are these chunks now (a restore was carried out)."""
        for index, chunk_id in enumerate(chunks):
            present = self.at(slot, index)
            if present == chunk_id:
                continue
            if present is not None:
                raise InvariantBroken(f"slot {slot}: rows of chunk {index} are {present}, not {chunk_id}")
            chunk = self.get(chunk_id)
            if chunk.index != index or chunk.residence is Residence.LOST:
                raise InvariantBroken(
                    f"slot {slot}: {chunk.residence} chunk {chunk_id} of place {chunk.index} at {index}"
                )
            self._enter(slot, index, chunk)

    def leave(self, slot: int, keep_rows: int) -> list[ChunkId]:
        """Rows from keep_rows on are gone from the slot; returns the chunks that are LOST with them."""
        lost: list[ChunkId] = []
        for chunk in list(self._beyond(slot, keep_rows)):
            self._leave(slot, chunk)
            if chunk.residence is Residence.BORROWED and not chunk.homes:
                chunk.residence = Residence.LOST
                lost.append(chunk.id)
        return lost

    def leave_safe(self, slot: int, keep_rows: int) -> None:
        """As ``leave``, but endangered chunks stay: their copy is planned and the rows are still there."""
        endangered = {chunk.id for chunk in self.endangered(slot, keep_rows)}
        for chunk in list(self._beyond(slot, keep_rows)):
            if chunk.id not in endangered:
                self._leave(slot, chunk)

    # -- inside ----------------------------------------------------------------------------------
    def _beyond(self, slot: int, keep_rows: int) -> Iterable[Chunk]:
        """Chunks of the slot that are not entirely in rows [0, keep_rows), ascending."""
        first = keep_rows // self.chunk_rows
        for chunk_id in self._maps[slot][first:]:
            if chunk_id is not None:
                yield self.get(chunk_id)

    def _enter(self, slot: int, index: int, chunk: Chunk) -> None:
        row_map = self._maps[slot]
        row_map.extend([None] * (index + 1 - len(row_map)))
        row_map[index] = chunk.id
        chunk.homes.add(slot)

    def _leave(self, slot: int, chunk: Chunk) -> None:
        row_map = self._maps[slot]
        row_map[chunk.index] = None
        while row_map and row_map[-1] is None:
            row_map.pop()
        chunk.homes.discard(slot)
