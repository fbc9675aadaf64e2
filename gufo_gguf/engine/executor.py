"""Carries the cache's plans out against a backend and tells the manager how it went.

Every failure ends in a state that is true: a slot that could not be restored is empty, a capture
that could not be copied leaves no checkpoint.  Nothing here decides what to keep.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable

import numpy as np

from gufo_gguf.backend.base import Backend, Bytes, Logits
from gufo_gguf.cache.manager import CacheManager
from gufo_gguf.cache.types import (
    Admission,
    CapturePoint,
    CaptureRefused,
    CaptureTicket,
    CheckpointId,
    FromBuffer,
    FromSlot,
    Lease,
    Lookup,
    Piece,
    PromptView,
    RequestReport,
    RestorePlan,
    RowCopy,
    Tier,
    Tokens,
)
from gufo_gguf.core.errors import BackendError, StateRejected, StoreError
from gufo_gguf.engine.disk_tier import DiskTier
from gufo_gguf.engine.pool import BufferPool

log = logging.getLogger("gufo.cache")


class Executor:
    """Owner thread only.  ``clock`` gives seconds, monotonic; it only feeds reports."""

    def __init__(
        self, backend: Backend, manager: CacheManager, pool: BufferPool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._backend = backend
        self._manager = manager
        self._pool = pool
        self._clock = clock
        self._staging: Bytes | None = None
        self.disk: DiskTier | None = None
        self.eager_copies = False
        """Copy rows when they are captured instead of borrowing them (``engine/ablation.py``)."""
        self._restored_logits: tuple[tuple[Lease, int], Logits] | None = None
        """((lease, tokens), logits) of the newest admission, if a restore from disk gave it some.

        The lease, not the slot: another conversation may stand at the same position of the same slot.
        Within a lease positions only grow, so there they name the restored state alone."""

    # -- before a request runs -------------------------------------------------------------------
    def part(self, prompt: PromptView, lookup: Lookup) -> bool:
        """Keep what the request is about to overwrite in a slot, as far as the cache wants it; True: look up again."""
        ticket = self._manager.reserve_parting(prompt, lookup)
        if ticket is None:
            return False
        if self._fill(ticket):
            # its rows would have to be copied before they are overwritten; the same slot is chosen again then
            self.preserve(self._manager.durable.plan_preserve(ticket.checkpoint, ticket.point.boundary))
        self._collect()
        return True

    def admit(self, admission: Admission, tokens: Tokens, report: RequestReport) -> int:
        """Preserve, truncate and restore as planned; returns the tokens now in place.

        0 when the plan failed: the slot is empty then and the request goes cold.
        """
        started = self._clock()
        self._restored_logits = None
        try:
            self.preserve(admission.preserve)
            if admission.restore is not None:
                self._restore(admission.lease, admission.restore, tokens)
            elif admission.truncate_to is not None:
                self._backend.truncate(admission.lease.slot, admission.truncate_to)
        except (BackendError, StoreError, OSError, ValueError, MemoryError) as error:
            log.warning("restore into slot %d failed: %s", admission.lease.slot, error)
            self._manager.abandon(admission, str(error), quarantine=isinstance(error, StateRejected))
            return self._start_empty(admission)
        if not self._manager.ready(admission):
            return self._start_empty(admission)
        self._collect()
        if admission.restore is not None:
            report.restored_tokens = admission.restore.n_tokens
            report.restore_ms = 1e3 * (self._clock() - started)
        report.reuse_source = admission.source
        return admission.n_reused

    def _start_empty(self, admission: Admission) -> int:
        self._restored_logits = None
        self._backend.abort_restore(admission.lease.slot)
        self._collect()
        return 0

    def _restore(self, lease: Lease, plan: RestorePlan, tokens: Tokens) -> None:
        backend, slot = self._backend, lease.slot
        if plan.tier is Tier.DISK:
            assert self.disk is not None, "a plan names the disk tier, and there is none"
            logits = self.disk.restore(lease, plan, tokens)
            self._restored_logits = None if logits is None else ((lease, plan.n_tokens), logits)
            return
        rows = backend.info.inventory
        assert rows is not None
        backend.begin_restore(slot, tokens[: plan.n_tokens], plan.keep_rows, trusted=True)
        for in_ram, group in itertools.groupby(plan.pieces, lambda p: isinstance(p.source, FromBuffer)):
            if in_ram:
                backend.load_pieces(slot, [self._piece(p, rows.row_bytes) for p in group])
                continue
            for piece in group:  # one staging buffer: its copy is done before the next piece is read
                backend.load_pieces(slot, [self._piece(piece, rows.row_bytes)])
        if plan.private is not None:
            backend.load_private(slot, self._buffer(plan.private))
        backend.finish_restore(slot)

    def _piece(self, piece: Piece, row_bytes: int) -> tuple[int, int, Bytes, int]:
        source = piece.source
        if isinstance(source, FromBuffer):
            return piece.first_row, piece.n_rows, self._buffer(source.buffer), source.buffer_rows
        if isinstance(source, FromSlot):
            n_bytes = piece.n_rows * row_bytes
            if self._staging is None or self._staging.nbytes < n_bytes:
                self._staging = self._backend.alloc(n_bytes)
            self._backend.rows_out(source.slot, piece.first_row, piece.n_rows, self._staging[:n_bytes])
            return piece.first_row, piece.n_rows, self._staging[:n_bytes], piece.n_rows
        raise BackendError(f"no reader for rows that lie in {type(source).__name__}")

    def preserve(self, copies: tuple[RowCopy, ...]) -> None:
        """Copy borrowed rows into their backing memory; what was copied counts even if a later slot fails."""
        done: list[RowCopy] = []
        try:
            for slot, group in itertools.groupby(copies, lambda copy: copy.slot):
                batch = list(group)
                self._backend.pieces_out(slot, [(c.first_row, c.n_rows, self._buffer(c.dst)) for c in batch])
                done += batch
        finally:
            if done:
                self._manager.preserve_done(tuple(done))

    # -- captures --------------------------------------------------------------------------------
    def capture(self, lease: Lease, point: CapturePoint, report: RequestReport) -> None:
        """Leave a checkpoint at the slot's position, if the cache has room for it."""
        started = self._clock()
        ticket = self._manager.reserve_capture(lease, point, may_wait=self.disk is None)
        if ticket is not None and not isinstance(ticket, CaptureRefused) and self._fill(ticket):
            report.captured.append((point.boundary, str(point.origin)))
            if self.eager_copies:
                self.preserve(self._manager.durable.plan_preserve(ticket.checkpoint, point.boundary))
            if self.disk is not None:
                self.disk.captured(ticket.checkpoint, point.origin, lease)
        self._collect()
        report.capture_ms += 1e3 * (self._clock() - started)

    def keep_ends(self) -> None:
        """Before a stop: have what idle slots hold written to disk, answers included."""
        for slot in range(len(self._manager.tables.slots)):
            ticket = self._manager.reserve_end(slot)
            if ticket is not None and self._fill(ticket) and self.disk is not None:
                self.disk.captured(ticket.checkpoint, ticket.point.origin, ticket.lease)
        self._collect()

    def _fill(self, ticket: CaptureTicket) -> bool:
        """Copy the slot's private state, tail and logits; False: there is no such checkpoint."""
        lease, boundary = ticket.lease, ticket.point.boundary
        try:
            if ticket.tail is not None:
                n_rows = boundary - ticket.tail_first
                self._backend.rows_out(lease.slot, ticket.tail_first, n_rows, self._buffer(ticket.tail))
            if ticket.private is not None:
                self._backend.private_out(lease.slot, self._buffer(ticket.private))
            if ticket.logits is not None:
                self._buffer(ticket.logits)[:] = self._logits(lease).view(np.uint8)
        except (BackendError, ValueError, MemoryError) as error:
            log.warning("capture at %d failed: %s", boundary, error)
            self._manager.abandon_capture(ticket, str(error))
            return False
        return self._manager.commit_capture(ticket)

    def _logits(self, lease: Lease) -> Logits:
        """Of the slot's state now: just restored with them, or just computed."""
        here = (lease, self._backend.position(lease.slot))
        if self._restored_logits is not None and self._restored_logits[0] == here:
            return self._restored_logits[1]
        return self._backend.logits(lease.slot)

    def logits_of(self, plan: RestorePlan) -> np.ndarray | None:
        """Stored next-token logits of a restored checkpoint, a copy; None when it has none."""
        if plan.tier is Tier.DISK:
            return None if self._restored_logits is None else self._restored_logits[1]
        return None if plan.logits is None else self._buffer(plan.logits).view(np.float32).copy()

    # -- while nothing runs ----------------------------------------------------------------------
    def spill(self, max_rows: int) -> bool:
        """Preserve a piece of what idle slots lend; False when there is nothing left to do."""
        copies = self._manager.plan_spill(max_rows)
        self.preserve(copies)
        self._collect()
        return bool(copies)

    def prepare_write(self, max_rows: int) -> bool:
        """Preserve what the next write to disk needs, then queue it; False when nothing waits for that."""
        if self.disk is None:
            return False

        def preserve(checkpoint: CheckpointId) -> bool:
            copies = self._manager.durable.plan_preserve(checkpoint, max_rows)
            self.preserve(copies)
            return bool(copies)

        worked = self.disk.step(preserve)
        self._collect()
        return worked

    def _buffer(self, buffer: int) -> Bytes:
        return self._pool.get(buffer, self._manager.buffer_bytes(buffer))  # type: ignore[arg-type]

    def _collect(self) -> None:
        self._pool.free(self._manager.take_freed())
        chunks = self._manager.durable.take_freed()
        if self.disk is not None and chunks:
            self.disk.freed(chunks)
