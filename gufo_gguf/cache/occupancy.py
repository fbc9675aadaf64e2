"""Who lives in which slot: acquire, ready, abandon, release, fail.

    acquire   the choice of ``admission.py`` becomes a lease; what it will read or copy is pinned
    ready     carried out: the slot's rows are the checkpoint's chunks by inheritance
    abandon   not carried out: the slot is empty, still leased
    release   what was really computed, generated tokens included, is a live frontier
    fail      the state is in doubt: nothing of it is ever served

Between acquire and ready the old content only shrinks: chunks that are safe elsewhere leave at
once, endangered ones stay until their copy is reported.  What then has no copy is LOST and takes
the checkpoints that need it along.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gufo_gguf.cache.admission import Choice, Wait, choose
from gufo_gguf.cache.captures import Captures
from gufo_gguf.cache.checkpoints import Checkpoint, marks_before
from gufo_gguf.cache.chunks import Residence
from gufo_gguf.cache.events import EventKind
from gufo_gguf.cache.index import Entry
from gufo_gguf.cache.preservation import row_copies
from gufo_gguf.cache.slots import History, Slot, SlotState
from gufo_gguf.cache.tables import Tables
from gufo_gguf.cache.types import (
    Admission,
    CheckpointId,
    ChunkId,
    Lease,
    Lookup,
    MissReason,
    PromptView,
    ReuseSource,
    RowCopy,
    Tier,
)


@dataclass(frozen=True, slots=True)
class Pending:
    """An admission between acquire and ready (or abandon)."""

    admission: Admission
    prompt: PromptView
    checkpoint: Checkpoint | None
    """The RAM source of a restore, pinned meanwhile; it may have been removed since."""
    sources: tuple[int, ...]
    """Slots that the restore reads, pinned meanwhile."""
    held: tuple[ChunkId, ...]
    """Chunks of ``admission.preserve``: their buffers must live until the copies are done."""
    inherits: tuple[ChunkId, ...]
    """Chunks that the slot's rows will be once restored."""


class Occupancy:
    def __init__(self, tables: Tables, captures: Captures) -> None:
        self._t = tables
        self._captures = captures
        self.pending: dict[int, Pending] = {}
        """By slot."""

    def acquire(self, prompt: PromptView, lookup: Lookup) -> Admission | None:
        choice = choose(self._t, prompt, lookup)
        if isinstance(choice, Wait):
            return None
        t, slot, source = self._t, choice.slot, choice.checkpoint
        preserve = row_copies(t, slot.index, choice.endangered)
        held = tuple(chunk.id for chunk in choice.endangered)
        self._unindex(slot)
        t.chunks.ref(held)
        t.chunks.leave_safe(slot.index, choice.keep_rows)
        if source is not None:
            t.checkpoints.pin(source)
        for index in choice.sources:
            t.slots[index].pins += 1
        slot.generation += 1
        slot.state = SlotState.PREPARING
        admission = _admission(choice, slot.lease, preserve)
        inherits = () if source is None else source.parts.chunks[: t.full_chunks(choice.n_reused)]
        self.pending[slot.index] = Pending(admission, prompt, source, choice.sources, held, inherits)
        self._event_lookup(choice, lookup)
        if prompt.read:
            t.thrash.note(lost=t.index.lost(prompt) - choice.n_reused >= t.limits.learned_min)
        return admission

    def ready(self, admission: Admission) -> bool:
        pending = self._pending(admission)
        if pending is None:
            return False
        t, slot = self._t, self._t.slots[admission.lease.slot]
        source = pending.checkpoint
        gone = source is not None and source.id not in t.checkpoints
        unsaved = {c for c in pending.held if t.chunks.get(c).residence is not Residence.RESIDENT}
        self._settle(pending)
        if gone or not unsaved.isdisjoint(pending.inherits):
            self.empty(slot, "restore_source_lost")
            _take_over(slot, pending.prompt)
            return False
        keep_rows = admission.n_reused if admission.restore is None else admission.restore.keep_rows
        lost = t.chunks.leave(slot.index, keep_rows)
        if admission.source is ReuseSource.DISK:
            slot.history = History(pending.prompt.tokens[: admission.n_reused])
            slot.set_anchor(None, 0)
        elif source is not None:
            slot.history = History(source.tokens[: admission.n_reused])
            t.chunks.inherit(slot.index, pending.inherits)
            whole = admission.n_reused == source.n_tokens
            slot.set_anchor(source.id if whole else None, admission.n_reused)
        elif admission.n_reused < slot.n_tokens:
            slot.history = History(slot.history.view(admission.n_reused))
            if slot.anchor_tokens > admission.n_reused:
                slot.set_anchor(None, 0)
        slot.reuses = self._reuses(slot, admission, source)
        self._captures.drop_lost(lost, "not_preserved")
        _take_over(slot, pending.prompt)
        if admission.source is not ReuseSource.NONE:
            self._event_restore(admission, "")
            used = slot.anchor if source is None else source.id
            if used is not None:
                t.checkpoints.touch(used, admission.source)
        return True

    def abandon(self, admission: Admission, reason: str, *, quarantine: bool) -> None:
        pending = self._pending(admission)
        if pending is None:
            return
        slot = self._t.slots[admission.lease.slot]
        self._settle(pending)
        self.empty(slot, reason)
        _take_over(slot, pending.prompt)
        if admission.source is not ReuseSource.NONE:
            self._event_restore(admission, reason)
        source = pending.checkpoint
        if quarantine and source is not None and source.id in self._t.checkpoints:
            self._t.checkpoints.remove(source.id, "quarantined", ghost=MissReason.QUARANTINED)

    def release(self, lease: Lease) -> None:
        slot = self._t.slots.leased(lease)
        if slot is None:
            return
        pending = self.pending.get(slot.index)
        if pending is not None:
            self._settle(pending)
            self.empty(slot, "released_unprepared")
        slot.state = SlotState.IDLE
        slot.last_use_seq = self._event_slot(slot, "release")
        if slot.write and slot.n_tokens:
            entry = Entry((Tier.LIVE, slot.index), slot.n_tokens, inputs=marks_before(slot.inputs, slot.n_tokens))
            self._t.index.insert(slot.scope, slot.history.view(), entry)
            slot.indexed = True

    def fail(self, which: Lease | int, reason: str) -> tuple[CheckpointId, ...]:
        slot = self._t.slots.find(which)
        if slot is None:
            return ()
        pending = self.pending.get(slot.index)
        if pending is not None:
            self._settle(pending)
        gone = self.empty(slot, reason)
        for other in [p for p in self.pending.values() if slot.index in p.sources]:
            # Its restore may have read the doubtful rows; without its source, ready() answers False.
            source = other.checkpoint
            if source is not None and source.id in self._t.checkpoints:
                self._t.checkpoints.remove(source.id, reason, ghost=MissReason.EVICTED)
                gone.append(source.id)
        slot.generation += 1
        slot.state = SlotState.IDLE
        return tuple(gone)

    def empty(self, slot: Slot, reason: str) -> list[CheckpointId]:
        """Nothing in the slot counts any more; returns the checkpoints that were lost with it."""
        self._unindex(slot)
        gone = self._drop_lost(self._t.chunks.leave(slot.index, 0), reason)
        slot.empty()
        self._event_slot(slot, reason)
        return gone

    # -- inside ----------------------------------------------------------------------------------
    def _reuses(self, slot: Slot, admission: Admission, source: Checkpoint | None) -> int:
        """Of the conversation that starts to run; one that parts from others at a branch point is new."""
        if admission.source is ReuseSource.LIVE:
            return slot.reuses + 1
        if source is not None:
            return 0 if self._t.index.is_branch_point(source.key) else source.reuses + 1
        return int(admission.source is ReuseSource.DISK)

    def _pending(self, admission: Admission) -> Pending | None:
        """The open admission of a valid lease; None for a late or repeated answer."""
        if self._t.slots.leased(admission.lease) is None:
            return None
        pending = self.pending.get(admission.lease.slot)
        return pending if pending is not None and pending.admission is admission else None

    def _settle(self, pending: Pending) -> None:
        """Give back what an admission pinned while it was carried out."""
        del self.pending[pending.admission.lease.slot]
        if pending.checkpoint is not None:
            self._t.checkpoints.unpin(pending.checkpoint)
        for index in pending.sources:
            self._t.slots[index].pins -= 1
        self._t.chunks.unref(pending.held)

    def _drop_lost(self, lost: Iterable[ChunkId], reason: str) -> list[CheckpointId]:
        return self._captures.drop_lost(lost, reason)

    def _unindex(self, slot: Slot) -> None:
        if slot.indexed:
            self._t.index.remove((Tier.LIVE, slot.index))
            slot.indexed = False

    # -- events ----------------------------------------------------------------------------------
    def _event_lookup(self, choice: Choice, lookup: Lookup) -> None:
        reason = ""
        if choice.n_reused == 0:
            # No reason in the lookup: what it saw is gone, or would have cost more than it gives.
            reason = lookup.reason or MissReason.NO_CHECKPOINT
        plan = choice.plan
        self._t.log.emit(
            EventKind.LOOKUP,
            reason=reason,
            boundary=choice.n_reused,
            common_prefix=lookup.common_prefix,
            tier=Tier.LIVE if choice.live else None if plan is None else plan.tier,
            slot=choice.slot.index,
            checkpoint=None if plan is None else int(plan.checkpoint),
            total_bytes=self._t.checkpoints.unique_bytes,
        )

    def _event_restore(self, admission: Admission, reason: str) -> None:
        plan = admission.restore
        self._t.log.emit(
            EventKind.RESTORE,
            reason=reason,
            checkpoint=None if plan is None else int(plan.checkpoint),
            slot=admission.lease.slot,
            boundary=admission.n_reused,
            tier=Tier.LIVE if plan is None else plan.tier,
            total_bytes=self._t.checkpoints.unique_bytes,
        )

    def _event_slot(self, slot: Slot, reason: str) -> int:
        event = self._t.log.emit(
            EventKind.SLOT,
            reason=reason,
            slot=slot.index,
            boundary=slot.n_tokens,
            total_bytes=self._t.checkpoints.unique_bytes,
        )
        return event.seq


def _admission(choice: Choice, lease: Lease, preserve: tuple[RowCopy, ...]) -> Admission:
    if choice.live:
        cut = choice.n_reused if choice.n_reused < choice.slot.n_tokens else None
        return Admission(lease, ReuseSource.LIVE, choice.n_reused, preserve, cut, None)
    if choice.plan is not None:
        source = ReuseSource.DISK if choice.plan.tier is Tier.DISK else ReuseSource.RAM
        return Admission(lease, source, choice.n_reused, preserve, choice.keep_rows, choice.plan)
    return Admission(lease, ReuseSource.NONE, 0, preserve, 0, None)


def _take_over(slot: Slot, prompt: PromptView) -> None:
    """From here on the slot computes for this prompt."""
    slot.scope, slot.inputs, slot.stable, slot.write = prompt.scope, prompt.inputs, prompt.stable, prompt.write
    slot.required = ()
    slot.state = SlotState.RUNNING
