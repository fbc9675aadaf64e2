"""Captures: reserve first, evict by plan if short, refuse with a reason if still short.

    reserve ──► ticket ──► (the engine copies private state, tail, logits) ──► commit: retained
       │           └──────────────────────────────────────────────────────────► abandon: all given back
       └──► CaptureRefused, or None: the slot stands exactly on a retained checkpoint

The slot's rows are not copied: full chunks it already holds are referenced, the others are
borrowed from it, with backing memory charged now.  So the checkpoint's price is known before a
byte moves, and a later preservation needs no room.

Eviction removes nothing unless the newcomer then fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from gufo_gguf.cache.checkpoints import Checkpoint, Parts, marks_before
from gufo_gguf.cache.chunks import Maker
from gufo_gguf.cache.events import EventKind
from gufo_gguf.cache.ghosts import Ghosts
from gufo_gguf.cache.ledger import Account, Reservation, Shortfall
from gufo_gguf.cache.retention import Rank, rank_victims
from gufo_gguf.cache.slots import Slot
from gufo_gguf.cache.tables import Tables
from gufo_gguf.cache.types import (
    BufferId,
    CapturePoint,
    CaptureRefused,
    CaptureTicket,
    CheckpointId,
    ChunkId,
    InputMark,
    MissReason,
    Origin,
    Tokens,
)

_N_MISSED = 256


class Refusal(StrEnum):
    """Why a capture leaves no checkpoint."""

    DISABLED = "disabled"
    STALE_LEASE = "stale_lease"
    NO_WRITE = "no_write"
    """The request may not leave checkpoints behind."""
    NOT_AT_BOUNDARY = "not_at_boundary"
    TOO_LARGE = "too_large"
    """It would not fit into the empty budget."""
    NO_ROOM = "no_room"
    """What may be evicted for it does not free enough."""


@dataclass(frozen=True, slots=True)
class OpenCapture:
    """A reserved capture until it is committed or abandoned."""

    ticket: CaptureTicket
    scope: str
    tokens: Tokens
    inputs: tuple[InputMark, ...]
    lasting: bool
    parts: Parts


class Captures:
    def __init__(self, tables: Tables) -> None:
        self._t = tables
        self.open: dict[CheckpointId, OpenCapture] = {}
        self._next = 1
        self._too_large_logged: int | None = None
        self._missed = Ghosts(_N_MISSED)
        """Learned points, and ends of system prompts, that found no room."""

    # -- reserve ---------------------------------------------------------------------------------
    def reserve(
        self, slot: Slot, point: CapturePoint, at_most: Rank = Rank.CYCLED
    ) -> CaptureTicket | CaptureRefused | None:
        """See ``CacheManager.reserve_capture``; the lease and the boundary have been checked.

        ``at_most``: the highest class of checkpoints that may be evicted for it.
        """
        t = self._t
        here = slot.at_checkpoint()
        standing_on = None if here is None else t.checkpoints.get(here)
        if standing_on is not None and (standing_on.parts.logits is not None or not point.want_logits):
            t.checkpoints.touch(standing_on.id, "covered")
            return None
        n = slot.n_tokens
        full, tail_rows = t.full_chunks(n), t.tail_rows(n)
        own = {
            Account.PRIVATE: t.shape.private_bytes,
            Account.TAIL: tail_rows * t.shape.row_bytes,
            Account.LOGITS: t.shape.logits_bytes if point.want_logits else 0,
        }
        whole_bytes = sum(own.values()) + full * t.chunks.chunk_bytes
        if whole_bytes > t.ledger.budget_bytes:
            return self._refuse(point, Refusal.TOO_LARGE, whole_bytes)
        row_map = t.chunks.row_map(slot.index)
        known: dict[int, ChunkId] = {i: c for i, c in enumerate(row_map[:full]) if c is not None}
        need_bytes = sum(own.values()) + (full - len(known)) * t.chunks.chunk_bytes
        # Referenced before anything is evicted: a victim must not take along what we need.
        t.chunks.ref(known.values())
        reservation = self._make_room(need_bytes, slot, point, at_most)
        if reservation is None:
            t.chunks.unref(known.values())
            if point.origin in (Origin.SYSTEM, Origin.LEARNED):
                self._missed.add(slot.scope, slot.history.view(n), (), MissReason.NO_CHECKPOINT)
            return self._refuse(point, Refusal.NO_ROOM, need_bytes)
        maker = Maker(slot.index, slot.generation, t.log.seq)
        chunks = tuple(
            known[i] if i in known else t.chunks.borrow(slot.index, i, maker, reservation).id for i in range(full)
        )
        buffers: dict[Account, BufferId | None] = {}
        for account, n_bytes in own.items():
            if n_bytes:
                t.ledger.hold(reservation, account, n_bytes)
            buffers[account] = t.buffers.new(n_bytes) if n_bytes else None
        t.ledger.close(reservation)
        parts = Parts(chunks, buffers[Account.PRIVATE], buffers[Account.TAIL], tail_rows, buffers[Account.LOGITS])
        checkpoint = CheckpointId(self._next)
        self._next += 1
        ticket = CaptureTicket(
            checkpoint,
            slot.lease,
            point,
            private=parts.private,
            tail=parts.tail,
            tail_first=n - tail_rows,
            logits=parts.logits,
            new_bytes=need_bytes,
        )
        self.open[checkpoint] = OpenCapture(
            ticket,
            slot.scope,
            slot.history.view(n),
            marks_before(slot.inputs, n),
            lasting=slot.at_anchor_boundary,
            parts=parts,
        )
        return ticket

    # -- finish ----------------------------------------------------------------------------------
    def commit(self, ticket: CaptureTicket) -> Checkpoint | None:
        """Retain a filled capture; None when it has died meanwhile (its slot failed)."""
        done = self.open.pop(ticket.checkpoint, None)
        if done is None:
            return None
        checkpoint = Checkpoint(
            ticket.checkpoint, done.scope, done.tokens, done.inputs, ticket.point.origin, done.parts, done.lasting
        )
        self._t.checkpoints.admit(checkpoint)
        return checkpoint

    def abandon(self, ticket: CaptureTicket, reason: str) -> None:
        """Give back everything; nothing of the capture is ever served."""
        dropped = self.open.pop(ticket.checkpoint, None)
        if dropped is None:
            return
        self._t.checkpoints.free(dropped.parts)
        self._event_refused(ticket.point, reason, ticket.new_bytes)

    def drop_lost(self, lost: Iterable[ChunkId], reason: str) -> list[CheckpointId]:
        """Remove every checkpoint and open capture that needs a lost chunk; they are never served."""
        lost = set(lost)
        if not lost:
            return []
        gone = self._t.checkpoints.needing(lost)
        for checkpoint in gone:
            self._t.checkpoints.remove(checkpoint.id, reason, ghost=MissReason.EVICTED)
        for capture in [c for c in self.open.values() if not lost.isdisjoint(c.parts.chunks)]:
            self.abandon(capture.ticket, reason)
        return [checkpoint.id for checkpoint in gone]

    # -- room ------------------------------------------------------------------------------------
    def _make_room(self, need_bytes: int, slot: Slot, point: CapturePoint, at_most: Rank) -> Reservation | None:
        """A reservation, after evicting what the plan says; None (and nothing evicted) if that is not enough."""
        t, optional = self._t, not point.required and not self._missed_again(slot, point)
        ahead_bytes = self._ahead_bytes(slot) if optional else 0
        reservation = self._reserve(need_bytes) if need_bytes + ahead_bytes <= t.ledger.free_bytes else None
        if reservation is not None:
            return reservation
        marks = marks_before(slot.inputs, slot.n_tokens)
        place = t.index.place_of(slot.scope, slot.history.view(), marks, anchor=slot.at_anchor_boundary)
        covered = None if place.covers is None else t.checkpoints.get(CheckpointId(place.covers[1]))
        # one of this very request was not made to be given up a moment later
        covers = covered.id if covered is not None and covered.n_tokens not in slot.required else None

        def ranked() -> list[tuple[CheckpointId, str]]:
            victims = rank_victims(
                t.checkpoints.records(slots_keep=point.origin is Origin.PARTING),
                t.checkpoints.admitted_bytes,
                t.ledger.budget_bytes,
                optional=optional,
                newcomer_family=place.family,
                covers=covers,
                thrashing=t.thrash.on,
                limits=t.limits,
            )
            return [(v.id, v.reason) for v in victims if v.rank <= at_most]

        order = ranked()
        over = len(t.checkpoints) + len(self.open) + 1 - t.limits.max_checkpoints
        wanted_bytes = need_bytes + ahead_bytes - t.ledger.free_bytes
        if len(order) < over or not t.checkpoints.frees([v for v, _ in order], wanted_bytes):
            return None
        # One removal changes what is covered or a last copy, so ask again after each; but stay
        # within the set that was found sufficient, or the last step could fall short.
        allowed = dict(order)
        while reservation is None and allowed:
            victim, reason = next(((v, r) for v, r in order if v in allowed), next(iter(allowed.items())))
            del allowed[victim]
            t.checkpoints.remove(victim, reason, ghost=MissReason.EVICTED)
            reservation = self._reserve(need_bytes)
            order = ranked() if reservation is None else []
        return reservation

    def _missed_again(self, slot: Slot, point: CapturePoint) -> bool:
        """A learned point that found no room before: others parted there as well, so it is worth one of them."""
        if point.origin is not Origin.LEARNED:
            return False
        found = self._missed.deepest(slot.scope, slot.history.view(), (), slot.n_tokens)
        return found is not None and found[0] == slot.n_tokens

    def _ahead_bytes(self, slot: Slot) -> int:
        """What the required captures that this request still plans will need, at most.

        An optional capture that takes this room makes them evict what it was not allowed to evict.
        """
        shape, ahead = self._t.shape, [b for b in slot.required if b > slot.n_tokens]
        if not ahead:
            return 0
        own_bytes = shape.private_bytes + shape.logits_bytes + (shape.chunk_rows - 1) * shape.row_bytes
        new_chunks = self._t.full_chunks(ahead[-1]) - self._t.full_chunks(slot.n_tokens)
        return len(ahead) * own_bytes + new_chunks * self._t.chunks.chunk_bytes

    def _reserve(self, need_bytes: int) -> Reservation | None:
        if len(self._t.checkpoints) + len(self.open) >= self._t.limits.max_checkpoints:
            return None
        got = self._t.ledger.reserve(need_bytes)
        return None if isinstance(got, Shortfall) else got

    # -- refusals --------------------------------------------------------------------------------
    def _refuse(self, point: CapturePoint, reason: Refusal, need_bytes: int) -> CaptureRefused:
        # What can never fit is said once, for the smallest such size, not once per request.
        logged = self._too_large_logged
        if reason is not Refusal.TOO_LARGE or logged is None or need_bytes < logged:
            self._event_refused(point, reason, need_bytes)
        if reason is Refusal.TOO_LARGE:
            self._too_large_logged = need_bytes if logged is None else min(logged, need_bytes)
        return CaptureRefused(point, reason, need_bytes, self._t.ledger.budget_bytes)

    def _event_refused(self, point: CapturePoint, reason: str, need_bytes: int) -> None:
        self._t.log.emit(
            EventKind.REFUSE,
            reason=reason,
            boundary=point.boundary,
            origin=point.origin,
            n_bytes=need_bytes,
            total_bytes=self._t.checkpoints.unique_bytes,
        )
