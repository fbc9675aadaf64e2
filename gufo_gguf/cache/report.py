"""Numbers about the cache for people and metrics; computed on demand, nothing is counted for it."""

from __future__ import annotations

from dataclasses import dataclass

from gufo_gguf.cache.chunks import Residence
from gufo_gguf.cache.ledger import Account
from gufo_gguf.cache.slots import SlotState
from gufo_gguf.cache.tables import Tables
from gufo_gguf.cache.types import Origin


@dataclass(frozen=True, slots=True)
class CacheStats:
    """All sizes in bytes; ``whole_bytes`` is what the retained set would take as complete copies."""

    checkpoints: int
    max_checkpoints: int
    chunks: int
    chunks_borrowed: int
    unique_bytes: int
    whole_bytes: int
    used_bytes: int
    """Held and reserved in the ledger: the retained set and captures that are under way."""
    budget_bytes: int
    peak_bytes: int
    admitted_bytes: int
    chunk_bytes: int
    private_bytes: int
    tail_bytes: int
    logits_bytes: int
    row_bytes: int
    """Bytes of one row of all components: with the others, "conversations of N tokens that fit"."""
    slots: int
    slots_idle: int
    live_tokens: int
    off: str | None
    """Why the cache serves nothing ("disabled", or the broken invariant); None = it works."""


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One retained checkpoint as ``/v1/cache`` shows it."""

    id: int
    scope: str
    n_tokens: int
    origin: Origin
    parent: int | None
    own_bytes: int
    """Private state, tail and logits."""
    chunks: int
    chunks_borrowed: int
    reuses: int
    last_use_seq: int
    has_logits: bool
    pinned: bool


def stats(t: Tables, off: str | None) -> CacheStats:
    retained = t.checkpoints.all()
    own = sum(
        t.buffers.size(b) for c in retained for b in (c.parts.private, c.parts.tail, c.parts.logits) if b is not None
    )
    return CacheStats(
        checkpoints=len(retained),
        max_checkpoints=t.limits.max_checkpoints,
        chunks=len(t.chunks),
        chunks_borrowed=sum(c.residence is Residence.BORROWED for c in t.chunks.all()),
        unique_bytes=t.checkpoints.unique_bytes,
        whole_bytes=own + sum(len(c.parts.chunks) for c in retained) * t.chunks.chunk_bytes,
        used_bytes=t.ledger.used_bytes,
        budget_bytes=t.ledger.budget_bytes,
        peak_bytes=t.ledger.peak_bytes,
        admitted_bytes=t.checkpoints.admitted_bytes,
        chunk_bytes=t.ledger.held_on(Account.CHUNKS),
        private_bytes=t.ledger.held_on(Account.PRIVATE),
        tail_bytes=t.ledger.held_on(Account.TAIL),
        logits_bytes=t.ledger.held_on(Account.LOGITS),
        row_bytes=t.shape.row_bytes,
        slots=len(t.slots),
        slots_idle=sum(s.state is SlotState.IDLE for s in t.slots),
        live_tokens=sum(s.n_tokens for s in t.slots),
        off=off,
    )


def checkpoint_rows(t: Tables) -> list[CheckpointRow]:
    """In order of admission."""
    rows = []
    for c in t.checkpoints.all():
        parent = t.index.parent(c.key)
        own = [b for b in (c.parts.private, c.parts.tail, c.parts.logits) if b is not None]
        chunks = [t.chunks.get(chunk) for chunk in c.parts.chunks]
        rows.append(
            CheckpointRow(
                id=int(c.id),
                scope=c.scope,
                n_tokens=c.n_tokens,
                origin=c.origin,
                parent=None if parent is None else parent[1],
                own_bytes=sum(t.buffers.size(b) for b in own),
                chunks=len(chunks),
                chunks_borrowed=sum(chunk.residence is Residence.BORROWED for chunk in chunks),
                reuses=c.reuses,
                last_use_seq=c.last_use_seq,
                has_logits=c.parts.logits is not None,
                pinned=c.pins > 0,
            )
        )
    return rows
