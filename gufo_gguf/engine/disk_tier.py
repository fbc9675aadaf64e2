"""The disk tier on the owner's side: what is written, and how a checkpoint comes back.

A checkpoint that should be written is pinned in RAM, its borrowed rows are preserved in pieces while
nothing runs, and then it is queued; the writer reads the very buffers the cache holds.

    captured ─► wanted ─► preserved ─► queued ─► durable (an entry of its own in the one index)
                  └ evicted meanwhile: dropped, logged

A restore streams from the files into the slot through a small buffer.  The slot then holds the
checkpoint's state; the capture that follows at that boundary makes it a RAM citizen under the normal
rules, and its chunks are bound to their files, so that later checkpoints write only what is new.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gufo_gguf.backend.base import Backend, Bytes, Logits
from gufo_gguf.cache.durable import Durable, Export
from gufo_gguf.cache.types import CheckpointId, ChunkId, Lease, MissReason, Origin, RestorePlan, Tokens
from gufo_gguf.core.cores import allowed_cores
from gufo_gguf.core.errors import StateRejected, StoreError
from gufo_gguf.engine.disk_writer import DiskWriter
from gufo_gguf.engine.pool import BufferPool
from gufo_gguf.store.catalogue import DiskRecord
from gufo_gguf.store.disk import DiskStore
from gufo_gguf.store.jobs import ChunkJob, Outcome, Progress, WriteJob, WriteResult
from gufo_gguf.store.reader import Piece
from gufo_gguf.store.types import BufferSource, CheckpointMeta, Damage, PartKind

log = logging.getLogger("gufo.disk")

_MAX_WANTED = 8

_NEWEST = (1, 1 << 62)
"""Rank of a checkpoint that became durable and that the owner has not heard of yet."""

_N_READERS = max(2, min(allowed_cores() // 2, 6))
"""Threads that read and hash during a restore; the model waits for it, and its threads with it."""


@dataclass(slots=True)
class _Write:
    checkpoint: CheckpointId
    scope: str
    tokens: Tokens
    origin: Origin
    job: int | None = None
    """Number in the writer's queue, once known."""


def _begins(tokens: Tokens, other: Tokens) -> bool:
    """Does ``tokens`` begin with all of ``other``?"""
    return len(other) <= len(tokens) and np.array_equal(other, tokens[: len(other)])


class DiskTier:
    """Owner thread only, but for ``deliver`` and ``rank``, which the writer's thread calls."""

    def __init__(
        self,
        store: DiskStore,
        durable: Durable,
        backend: Backend,
        pool: BufferPool,
        labels: dict[str, str],
        to_owner: Callable[[Callable[[], None]], None],
        *,
        spacing: int,
        staging_bytes: int,
        queue_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._durable = durable
        self._backend = backend
        self._pool = pool
        self._labels = labels
        self._to_owner = to_owner
        self._spacing = spacing
        self._staging_bytes = staging_bytes
        self._staging: Bytes | None = None
        """The backend's memory (pinned, on a device) that restores stream through; made by the first."""
        self._clock = clock
        self._wanted: list[_Write] = []
        self._queued: list[_Write] = []
        self._skipped: list[tuple[CheckpointId, str, Tokens]] = []
        """Newest prompt checkpoint per history that spacing kept off the disk; written at shutdown."""
        self._of_number: dict[int, DiskRecord] = {}
        self._number_of: dict[str, int] = {}
        self._order: dict[str, tuple[int, int]] = {}
        self._restored: tuple[DiskRecord, int, Lease] | None = None
        self.writer: DiskWriter | None = None
        self.queue = store.writer(self.rank, staging_bytes=staging_bytes, queue_bytes=queue_bytes)
        self.counters = {
            "disk_writes_total": 0,
            "disk_restores_total": 0,
            "disk_damage_total": 0,
            "disk_refused_total": 0,
        }

    # -- start-up --------------------------------------------------------------------------------
    def load(self) -> int:
        """Put every intact checkpoint into the index; returns how many.  Reads manifests and sizes only."""
        for found in self._store.load():
            if isinstance(found, Damage):
                log.warning("disk cache: %s", found)
                self.counters["disk_damage_total"] += 1
            else:
                self._add(found.record, found.tokens)
        self._rank_all()
        self.queue.sweep()
        return len(self._of_number)

    def _add(self, record: DiskRecord, tokens: Tokens) -> int:
        number = self._durable.add(record.scope, tokens, record.inputs, record.origin, has_logits=record.has_logits)
        self._of_number[number] = record
        self._number_of[record.key] = number
        return number

    def _forget(self, record: DiskRecord, reason: MissReason) -> None:
        number = self._number_of.pop(record.key, None)
        if number is not None:
            parent = self._durable.parent(number)
            del self._of_number[number]
            self._durable.remove(number, reason)
            self._order.pop(record.key, None)
            self._rank(parent)

    # -- what is written -------------------------------------------------------------------------
    def captured(self, checkpoint: CheckpointId, origin: Origin, lease: Lease) -> None:
        """A checkpoint was admitted to RAM: decide whether it goes to disk, and bind what came from there."""
        parts = self._durable.export(checkpoint)
        if parts is None:
            return
        if self._restored is not None and self._restored[2] == lease and len(parts.tokens) >= self._restored[1]:
            record, _, _ = self._restored
            pairs = [(int(chunk), ref.key) for (chunk, _), ref in zip(parts.chunks, record.chunks, strict=False)]
            self._post(lambda: self._bind(pairs))
            self._restored = None
        if origin not in (Origin.PROMPT, Origin.SYSTEM, Origin.LEARNED, Origin.FRONTIER):
            return
        n = len(parts.tokens)
        before = self._deepest(parts)
        if before == n:  # the state after exactly these tokens
            self._durable.refused(checkpoint, n, origin, "there_already")
            return
        if origin in (Origin.PROMPT, Origin.SYSTEM) and before > max(0, n - self._spacing):
            self._durable.refused(checkpoint, n, origin, "spacing")
            self._drop_skipped(parts.scope, parts.tokens)
            self._skipped = [*self._skipped[-63:], (checkpoint, parts.scope, parts.tokens)]
            return
        self._want(checkpoint, parts.scope, parts.tokens, origin)

    def _bind(self, pairs: list[tuple[int, str]]) -> None:
        for chunk, key in pairs:
            self.queue.bind(chunk, key)

    def freed(self, chunks: Sequence[ChunkId]) -> None:
        """Chunks left RAM: what file they came from or went to need not be known any more."""

        def unbind() -> None:
            for chunk in chunks:
                self.queue.unbind(int(chunk))

        self._post(unbind)

    def _deepest(self, parts: Export) -> int:
        """Tokens of the deepest checkpoint of this history that is on disk or waits for it; 0: none."""
        deepest = self._durable.deepest(parts.scope, parts.tokens, parts.inputs)
        for w in self._wanted + self._queued:
            if w.scope == parts.scope and len(w.tokens) > deepest and _begins(parts.tokens, w.tokens):
                deepest = len(w.tokens)
        return deepest

    def _want(self, checkpoint: CheckpointId, scope: str, tokens: Tokens, origin: Origin) -> None:
        # a newer checkpoint of the same history makes a pending prompt checkpoint needless
        for old in [w for w in self._wanted if w.scope == scope and w.origin is Origin.PROMPT]:
            if _begins(tokens, old.tokens):
                self._release(self._wanted, old)
        if len(self._wanted) >= _MAX_WANTED:
            self._release(self._wanted, self._wanted[0])
        self._durable.pin(checkpoint)
        self._wanted.append(_Write(checkpoint, scope, tokens, origin))
        self._drop_skipped(scope, tokens)

    def _drop_skipped(self, scope: str, tokens: Tokens) -> None:
        """A newer checkpoint of the same history stands for the skipped ones before it."""
        self._skipped = [s for s in self._skipped if s[1] != scope or not _begins(tokens, s[2])]

    def _release(self, where: list[_Write], write: _Write) -> None:
        where.remove(write)
        self._durable.unpin(write.checkpoint)

    def step(self, preserve: Callable[[CheckpointId], bool]) -> bool:
        """One bounded piece of preparing a write; False when there is nothing to prepare.

        ``preserve`` copies some borrowed rows of a checkpoint and says whether there were any.
        """
        if not self._wanted:
            return False
        write = self._wanted[0]
        parts = self._durable.export(write.checkpoint)
        if parts is None:
            self._release(self._wanted, write)
        elif not preserve(write.checkpoint):
            self._wanted.remove(write)
            self._enqueue(write)
        return True

    def _enqueue(self, write: _Write) -> None:
        parts = self._durable.export(write.checkpoint)
        assert parts is not None, "a pinned checkpoint is gone"
        shape = self._durable.shape

        def source(buffer: int | None, n_bytes: int) -> BufferSource | None:
            if buffer is None:
                return None
            return BufferSource(memoryview(self._pool.get(buffer, n_bytes)))  # type: ignore[arg-type]

        chunks = []
        for chunk, buffer in parts.chunks:
            held = source(buffer, shape.chunk_bytes)
            assert held is not None
            chunks.append(ChunkJob(int(chunk), held))
        tail_rows = len(parts.tokens) % shape.chunk_rows if shape.row_bytes else 0
        job = WriteJob(
            meta=CheckpointMeta(
                scope=parts.scope,
                tokens=parts.tokens,
                origin=write.origin,
                chunk_rows=shape.chunk_rows,
                row_bytes=shape.row_bytes,
                inputs=parts.inputs,
                created_s=int(self._clock()),
                labels=self._labels,
            ),
            chunks=tuple(chunks),
            private=source(parts.private, shape.private_bytes),
            tail=source(parts.tail, tail_rows * shape.row_bytes),
            logits=source(parts.logits, shape.logits_bytes),
        )
        covered = [
            w
            for w in self._queued
            if w.scope == write.scope and w.origin is Origin.PROMPT and _begins(write.tokens, w.tokens)
        ]
        self._queued.append(write)

        def put() -> None:  # on the writer's thread
            number = self.queue.enqueue(job, supersedes=[w.job for w in covered if w.job is not None])
            if isinstance(number, Outcome):
                self._to_owner(lambda: self._ended(write, number))
            else:
                write.job = number

        self._post(put)

    def deliver(self, progress: Progress) -> None:
        """From the writer's thread: what its steps brought about."""
        self._to_owner(lambda: self._progress(progress))

    def _progress(self, progress: Progress) -> None:
        for record in progress.retired:
            self._forget(record, MissReason.EVICTED)
        for outcome in progress.outcomes:
            write = next((w for w in self._queued if w.job == outcome.job), None)
            if write is not None:
                self._ended(write, outcome)

    def _ended(self, write: _Write, outcome: Outcome) -> None:
        if write in self._queued:
            self._release(self._queued, write)
        if outcome.result is WriteResult.DURABLE:
            assert outcome.record is not None
            self.counters["disk_writes_total"] += 1
            number = self._add(outcome.record, write.tokens)
            self._rank(number)
            self._rank(self._durable.parent(number))
        elif outcome.result is not WriteResult.SUPERSEDED:
            self.counters["disk_refused_total"] += 1
            self._durable.refused(write.checkpoint, len(write.tokens), write.origin, outcome.result)
            level = logging.WARNING if outcome.result in (WriteResult.FAILED, WriteResult.TOO_LARGE) else logging.INFO
            log.log(
                level, "checkpoint at %d not written to disk: %s %s", len(write.tokens), outcome.result, outcome.detail
            )

    # -- how it comes back -----------------------------------------------------------------------
    def restore(self, lease: Lease, plan: RestorePlan, tokens: Tokens) -> Logits | None:
        """Stream a checkpoint into the slot; returns its stored logits, if any.

        Raises StateRejected when a file is damaged (the checkpoint and all that need the file are gone
        from the index then) and StoreError when it vanished meanwhile.
        """
        record = self._of_number.get(int(plan.checkpoint))
        if record is None or self._store.catalogue.pin_record(record.key) is None:
            raise StoreError("the checkpoint is no longer on disk")
        try:
            return self._stream(lease, plan, tokens, record)
        except StateRejected:  # its files may be whole and still not be a state of this layout
            self._forget(record, MissReason.QUARANTINED)
            raise
        finally:
            self._store.catalogue.unpin_record(record)

    def _stream(self, lease: Lease, plan: RestorePlan, tokens: Tokens, record: DiskRecord) -> Logits | None:
        backend, slot, rows, n = self._backend, lease.slot, record.chunk_rows, plan.n_tokens
        full, rest = divmod(n, rows) if record.row_bytes else (0, 0)
        whole = n == record.n_tokens
        cut_in_chunk = not whole and rest > 0 and full < len(record.chunks)
        kinds = frozenset(PartKind) if whole else frozenset((PartKind.CHUNK, PartKind.TAIL))
        if not whole and (cut_in_chunk or rest == 0):
            kinds = frozenset((PartKind.CHUNK,))
        backend.begin_restore(slot, tokens[:n], trusted=True)
        logits = np.empty(record.private.logits.n_bytes, np.uint8)
        if self._staging is None:
            self._staging = backend.alloc(self._staging_bytes)
        staging = memoryview(self._staging)
        with self._store.restore(
            record,
            end_chunk=full + cut_in_chunk,
            kinds=kinds,
            staging_bytes=self._staging_bytes,
            staging=staging,
            threads=_N_READERS,
        ) as pieces:
            for piece in pieces:
                if isinstance(piece, Damage):
                    self._damaged(piece)
                    raise StateRejected(f"disk cache: {piece}")
                self._load(slot, piece, rows, n, logits)
        backend.finish_restore(slot)
        self.counters["disk_restores_total"] += 1
        self._durable.touch(int(plan.checkpoint))
        self._rank(int(plan.checkpoint))
        self._restored = (record, n, lease) if whole else None
        return logits.view(np.float32) if whole and logits.size else None

    def _load(self, slot: int, piece: Piece, rows: int, n: int, logits: Bytes) -> None:
        data = np.frombuffer(piece.data, dtype=np.uint8)
        if piece.part.kind is PartKind.CHUNK:
            first = piece.part.index * rows
            self._backend.load_row_bytes(slot, first, min(rows, n - first), rows, piece.offset, data)
        elif piece.part.kind is PartKind.TAIL:
            first = n // rows * rows
            tail_rows = piece.part.n_bytes // self._durable.shape.row_bytes
            self._backend.load_row_bytes(slot, first, n - first, tail_rows, piece.offset, data)
        elif piece.part.kind is PartKind.PRIVATE:
            self._backend.load_private_bytes(slot, piece.offset, data)
        else:
            logits[piece.offset : piece.offset + data.nbytes] = data

    def _damaged(self, damage: Damage) -> None:
        log.warning("disk cache: %s; every checkpoint that needs it is quarantined", damage)
        self.counters["disk_damage_total"] += 1
        key = damage.name.rpartition(".")[0]
        for record in list(self._of_number.values()):
            if record.key == key or record.private.key == key or any(ref.key == key for ref in record.chunks):
                self._forget(record, MissReason.QUARANTINED)
        self._post(lambda: self._quarantine(damage))

    def _quarantine(self, damage: Damage) -> None:
        self.queue.quarantine(damage)

    # -- eviction order --------------------------------------------------------------------------
    def rank(self, record: DiskRecord) -> tuple[int, int] | None:
        """From the writer's thread: covered intermediates first, then least recently used."""
        return self._order.get(record.key, _NEWEST)

    def _rank(self, number: int | None) -> None:
        """One that came, was used, or has another below it: ranking all anew would cost each write a pause."""
        if number is not None:
            covered = self._durable.covered_now(number)
            self._order[self._of_number[number].key] = (int(not covered), self._durable.last_use(number))

    def _rank_all(self) -> None:
        self._order = {
            record.key: (int(not self._durable.covered(number)), self._durable.last_use(number))
            for number, record in self._of_number.items()
        }

    # -- shutdown and reports --------------------------------------------------------------------
    @property
    def holds_back(self) -> bool:
        """Is there a newest boundary that only spacing keeps off the disk?"""
        return bool(self._skipped)

    def want_newest(self) -> None:
        """Want the newest boundaries, whatever their spacing: before a shutdown, or when idle for long.

        As many as may be wanted at once, the latest first; the others stay held back.
        """
        while self._skipped and len(self._wanted) < _MAX_WANTED:
            checkpoint, scope, tokens = self._skipped.pop()
            if self._durable.export(checkpoint) is not None:
                self._want(checkpoint, scope, tokens, Origin.PROMPT)

    def status(self) -> dict[str, object]:
        """Numbers for ``/v1/cache``; sizes in bytes."""
        usage = self._store.catalogue.usage()
        return {
            "folder": self._store.fs.root,
            "budget_bytes": self._store.catalogue.budget_bytes,
            "used_bytes": usage.used_bytes,
            "checkpoints": len(self._of_number),
            "waiting": len(self._wanted) + len(self._queued),
            "suspended": self.queue.suspended,
            **self.counters,
        }

    def close(self, drain_s: float) -> None:
        """Give the writer drain_s seconds for what is queued, then leave the folder to others."""
        if self.writer is not None and not self.writer.stop(drain_s):
            log.warning("the disk queue was not empty after %.1f s; what was not written is lost to a restart", drain_s)
        self._store.close()

    def _post(self, action: Callable[[], None]) -> None:
        assert self.writer is not None
        self.writer.post(action)
