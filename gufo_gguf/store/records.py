"""What the catalogue keeps and answers with: records, files, plans, usage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gufo_gguf.cache.types import InputMark, Origin
from gufo_gguf.store.manifest import ChunkTable, Manifest
from gufo_gguf.store.types import DamageReason, PrivateFile


class DiskRecord(NamedTuple):
    """One checkpoint on disk, without its tokens: those are the index's, or read again."""

    key: str
    sequence: int
    scope: str
    origin: Origin
    n_tokens: int
    inputs: tuple[InputMark, ...]
    chunk_rows: int
    row_bytes: int
    created_s: int
    labels: Mapping[str, str]
    chunks: ChunkTable
    private: PrivateFile
    manifest_bytes: int
    """Blocks of the manifest."""

    @property
    def has_logits(self) -> bool:
        return self.private.logits.n_bytes > 0

    @classmethod
    def of(cls, m: Manifest, manifest_bytes: int) -> DiskRecord:
        meta = m.meta
        return cls(
            m.key, m.sequence, meta.scope, meta.origin, meta.n_tokens, meta.inputs, meta.chunk_rows,
            meta.row_bytes, meta.created_s, meta.labels, m.chunks, m.private, manifest_bytes,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class FileState:
    """One published chunk or private file; equal to itself alone."""

    suffix: str
    n_bytes: int
    disk_bytes: int
    checksum: bytes | None = None
    """Of chunks, once a manifest has said it."""
    refs: int = 0
    pins: int = 0
    lasting: bool = False
    """Its name survives a power cut: the folder was synced after it got there."""
    bad: bool = False
    """Found damaged: never referenced again, gone with its last reference."""


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """Retiring these, in this order, makes room; empty = there is room already."""

    victims: tuple[DiskRecord, ...]
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class Shortfall:
    """No set of victims makes room."""

    need_bytes: int
    free_bytes: int
    """What could be had if everything evictable went."""
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes are blocks; reserved bytes belong to writes under way."""

    n_checkpoints: int
    n_files: int
    manifest_bytes: int
    file_bytes: int
    debris_bytes: int
    reserved_bytes: int
    budget_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.manifest_bytes + self.file_bytes + self.debris_bytes + self.reserved_bytes


@dataclass(frozen=True, slots=True)
class Damaged:
    """A file that is not as a manifest lists it."""

    key: str
    suffix: str
    reason: DamageReason


Rank = Callable[[DiskRecord], Any]
"""Sort key of the victims' order, smallest goes first; None = never a victim."""
