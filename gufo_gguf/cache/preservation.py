"""Preserving borrowed rows: copying them to backing memory before, or long before, they are overwritten.

    slot      [ c1 )[ c2 )[ c3 )          c2 and c3 are borrowed: their only bytes lie here
    backing   [ c1 )[    )[    )          reserved when the checkpoint was admitted

Each chunk is copied once, for all checkpoints that need it.  On the request path only what the
next request would overwrite is copied; idle spill does the rest early and in pieces.

A copy counts when it is reported, and only if the slot still is a home of the chunk: its rows have
not changed since the plan then, whenever the copy was made.
"""

from __future__ import annotations

from collections.abc import Iterable

from gufo_gguf.cache.chunks import Chunk, Residence
from gufo_gguf.cache.events import EventKind
from gufo_gguf.cache.slots import SlotState
from gufo_gguf.cache.tables import Tables
from gufo_gguf.cache.types import ChunkId, RowCopy


def row_copies(t: Tables, slot: int, chunks: Iterable[Chunk]) -> tuple[RowCopy, ...]:
    """One copy per chunk, out of this slot."""
    n = t.shape.chunk_rows
    return tuple(RowCopy(chunk.id, slot, chunk.index * n, n, chunk.buffer) for chunk in chunks)


def plan_spill(t: Tables, max_rows: int) -> tuple[RowCopy, ...]:
    """Borrowed chunks of idle slots, least recently used slot first: up to max_rows, but at least one chunk."""
    copies: list[RowCopy] = []
    seen: set[ChunkId] = set()
    idle = [slot for slot in t.slots if slot.state is SlotState.IDLE]
    for slot in sorted(idle, key=lambda s: (s.last_use_seq, s.index)):
        for copy in row_copies(t, slot.index, t.chunks.borrowed_in(slot.index)):
            if copies and (len(copies) + 1) * t.shape.chunk_rows > max_rows:
                return tuple(copies)
            if copy.chunk not in seen:
                seen.add(copy.chunk)
                copies.append(copy)
    return tuple(copies)


def mark_preserved(t: Tables, copies: Iterable[RowCopy]) -> None:
    """These copies were made; what no longer applies is ignored."""
    done: dict[int, int] = {}
    for copy in copies:
        if copy.chunk not in t.chunks:
            continue
        chunk = t.chunks.get(copy.chunk)
        if chunk.residence is Residence.BORROWED and copy.dst == chunk.buffer and copy.slot in chunk.homes:
            t.chunks.mark_resident(chunk.id)
            done[copy.slot] = done.get(copy.slot, 0) + t.chunks.chunk_bytes
    for slot, n_bytes in done.items():
        reason = "overwrite" if t.slots[slot].state is SlotState.PREPARING else "spill"
        t.log.emit(
            EventKind.PRESERVE, reason=reason, slot=slot, n_bytes=n_bytes, total_bytes=t.checkpoints.unique_bytes
        )
