"""The cache as the engine sees it: plans out, results in.

One request:   lookup → [reserve_parting → commit_capture] → acquire → [preserved] → ready
               → (extend | reserve_capture → commit_capture)* → release
Idle time:     plan_spill → preserve_done
Before a stop: [reserve_end → commit_capture] of each slot
After any call: take_freed

Owner thread only.  Nothing here calls the backend, does I/O or reads a clock; the engine carries a
plan out and then says that it is done, or abandons it.  Three kinds of trouble:

* an expected refusal is a value (None, CaptureRefused) with its reason in the event log;
* a result of an old lease is ignored: it cannot touch what came after it;
* a broken invariant latches the cache off (``latch.py``): requests go on cold.
"""

from __future__ import annotations

import logging

from gufo_gguf.cache import latch
from gufo_gguf.cache.capture_plan import grid_allowance, plan_captures
from gufo_gguf.cache.captures import Captures, Refusal
from gufo_gguf.cache.check import check_all
from gufo_gguf.cache.durable import Durable
from gufo_gguf.cache.events import EventKind, EventLog
from gufo_gguf.cache.ledger import InvariantBroken
from gufo_gguf.cache.occupancy import Occupancy
from gufo_gguf.cache.parting import reserve_end, reserve_parting
from gufo_gguf.cache.preservation import mark_preserved, plan_spill
from gufo_gguf.cache.report import CacheStats, CheckpointRow, checkpoint_rows, stats
from gufo_gguf.cache.retention import Rank
from gufo_gguf.cache.slots import Slot, SlotState
from gufo_gguf.cache.tables import Tables
from gufo_gguf.cache.types import (
    Admission,
    BufferId,
    CacheLimits,
    CapturePoint,
    CaptureRefused,
    CaptureTicket,
    CheckpointId,
    Lease,
    Lookup,
    Origin,
    PromptView,
    RowCopy,
    StateShape,
    Tokens,
)

_logger = logging.getLogger(__name__)


class CacheManager:
    """See the module docstring.

    ``enabled`` False: slots only, every request runs cold.  ``ram`` False, or a budget of 0: live
    frontiers only.
    """

    def __init__(
        self,
        shape: StateShape,
        limits: CacheLimits,
        n_slots: int,
        n_ctx: int,
        log: EventLog,
        *,
        enabled: bool = True,
        ram: bool = True,
    ) -> None:
        if shape.chunk_rows != limits.chunk_rows:
            raise ValueError(f"the state has chunks of {shape.chunk_rows} rows, the limits say {limits.chunk_rows}")
        self.shape = shape
        self.limits = limits
        self.n_ctx = n_ctx
        self.log = log
        self.ram = ram and limits.ram_bytes > 0
        self.off: str | None = None if enabled else "disabled"
        """Why nothing is served or kept ("disabled", or the broken invariant); None = the cache works."""
        self.tables = Tables(shape, limits, n_slots, n_ctx, log)
        self.durable = self.tables.durable = Durable(self.tables)
        """Disk checkpoints in the index; empty without a disk tier."""
        self._captures = Captures(self.tables)
        self._occupancy = Occupancy(self.tables, self._captures)

    # -- reads -----------------------------------------------------------------------------------
    @latch.guarded(latch.lookup)
    def lookup(self, prompt: PromptView) -> Lookup:
        """All places this prompt could start from; changes nothing."""
        return self.tables.index.lookup(prompt)

    # -- a request takes a slot ------------------------------------------------------------------
    @latch.guarded(latch.reserve_parting)
    def reserve_parting(self, prompt: PromptView, lookup: Lookup) -> CaptureTicket | None:
        """Reserve a checkpoint of what ``acquire`` would overwrite with these arguments, if it is worth one.

        The ticket's slot is idle; fill it before any other call, commit or abandon it, then look up again.
        """
        if not self.ram:
            return None
        return reserve_parting(self.tables, self._captures, prompt, lookup)

    @latch.guarded(latch.reserve_end)
    def reserve_end(self, slot: int) -> CaptureTicket | None:
        """Reserve a checkpoint of what an idle slot holds, answer included, before the server stops.

        Fill it before any other call, and commit or abandon it.  None: nothing there, or not worth a copy.
        """
        return reserve_end(self.tables, self._captures, slot) if self.ram else None

    @latch.guarded(latch.acquire)
    def acquire(self, prompt: PromptView, lookup: Lookup) -> Admission | None:
        """Lease a slot for the prompt; None when none is free now.

        Carry the admission out in order (preserve, truncate, restore), then call ``ready``, for
        cold starts and continuations too; or ``abandon`` it.
        """
        return self._occupancy.acquire(prompt, lookup)

    @latch.guarded(latch.preserved)
    def preserved(self, lease: Lease, copies: tuple[RowCopy, ...]) -> None:
        """These copies of an admission's ``preserve`` are done; a stale lease is ignored."""
        if self.tables.slots.leased(lease) is not None:
            mark_preserved(self.tables, copies)

    @latch.guarded(latch.ready)
    def ready(self, admission: Admission) -> bool:
        """The admission was carried out: the slot holds ``n_reused`` tokens and may run.

        False: it died meanwhile (what it read from failed, its lease is stale, the cache is off).
        What lies in the slot is in doubt then: clear it and start cold in the same lease.
        """
        return self._occupancy.ready(admission)

    @latch.guarded(latch.abandon)
    def abandon(self, admission: Admission, reason: str, *, quarantine: bool = False) -> None:
        """The admission could not be carried out: the slot counts as empty and stays leased.

        Clear the backend's slot, then go cold in it, or release it and ask again.  ``quarantine``:
        the checkpoint's bytes are damaged; it is removed and never served again.
        """
        self._occupancy.abandon(admission, reason, quarantine=quarantine)

    # -- a request runs --------------------------------------------------------------------------
    @latch.guarded(latch.extend)
    def extend(self, lease: Lease, tokens: Tokens) -> None:
        """The slot has really computed these tokens now; a stale lease is ignored."""
        slot = self._running(lease)
        if slot is None:
            return
        if slot.n_tokens + len(tokens) > self.n_ctx:
            raise InvariantBroken(f"slot {slot.index}: {slot.n_tokens} + {len(tokens)} tokens of {self.n_ctx}")
        slot.history.append(tokens)

    @latch.guarded(latch.plan_captures)
    def plan_captures(
        self, lease: Lease, prompt: PromptView, common_prefix: int, n_ubatch: int
    ) -> tuple[CapturePoint, ...]:
        """Boundaries at which this request should stop and capture, from the slot's position on, ascending."""
        slot = self._running(lease)
        if slot is None or not self.ram or not prompt.write:
            return ()
        here = slot.at_checkpoint()
        points = plan_captures(
            prompt=prompt,
            start=slot.n_tokens,
            start_has_checkpoint=here is not None and here in self.tables.checkpoints,
            common_prefix=common_prefix,
            n_ubatch=n_ubatch,
            limits=self.limits,
            grid_budget=grid_allowance(self.shape, self.limits, len(prompt.tokens)),
            private_rows=self.shape.private_rows,
            rows_only=self.shape.rows_only,
        )
        slot.required = tuple(point.boundary for point in points if point.required)
        self.log.emit(
            EventKind.PLAN,
            boundary=slot.n_tokens,
            common_prefix=common_prefix,
            slot=slot.index,
            points=tuple(point.boundary for point in points),
            total_bytes=self.tables.checkpoints.unique_bytes,
        )
        return points

    @latch.guarded(latch.reserve_capture)
    def reserve_capture(
        self, lease: Lease, point: CapturePoint, *, may_wait: bool = False
    ) -> CaptureTicket | CaptureRefused | None:
        """Reserve a checkpoint of the slot's state now; its position must be ``point.boundary``.

        None: the state already is a retained checkpoint, which counts as used.  ``may_wait``: RAM is all
        there is, so the end of a prompt need not displace another conversation's last copy: its slot
        keeps it until it is taken over, and then it is captured (``reserve_parting``).  Not with a single
        slot, which the next conversation takes, and not at a stable boundary, which what lies in the slot
        afterwards does not replace.
        """
        slot = self._running(lease)
        reason: Refusal | None = None
        if slot is None:
            reason = Refusal.STALE_LEASE
        elif not self.ram:
            reason = Refusal.DISABLED
        elif not slot.write:
            reason = Refusal.NO_WRITE
        elif point.boundary != slot.n_tokens or point.boundary == 0:
            reason = Refusal.NOT_AT_BOUNDARY
        if slot is None or reason is not None:
            return CaptureRefused(point, str(reason), 0, self.limits.ram_bytes)
        waits = may_wait and point.origin is Origin.PROMPT and not slot.stable and len(self.tables.slots) > 1
        return self._captures.reserve(slot, point, Rank.NEAR_DUPLICATE if waits else max(Rank))

    @latch.guarded(latch.commit_capture)
    def commit_capture(self, ticket: CaptureTicket) -> bool:
        """The ticket's buffers are filled: retain the checkpoint.  False: it died with its slot meanwhile."""
        checkpoint = self._captures.commit(ticket)
        if checkpoint is None:
            return False
        slot = self.tables.slots[ticket.lease.slot]
        if slot.generation == ticket.lease.generation and checkpoint.n_tokens >= slot.anchor_tokens:
            slot.set_anchor(checkpoint.id, checkpoint.n_tokens)
        return True

    @latch.guarded(latch.abandon_capture)
    def abandon_capture(self, ticket: CaptureTicket, reason: str) -> None:
        """The copy failed: everything the ticket reserved is given back."""
        self._captures.abandon(ticket, reason)

    # -- a request ends --------------------------------------------------------------------------
    @latch.guarded(latch.release)
    def release(self, lease: Lease) -> None:
        """The slot is idle; what it really computed, generated tokens included, is its live frontier."""
        self._occupancy.release(lease)

    @latch.guarded(latch.fail_slot)
    def fail_slot(self, which: Lease | int, reason: str) -> tuple[CheckpointId, ...]:
        """The slot's state is in doubt: it is empty and idle afterwards (clear it in the backend too).

        Returns the checkpoints that went with it, because rows they needed lay nowhere else.
        """
        return self._occupancy.fail(which, reason)

    # -- idle time -------------------------------------------------------------------------------
    @latch.guarded(latch.plan_spill)
    def plan_spill(self, max_rows: int) -> tuple[RowCopy, ...]:
        """Rows of idle slots to preserve now: up to max_rows, but at least one chunk if any is left.

        Carry it out before any other call, then ``preserve_done``.
        """
        return plan_spill(self.tables, max_rows)

    @latch.guarded(latch.preserve_done)
    def preserve_done(self, copies: tuple[RowCopy, ...]) -> None:
        """These copies of a spill are done."""
        mark_preserved(self.tables, copies)

    # -- housekeeping ----------------------------------------------------------------------------
    def take_freed(self) -> list[BufferId]:
        """Buffers whose bytes may be reused; each is named once."""
        return self.tables.buffers.take_freed()

    def buffer_bytes(self, buffer: BufferId) -> int:
        """Size of a buffer named in a plan."""
        return self.tables.buffers.size(buffer)

    def stats(self) -> CacheStats:
        return stats(self.tables, self.off)

    def checkpoints(self) -> list[CheckpointRow]:
        return checkpoint_rows(self.tables)

    def check(self, *, cheap: bool = False) -> list[str]:
        """Recount every reference and byte; an empty list means that everything agrees.

        ``cheap``: leave out what grows with the number of tokens (for the idle loop).
        """
        if self.off is not None:
            return [] if self.off == "disabled" else [f"the cache is latched off: {self.off}"]
        return check_all(self.tables, self._captures.open, self._occupancy.pending, cheap=cheap)

    def latch(self, why: str) -> None:
        """Turn the cache off for good; ``why`` is the broken invariant."""
        if self.off is None:
            self.off = why
            _logger.critical("the cache is off and requests run cold: %s", why, exc_info=True)
            self.log.emit(EventKind.LATCH, reason=why)

    def _running(self, lease: Lease) -> Slot | None:
        slot = self.tables.slots.leased(lease)
        return slot if slot is not None and slot.state is SlotState.RUNNING else None
