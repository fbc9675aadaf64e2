"""What the write queue takes in and gives back: jobs, outcomes, progress."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum

from gufo_gguf.store.catalogue import DiskRecord
from gufo_gguf.store.manifest import meta_problem
from gufo_gguf.store.types import ByteSource, CheckpointMeta


class WriteResult(StrEnum):
    DURABLE = "durable"
    SUPERSEDED = "superseded"
    TOO_LARGE = "too_large"
    """More than the whole budget, or nothing evictable makes room."""
    QUEUE_FULL = "queue_full"
    SOURCE_GONE = "source_gone"
    ABANDONED = "abandoned"
    """The caller emptied the queue (shutdown)."""
    FAILED = "failed"
    """The file system refused; the writer is suspended."""
    SUSPENDED = "suspended"


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """A full chunk: ``chunk`` is the cache's id of it, equal ids are the same bytes."""

    chunk: Hashable
    source: ByteSource


@dataclass(frozen=True, slots=True, eq=False)
class WriteJob:
    """One checkpoint to be written; chunks in row order.  None = the section is absent."""

    meta: CheckpointMeta
    chunks: tuple[ChunkJob, ...]
    private: ByteSource | None
    tail: ByteSource | None
    logits: ByteSource | None

    @property
    def private_bytes(self) -> int:
        return sum(s.n_bytes for s in (self.private, self.tail, self.logits) if s is not None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.  ``record`` exactly when DURABLE; retired: checkpoints that went to make room."""

    job: int
    result: WriteResult
    detail: str = ""
    record: DiskRecord | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did."""

    n_bytes: int
    """Payload bytes written."""
    outcomes: tuple[Outcome, ...]
    retired: tuple[DiskRecord, ...]
    """Checkpoints that are no longer on disk: the index must forget them."""
    idle: bool


def misfit(job: WriteJob) -> str | None:
    """Why these sources cannot be this checkpoint; None = they fit."""
    meta = job.meta
    if len(job.chunks) != meta.n_chunks or any(c.source.n_bytes != meta.chunk_bytes for c in job.chunks):
        return f"{len(job.chunks)} chunks for {meta.n_tokens} tokens, {meta.n_chunks} of {meta.chunk_bytes} bytes due"
    tail = 0 if job.tail is None else job.tail.n_bytes
    if tail != meta.tail_bytes:
        return f"a tail of {tail} bytes where {meta.tail_bytes} are due"
    return meta_problem(meta)


def manifest_estimate(job: WriteJob) -> int:
    """An upper bound of the manifest's length."""
    texts = sum(len(t) * 4 + 12 for pair in job.meta.labels.items() for t in pair)
    marks = sum(len(i.digest) * 4 + 20 for i in job.meta.inputs)
    return 512 + 4 * job.meta.n_tokens + 40 * len(job.chunks) + 4 * len(job.meta.scope) + texts + marks
