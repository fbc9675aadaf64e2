"""Disk checkpoints in the one index, and RAM checkpoints on their way to disk; no I/O.

The index holds an entry (DISK, number) per durable checkpoint beside those of live slots and RAM, so
that one walk finds the deepest of all.  RAM and disk copies of one boundary are entries of their own:
evicting one leaves the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from gufo_gguf.cache.checkpoints import Checkpoint
from gufo_gguf.cache.chunks import Residence
from gufo_gguf.cache.events import EventKind
from gufo_gguf.cache.index import Entry
from gufo_gguf.cache.tables import Tables
from gufo_gguf.cache.types import (
    BufferId,
    CheckpointId,
    ChunkId,
    InputMark,
    MissReason,
    Origin,
    RowCopy,
    StateShape,
    Tier,
    Tokens,
)


@dataclass(frozen=True, slots=True)
class Export:
    """A RAM checkpoint's parts, for writing; chunks in row order with their backing buffers."""

    scope: str
    tokens: Tokens
    inputs: tuple[InputMark, ...]
    chunks: tuple[tuple[ChunkId, BufferId], ...]
    private: BufferId | None
    tail: BufferId | None
    logits: BufferId | None


@dataclass(slots=True)
class Known:
    """A durable checkpoint as the index knows it."""

    scope: str
    tokens: Tokens
    inputs: tuple[InputMark, ...]
    origin: Origin
    has_logits: bool
    last_use_seq: int


class Durable:
    """Owner thread only; a part of the manager that the disk tier talks to."""

    def __init__(self, tables: Tables) -> None:
        self._t = tables
        self._known: dict[int, Known] = {}
        self._next = 1
        self._pinned: dict[CheckpointId, Checkpoint] = {}

    @property
    def shape(self) -> StateShape:
        return self._t.shape

    # -- disk entries ----------------------------------------------------------------------------
    def add(
        self, scope: str, tokens: Tokens, inputs: tuple[InputMark, ...], origin: Origin, *, has_logits: bool
    ) -> int:
        """A checkpoint is durable: lookups find it from now on.  Returns its number, which is never reused."""
        number, self._next = self._next, self._next + 1
        self._known[number] = Known(scope, tokens, inputs, origin, has_logits, self._t.log.seq)
        self._t.index.insert(scope, tokens, Entry((Tier.DISK, number), len(tokens), has_logits, inputs))
        return number

    def remove(self, number: int, reason: MissReason) -> None:
        """It is gone from disk (or must not be used); the index remembers why."""
        if self._known.pop(number, None) is not None:
            self._t.index.remove((Tier.DISK, number), ghost=reason)

    def get(self, number: int) -> Known | None:
        return self._known.get(number)

    def touch(self, number: int) -> None:
        """It was restored from."""
        if number in self._known:
            self._known[number].last_use_seq = self._t.log.seq

    def covered(self, number: int) -> bool:
        """Does a deeper checkpoint on the same branch make this one an intermediate?"""
        return self._t.index.covered((Tier.DISK, number))

    def covered_now(self, number: int) -> bool:
        """The same, cheaper for one than for all."""
        return self._t.index.covered_now((Tier.DISK, number))

    def parent(self, number: int) -> int | None:
        """The deepest durable checkpoint that this one extends.

        It alone can become covered, or stop being it, when this one comes or goes.
        """
        key = self._t.index.parent((Tier.DISK, number))
        return None if key is None else key[1]

    def last_use(self, number: int) -> int:
        return self._known[number].last_use_seq

    def deepest(self, scope: str, tokens: Tokens, inputs: tuple[InputMark, ...]) -> int:
        """Tokens of the deepest durable checkpoint on this history, its end included; 0: none.  One walk."""
        return self._t.index.deepest(scope, tokens, inputs, Tier.DISK)

    def take_freed(self) -> list[ChunkId]:
        """Chunks that left RAM since the last call; their files, if any, stay."""
        return self._t.chunks.take_freed()

    # -- RAM checkpoints on their way ------------------------------------------------------------
    def export(self, checkpoint: CheckpointId) -> Export | None:
        """The parts of a retained checkpoint; None when it is not retained any more."""
        if checkpoint not in self._t.checkpoints:
            return None
        c = self._t.checkpoints.get(checkpoint)
        assert c is not None
        chunks = tuple((chunk, self._t.chunks.get(chunk).buffer) for chunk in c.parts.chunks)
        return Export(c.scope, c.tokens, c.inputs, chunks, c.parts.private, c.parts.tail, c.parts.logits)

    def refused(self, checkpoint: CheckpointId, n_tokens: int, origin: Origin, reason: str) -> None:
        """Log that a RAM checkpoint does not go to disk, and why."""
        self._t.log.emit(
            EventKind.REFUSE,
            reason=f"disk_{reason}",
            checkpoint=int(checkpoint),
            boundary=n_tokens,
            origin=origin,
            tier=Tier.DISK,
            total_bytes=self._t.checkpoints.unique_bytes,
        )

    def pin(self, checkpoint: CheckpointId) -> None:
        """Keep it (and its buffers' bytes) until ``unpin``."""
        c = self._t.checkpoints.get(checkpoint)
        if c is not None and checkpoint not in self._pinned:
            self._pinned[checkpoint] = c
            self._t.checkpoints.pin(c)

    def unpin(self, checkpoint: CheckpointId) -> None:
        c = self._pinned.pop(checkpoint, None)
        if c is not None:
            self._t.checkpoints.unpin(c)

    def pinned(self) -> tuple[CheckpointId, ...]:
        """Checkpoints that a write needs, for ``check``."""
        return tuple(self._pinned)

    def plan_preserve(self, checkpoint: CheckpointId, max_rows: int) -> tuple[RowCopy, ...]:
        """Some of its borrowed rows, to be copied to backing memory; of running slots too: rows never change."""
        if checkpoint not in self._t.checkpoints:
            return ()
        c = self._t.checkpoints.get(checkpoint)
        assert c is not None
        n = self._t.shape.chunk_rows
        copies: list[RowCopy] = []
        for ident in c.parts.chunks:
            chunk = self._t.chunks.get(ident)
            if chunk.residence is Residence.BORROWED and (not copies or (len(copies) + 1) * n <= max_rows):
                copies.append(RowCopy(chunk.id, min(chunk.homes), chunk.index * n, n, chunk.buffer))
        return tuple(copies)
