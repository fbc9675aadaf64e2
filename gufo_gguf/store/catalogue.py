"""What lies in the folder, by references and blocks; mechanism without policy and without I/O.

    checkpoint record ──refs──► chunk files (counted once, however many records need them)
                      └───────► its private file

A record is visible (``records``) from the moment its manifest is durable until its retirement
begins.  In between retirement and the synced removal of its manifest it is *in limbo*: served no
more, its files kept, because a power cut may still bring the manifest back.  A file goes when its
references (manifests that exist or may exist) and its pins (a running write or restore) are both 0.

Bytes are counted in blocks, temporary files and debris included; a write reserves its blocks before
the first byte.  Which checkpoint is worth least is the caller's ``rank``; the catalogue only says
what going down that list would free.

Called by the owner thread (lookups, pins) and by whoever steps the writer: every method takes the
lock for a moment and none does I/O under it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from gufo_gguf.store.fs import Entry
from gufo_gguf.store.layout import FileClass
from gufo_gguf.store.manifest import ChunkTable, Manifest
from gufo_gguf.store.records import Damaged, DiskRecord, EvictionPlan, FileState, Rank, Shortfall, Usage
from gufo_gguf.store.types import DamageReason, FileRef

__all__ = ["Catalogue", "Damaged", "DiskRecord", "EvictionPlan", "FileState", "Rank", "Shortfall", "Usage"]


class Catalogue:
    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._lock = threading.RLock()
        self._records: dict[str, DiskRecord] = {}
        self._limbo: dict[str, DiskRecord] = {}
        self._hidden: dict[str, DiskRecord] = {}
        self._files: dict[str, FileState] = {}
        self._listed: dict[bytes, FileState] = {}
        """The same chunk files by the 40 bytes a manifest lists them with: one look-up checks all."""
        self._debris: dict[tuple[str, str], int] = {}
        self._reserved = 0
        self._sequence = 0
        self._held: set[str] = set()
        """Unlisted files an unreadable manifest may need: not reclaimed in this run."""

    # -- reading ---------------------------------------------------------------------------------
    def records(self) -> list[DiskRecord]:
        """All visible checkpoints, oldest first."""
        with self._lock:
            return sorted(self._records.values(), key=lambda r: r.sequence)

    def get(self, key: str) -> DiskRecord | None:
        with self._lock:
            return self._records.get(key)

    def usage(self) -> Usage:
        with self._lock:
            return Usage(
                len(self._records),
                len(self._files),
                sum(r.manifest_bytes for held in self._all() for r in held.values()),
                sum(f.disk_bytes for f in self._files.values()),
                sum(self._debris.values()),
                self._reserved,
                self.budget_bytes,
            )

    def file(self, key: str) -> FileState | None:
        with self._lock:
            return self._files.get(key)

    def usable_chunk(self, key: str) -> FileRef | None:
        """A chunk file that a new checkpoint may reference."""
        with self._lock:
            f = self._files.get(key)
            if f is None or f.bad or f.suffix != FileClass.CHUNK or f.checksum is None:
                return None
            return FileRef(key, f.n_bytes, f.checksum)

    def dependents(self, key: str) -> list[DiskRecord]:
        """Visible checkpoints that need this file, oldest first."""
        with self._lock:
            return [r for r in self.records() if key in _file_keys(r)]

    def shares(self, record: DiskRecord) -> tuple[int, int]:
        """(bytes only this checkpoint holds, bytes it shares), in blocks."""
        unique, shared = record.manifest_bytes, 0
        with self._lock:
            for key in _file_keys(record):
                f = self._files.get(key)
                if f is not None and f.refs > 1:
                    shared += f.disk_bytes
                elif f is not None:
                    unique += f.disk_bytes
        return unique, shared

    # -- start-up --------------------------------------------------------------------------------
    def found_files(self, suffix: str, found: Iterable[tuple[str, Entry]]) -> None:
        """(key, entry) of the chunk or private files that a folder listing shows; not referenced yet."""
        with self._lock:
            for key, entry in found:
                self._files.setdefault(key, FileState(suffix, entry.n_bytes, entry.disk_bytes))

    def found_debris(self, folder: str, name: str, disk_bytes: int) -> None:
        """A file of ours that nothing can need: to be removed, counted until it is."""
        with self._lock:
            self._debris[(folder, name)] = disk_bytes

    def hold_unlisted(self) -> None:
        """A manifest could not be read: what only it may list must survive this run."""
        with self._lock:
            self._held.update(k for k, f in self._files.items() if f.refs == 0)

    # -- a checkpoint comes ----------------------------------------------------------------------
    def next_sequence(self) -> int:
        with self._lock:
            self._sequence += 1
            return self._sequence

    def admit(self, m: Manifest, manifest_bytes: int) -> DiskRecord | Damaged:
        """An intact manifest was read: show its checkpoint if all its files are there as listed."""
        with self._lock:
            entries, private = m.chunks.entries(), m.private
            try:
                states = [self._listed[entry] for entry in entries]
            except KeyError:
                for i, entry in enumerate(entries):
                    wrong = self._list(entry, m.chunks[i]) if entry not in self._listed else None
                    if wrong is not None:
                        return wrong
                states = [self._listed[entry] for entry in entries]
            f = self._files.get(private.key)
            if f is None or f.suffix != FileClass.PRIVATE:
                return Damaged(private.key, FileClass.PRIVATE, DamageReason.MISSING)
            if f.n_bytes != private.n_bytes:
                return Damaged(private.key, FileClass.PRIVATE, DamageReason.SIZE)
            record = DiskRecord.of(m, manifest_bytes)
            states.append(f)
            self._show(record, states)
            return record

    def _list(self, entry: bytes, ref: FileRef) -> Damaged | None:
        """A manifest lists this chunk: remember it as it is listed, or say what contradicts that."""
        f = self._files.get(ref.key)
        if f is None or f.suffix != FileClass.CHUNK:
            return Damaged(ref.key, FileClass.CHUNK, DamageReason.MISSING)
        if f.n_bytes != ref.n_bytes:
            return Damaged(ref.key, FileClass.CHUNK, DamageReason.SIZE)
        if f.checksum is None:
            f.checksum = ref.checksum
            self._listed[entry] = f
        elif f.checksum != ref.checksum:
            return Damaged(ref.key, FileClass.CHUNK, DamageReason.CHECKSUM)
        return None

    def add(self, record: DiskRecord) -> None:
        """The manifest is durable: visible from here on.  All its files must be known."""
        with self._lock:
            self._show(record, self._states(record))

    def _show(self, record: DiskRecord, states: list[FileState]) -> None:
        if record.key in self._records or record.key in self._limbo:
            raise ValueError(f"checkpoint {record.key} exists")
        for f in states:
            f.refs += 1
            f.lasting = True
        self._records[record.key] = record
        self._sequence = max(self._sequence, record.sequence)

    def add_in_limbo(self, record: DiskRecord) -> None:
        """The manifest may or may not exist: never visible, its files kept until that is settled."""
        with self._lock:
            for f in self._states(record):
                f.refs += 1
            self._limbo[record.key] = record
            self._sequence = max(self._sequence, record.sequence)

    def _states(self, record: DiskRecord) -> list[FileState]:
        return [*(self._listed[entry] for entry in record.chunks.entries()), self._files[record.private.key]]

    def add_file(self, key: str, suffix: str, n_bytes: int, disk_bytes: int, checksum: bytes) -> None:
        """A file was published by a running write, which holds one pin on it."""
        with self._lock:
            f = FileState(suffix, n_bytes, disk_bytes, checksum, pins=1)
            self._files[key] = f
            if suffix == FileClass.CHUNK:
                self._listed[ChunkTable.of([FileRef(key, n_bytes, checksum)]).raw] = f

    def not_lasting(self, keys: Iterable[str]) -> list[str]:
        """Those whose names a power cut could still take away."""
        with self._lock:
            return [k for k in keys if not self._files[k].lasting]

    def mark_lasting(self, keys: Iterable[str]) -> None:
        """Their folder was synced."""
        with self._lock:
            for k in keys:
                self._files[k].lasting = True

    # -- a checkpoint goes -----------------------------------------------------------------------
    def begin_retire(self, keys: Iterable[str]) -> None:
        """Hide these checkpoints; their manifests are to be removed next."""
        with self._lock:
            for key in keys:
                record = self._records.pop(key, None)
                if record is not None:
                    self._limbo[key] = record

    def hide(self, keys: Iterable[str]) -> None:
        """Not served any more in this run; manifest and files stay for a later start."""
        with self._lock:
            for key in keys:
                record = self._records.pop(key, None)
                if record is not None:
                    self._hidden[key] = record

    def limbo(self) -> list[str]:
        with self._lock:
            return list(self._limbo)

    def end_retire(self, keys: Iterable[str]) -> int:
        """The removal of these manifests is durable: let go of their files.  Returns the manifests' bytes."""
        freed = 0
        with self._lock:
            for key in keys:
                record = self._limbo.pop(key, None)
                if record is not None:
                    freed += record.manifest_bytes
                    for file_key in _file_keys(record):
                        self._files[file_key].refs -= 1
        return freed

    def loose(self) -> list[tuple[str, str]]:
        """(key, suffix) of files nothing references or pins."""
        with self._lock:
            return [
                (k, f.suffix) for k, f in self._files.items() if f.refs == 0 and f.pins == 0 and k not in self._held
            ]

    def take_loose(self, key: str) -> FileState | None:
        """Forget a loose file just before it is removed, so that nobody references it any more."""
        with self._lock:
            f = self._files.get(key)
            if f is None or f.refs or f.pins or key in self._held:
                return None
            del self._files[key]
            if f.suffix == FileClass.CHUNK and f.checksum is not None:
                del self._listed[ChunkTable.of([FileRef(key, f.n_bytes, f.checksum)]).raw]
            return f

    def debris(self) -> list[tuple[str, str]]:
        with self._lock:
            return list(self._debris)

    def drop_debris(self, folder: str, name: str) -> int:
        """It is removed; returns its bytes."""
        with self._lock:
            return self._debris.pop((folder, name), 0)

    def mark_bad(self, key: str) -> None:
        with self._lock:
            f = self._files.get(key)
            if f is not None:
                f.bad = True

    # -- pins ------------------------------------------------------------------------------------
    def pin(self, keys: Iterable[str]) -> None:
        """Keep these files however their references go.  KeyError (nothing pinned) if one is unknown."""
        with self._lock:
            states = [self._files[k] for k in keys]
            for f in states:
                f.pins += 1

    def pin_chunk(self, key: str) -> FileRef | None:
        """Pin a chunk file that a new checkpoint may reference; None when there is no such file."""
        with self._lock:
            ref = self.usable_chunk(key)
            if ref is not None:
                self._files[key].pins += 1
            return ref

    def unpin(self, keys: Iterable[str]) -> None:
        with self._lock:
            for k in keys:
                self._files[k].pins -= 1

    def pin_record(self, key: str) -> DiskRecord | None:
        """Pin everything a restore of this checkpoint reads; None when it is not visible any more."""
        with self._lock:
            record = self._records.get(key)
            if record is not None:
                self.pin(_file_keys(record))
            return record

    def unpin_record(self, record: DiskRecord) -> None:
        self.unpin(_file_keys(record))

    # -- budget ----------------------------------------------------------------------------------
    def reserve(self, n_bytes: int) -> None:
        """Charge blocks of a write before its first byte; the plan has made sure that they fit."""
        with self._lock:
            self._reserved += n_bytes

    def unreserve(self, n_bytes: int) -> None:
        with self._lock:
            self._reserved -= n_bytes

    def plan_room(self, need_bytes: int, rank: Rank) -> EvictionPlan | Shortfall:
        """Which checkpoints to retire, in rank order, so that ``need_bytes`` fit; changes nothing.

        A file counts as freed with its last reference, unless it is pinned.
        """
        with self._lock:
            free = self.budget_bytes - self.usage().used_bytes
            could = free
            refs: dict[str, int] = {}
            victims: list[DiskRecord] = []
            if free < need_bytes:
                ranked = [(rank(r), r.sequence, r) for r in self._records.values()]
                candidates = sorted((x for x in ranked if x[0] is not None), key=lambda x: (x[0], x[1]))
                for _, _, record in candidates:
                    victims.append(record)
                    could += record.manifest_bytes
                    for key in _file_keys(record):
                        f = self._files[key]
                        refs[key] = refs.get(key, f.refs) - 1
                        if refs[key] == 0 and f.pins == 0:
                            could += f.disk_bytes
                    if could >= need_bytes:
                        break
            if could < need_bytes:
                return Shortfall(need_bytes, max(could, 0), self.budget_bytes)
            return EvictionPlan(tuple(victims), could - free)

    def _all(self) -> tuple[dict[str, DiskRecord], ...]:
        return self._records, self._limbo, self._hidden

    # -- self-check ------------------------------------------------------------------------------
    def check(self) -> list[str]:
        """Recount every reference; an empty list = fine."""
        with self._lock:
            counted: dict[str, int] = {}
            for held in self._all():
                for record in held.values():
                    for key in _file_keys(record):
                        counted[key] = counted.get(key, 0) + 1
            wrong = [f"{k} is referenced but unknown" for k in counted if k not in self._files]
            for key, f in self._files.items():
                if f.refs != counted.get(key, 0):
                    wrong.append(f"{key} has {f.refs} references, {counted.get(key, 0)} counted")
                if f.pins < 0:
                    wrong.append(f"{key} has {f.pins} pins")
            if self._reserved < 0:
                wrong.append(f"{self._reserved} bytes reserved")
            both = self._records.keys() & self._limbo.keys()
            wrong.extend(f"{k} is both visible and in limbo" for k in both)
            return wrong


def _file_keys(record: DiskRecord) -> list[str]:
    return [*record.chunks.keys(), record.private.key]
