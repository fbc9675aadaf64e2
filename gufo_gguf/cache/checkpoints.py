"""Checkpoints: a whole state at one exact boundary, made of shared chunks and parts of its own.

    0 ........ C ........ 2C ........ boundary
    [ chunk a )[ chunk b  )[   tail   )          + private state + (prompt end) next-token logits
      shared     shared       own                  own

The table is the only place that adds or removes one, so that index, chunk references, ledger and
events change together.  Unique bytes of the retained set are counted here: a chunk counts with the
first retained checkpoint that needs it and stops with the last.

Rejected: a checkpoint that owns rows (six of one conversation would cost six copies of its rows).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gufo_gguf.cache.buffers import Buffers
from gufo_gguf.cache.chunks import ChunkTable
from gufo_gguf.cache.events import EventKind, EventLog
from gufo_gguf.cache.index import Entry, Key, PrefixIndex
from gufo_gguf.cache.ledger import Account, InvariantBroken, Ledger
from gufo_gguf.cache.retention import RetentionRecord
from gufo_gguf.cache.types import (
    BY_WORTH,
    BufferId,
    CheckpointId,
    ChunkId,
    InputMark,
    MissReason,
    Origin,
    StateShape,
    Tier,
    Tokens,
)


@dataclass(frozen=True, slots=True)
class Parts:
    """What one checkpoint, or one open capture, holds; each has a charge in the ledger."""

    chunks: tuple[ChunkId, ...]
    private: BufferId | None
    tail: BufferId | None
    tail_rows: int
    logits: BufferId | None


@dataclass(slots=True)
class Checkpoint:
    id: CheckpointId
    scope: str
    tokens: Tokens
    """Exactly the tokens of the state: its length is the boundary."""
    inputs: tuple[InputMark, ...]
    origin: Origin
    parts: Parts
    lasting: bool = False
    """The boundary outlasts the turn (see ``index.Entry.anchor``)."""
    last_use_seq: int = 0
    admitted_bytes_at_last_use: int = 0
    reuses: int = 0
    pins: int = 0
    """Running restores from it: never a victim meanwhile."""

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def key(self) -> Key:
        return (Tier.RAM, int(self.id))


def marks_before(inputs: Iterable[InputMark], n_tokens: int) -> tuple[InputMark, ...]:
    """The non-text inputs that lie in the first n tokens."""
    return tuple(mark for mark in inputs if mark.position < n_tokens)


class CheckpointTable:
    """The retained RAM checkpoints."""

    def __init__(
        self,
        shape: StateShape,
        ledger: Ledger,
        buffers: Buffers,
        chunks: ChunkTable,
        index: PrefixIndex,
        log: EventLog,
    ) -> None:
        self._shape = shape
        self._ledger = ledger
        self._buffers = buffers
        self._chunks = chunks
        self._index = index
        self._log = log
        self._by_id: dict[CheckpointId, Checkpoint] = {}
        self.leaving: dict[CheckpointId, Checkpoint] = {}
        """Removed while a restore read from them: out of index and count, their parts live until unpinned."""
        self._needed_by: dict[ChunkId, int] = {}
        """Retained checkpoints per chunk (open captures not counted)."""
        self.unique_bytes = 0
        """Bytes of the retained set, shared chunks once."""
        self.admitted_bytes = 0
        """Running total of unique bytes ever admitted: the clock of retention."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, checkpoint: CheckpointId) -> bool:
        return checkpoint in self._by_id

    def get(self, checkpoint: CheckpointId) -> Checkpoint | None:
        return self._by_id.get(checkpoint)

    def all(self) -> list[Checkpoint]:
        """In order of admission."""
        return list(self._by_id.values())

    # -- life ------------------------------------------------------------------------------------
    def admit(self, new: Checkpoint) -> None:
        """Retain a filled checkpoint.  An equal one of another computation is replaced: for the same
        tokens one restore point is enough, and later captures share chunks with the newer."""
        for old in self.equal(new.scope, new.tokens, new.inputs):
            if not old.pins:
                new.origin = max(new.origin, old.origin, key=BY_WORTH.index)
                new.lasting = new.lasting or old.lasting
                new.reuses = max(new.reuses, old.reuses)
                self.remove(old.id, "replaced")
        if new.id in self._by_id:
            raise InvariantBroken(f"checkpoint {new.id} is admitted twice")
        self._by_id[new.id] = new
        added = self._own_bytes(new.parts)
        for chunk in new.parts.chunks:
            count = self._needed_by.get(chunk, 0)
            self._needed_by[chunk] = count + 1
            if count == 0:
                added += self._chunks.chunk_bytes
        self.unique_bytes += added
        self.admitted_bytes += added
        entry = Entry(
            new.key,
            new.n_tokens,
            has_logits=new.parts.logits is not None,
            inputs=new.inputs,
            anchor=new.lasting,
            covers=new.origin is not Origin.RETRY,
        )
        self._index.insert(new.scope, new.tokens, entry)
        parent = self._index.parent(new.key)
        event = self._log.emit(
            EventKind.ADMIT,
            checkpoint=int(new.id),
            boundary=new.n_tokens,
            origin=new.origin,
            parent=None if parent is None else parent[1],
            n_bytes=added,
            total_bytes=self.unique_bytes,
        )
        new.last_use_seq = event.seq
        new.admitted_bytes_at_last_use = self.admitted_bytes

    def remove(self, checkpoint: CheckpointId, reason: str, *, ghost: MissReason | None = None) -> int:
        """Forget a checkpoint; returns the unique bytes that its removal takes off the retained set."""
        old = self._by_id.pop(checkpoint, None)
        if old is None:
            raise InvariantBroken(f"checkpoint {checkpoint} is removed twice")
        self._index.remove(old.key, ghost=ghost)
        freed = self._own_bytes(old.parts)
        for chunk in old.parts.chunks:
            self._needed_by[chunk] -= 1
            if self._needed_by[chunk] == 0:
                del self._needed_by[chunk]
                freed += self._chunks.chunk_bytes
        if old.pins:
            self.leaving[checkpoint] = old
        else:
            self.free(old.parts)
        self.unique_bytes -= freed
        self._log.emit(
            EventKind.REMOVE,
            reason=reason,
            checkpoint=int(checkpoint),
            boundary=old.n_tokens,
            origin=old.origin,
            n_bytes=freed,
            total_bytes=self.unique_bytes,
        )
        return freed

    def free(self, parts: Parts) -> None:
        """Give back what a checkpoint or an open capture held."""
        self._chunks.unref(parts.chunks)
        for account, buffer in (
            (Account.PRIVATE, parts.private),
            (Account.TAIL, parts.tail),
            (Account.LOGITS, parts.logits),
        ):
            if buffer is not None:
                self._ledger.release(account, self._buffers.size(buffer))
                self._buffers.free(buffer)

    def pin(self, checkpoint: Checkpoint) -> None:
        """A plan names its buffers: they must live until ``unpin``, and it is no victim meanwhile."""
        checkpoint.pins += 1

    def unpin(self, checkpoint: Checkpoint) -> None:
        if checkpoint.pins <= 0:
            raise InvariantBroken(f"checkpoint {checkpoint.id} is not pinned")
        checkpoint.pins -= 1
        if checkpoint.pins == 0 and self.leaving.pop(checkpoint.id, None) is not None:
            self.free(checkpoint.parts)

    def touch(self, checkpoint: CheckpointId, reason: str) -> None:
        """Count one use; ``reason`` names it."""
        used = self._by_id.get(checkpoint)
        if used is None:
            return
        event = self._log.emit(
            EventKind.TOUCH,
            reason=reason,
            checkpoint=int(checkpoint),
            boundary=used.n_tokens,
            total_bytes=self.unique_bytes,
        )
        used.last_use_seq = event.seq
        used.admitted_bytes_at_last_use = self.admitted_bytes
        used.reuses += 1

    # -- questions -------------------------------------------------------------------------------
    def equal(self, scope: str, tokens: Tokens, inputs: tuple[InputMark, ...]) -> list[Checkpoint]:
        """Retained checkpoints of the same scope, tokens and inputs, whatever computed them."""
        n = len(tokens)
        return [
            c
            for c in self._by_id.values()
            if c.n_tokens == n and c.scope == scope and c.inputs == inputs and np.array_equal(c.tokens, tokens)
        ]

    def needing(self, chunks: Iterable[ChunkId]) -> list[Checkpoint]:
        wanted = set(chunks)
        return [c for c in self._by_id.values() if not wanted.isdisjoint(c.parts.chunks)]

    def records(self, *, slots_keep: bool = False) -> list[RetentionRecord]:
        """What retention decides on.  ``slots_keep``: say which conversations idle slots hold (``held``)."""
        held = self._index.held() if slots_keep else set()
        return [self._record(c, held) for c in self._by_id.values()]

    def frees(self, victims: Sequence[CheckpointId], n_bytes: int) -> bool:
        """Would removing victims, one after the other, give the ledger back n_bytes?  Stops when it has."""
        left: dict[ChunkId, int] = {}
        freed = 0
        for victim in victims:
            if freed >= n_bytes:
                return True
            parts = self._by_id[victim].parts
            freed += self._own_bytes(parts)
            for chunk in parts.chunks:
                refs = left.get(chunk)
                left[chunk] = refs = (self._chunks.get(chunk).refs if refs is None else refs) - 1
                if refs == 0:
                    freed += self._chunks.chunk_bytes
        return freed >= n_bytes

    def _own_bytes(self, parts: Parts) -> int:
        own = (parts.private, parts.tail, parts.logits)
        return sum(self._buffers.size(buffer) for buffer in own if buffer is not None)

    def _record(self, c: Checkpoint, held: set[Key]) -> RetentionRecord:
        key = c.key
        relation = self._index.relation(key)
        parent = None if relation.parent is None else self._by_id[CheckpointId(relation.parent[1])]
        return RetentionRecord(
            id=c.id,
            origin=c.origin,
            n_tokens=c.n_tokens,
            private_bytes=self._shape.private_bytes,
            row_bytes=c.n_tokens * self._shape.row_bytes,
            last_use_seq=c.last_use_seq,
            admitted_bytes_at_last_use=c.admitted_bytes_at_last_use,
            reuses=c.reuses,
            covered=relation.covered,
            branch_point=relation.branch_point,
            family=relation.family,
            parent=None if parent is None else parent.id,
            after_anchor=parent is not None and parent.lasting,
            pinned=c.pins > 0,
            held=key in held,
        )
