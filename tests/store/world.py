"""Checkpoints with known bytes, and a checker that knows what every restore must return.

A chunk's bytes are a function of (conversation, chunk number), so a file that ends up under another
checkpoint, or half of it, shows as wrong bytes and not only as a wrong count.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from gufo_gguf.cache.types import InputMark, Origin
from gufo_gguf.store.catalogue import DiskRecord
from gufo_gguf.store.disk import DiskStore
from gufo_gguf.store.fs import FileSystem
from gufo_gguf.store.jobs import ChunkJob, Outcome, Progress, WriteJob, WriteResult
from gufo_gguf.store.parts import restore_parts
from gufo_gguf.store.scan import Loaded, reclaim
from gufo_gguf.store.simfs import SimFS
from gufo_gguf.store.types import BufferSource, CheckpointMeta, Damage, PartKind
from gufo_gguf.store.writer import Writer

CHUNK_ROWS = 64
ROW_BYTES = 16
CHUNK_BYTES = CHUNK_ROWS * ROW_BYTES
PRIVATE_BYTES = 700
STEP_BYTES = 512


@cache
def stream(what: str, n_bytes: int) -> bytes:
    return hashlib.shake_128(what.encode()).digest(n_bytes)


def counted_names(prefix: int = 0) -> Iterator[str]:
    return (hashlib.md5(f"{prefix}/{i}".encode()).hexdigest() for i in itertools.count())


@dataclass(frozen=True)
class Spec:
    """Checkpoint ``name``: the first n_tokens of a conversation, itself perhaps a branch of another."""

    conversation: str
    n_tokens: int
    parent: str = ""
    shared: int = 0
    """Tokens, a multiple of CHUNK_ROWS, inherited from ``parent``."""
    logits: bool = False

    @property
    def name(self) -> str:
        return f"{self.conversation}@{self.n_tokens}"

    def owner(self, position: int) -> str:
        return self.parent if position < self.shared else self.conversation

    @cache  # noqa: B019 - a few dozen specs, for the length of a test run
    def tokens(self) -> np.ndarray:
        parts = []
        for who, lo, hi in ((self.parent, 0, self.shared), (self.conversation, self.shared, self.n_tokens)):
            parts.append(np.frombuffer(stream(f"tokens {who}", 4 * hi), dtype="<i4")[lo:] & 0xFFFF)
        return np.concatenate(parts).astype(np.int32)

    def chunk_ids(self) -> list[tuple[str, int]]:
        return [(self.owner(i * CHUNK_ROWS), i) for i in range(self.n_tokens // CHUNK_ROWS)]

    def chunk(self, i: int) -> bytes:
        who, number = self.chunk_ids()[i]
        return stream(f"chunk {who} {number}", CHUNK_BYTES)

    def section(self, kind: PartKind) -> bytes:
        n = {
            PartKind.PRIVATE: PRIVATE_BYTES,
            PartKind.TAIL: self.n_tokens % CHUNK_ROWS * ROW_BYTES,
            PartKind.LOGITS: 96 if self.logits else 0,
        }[kind]
        return stream(f"{kind} {self.name}", n)

    def job(self) -> WriteJob:
        def source(kind: PartKind) -> BufferSource | None:
            data = self.section(kind)
            return BufferSource(data) if data else None

        return WriteJob(
            CheckpointMeta(
                scope="scope",
                tokens=self.tokens(),
                origin=Origin.PROMPT,
                chunk_rows=CHUNK_ROWS,
                row_bytes=ROW_BYTES,
                inputs=(InputMark(1, "image"),),
                labels={"name": self.name},
            ),
            tuple(ChunkJob(c, BufferSource(self.chunk(i))) for i, c in enumerate(self.chunk_ids())),
            source(PartKind.PRIVATE),
            source(PartKind.TAIL),
            source(PartKind.LOGITS),
        )


def oldest_first(record: DiskRecord) -> int:
    return record.sequence


@dataclass
class World:
    """A store on a file system, with what was asked of it."""

    fs: FileSystem
    budget_bytes: int = 1 << 30
    names_prefix: int = 0
    specs: dict[str, Spec] = field(default_factory=dict)
    store: DiskStore = field(init=False)
    writer: Writer = field(init=False)
    damage: list[Damage] = field(init=False, default_factory=list)
    outcomes: list[Outcome] = field(init=False, default_factory=list)
    retired: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        names = counted_names(self.names_prefix)
        self.store = DiskStore(self.fs, self.budget_bytes, names=lambda: next(names))
        for found in self.store.load():
            if isinstance(found, Damage):
                self.damage.append(found)
        self.writer = self.store.writer(oldest_first, staging_bytes=STEP_BYTES)

    def visible(self) -> set[str]:
        return {r.labels["name"] for r in self.store.catalogue.records()}

    def record(self, name: str) -> DiskRecord:
        return next(r for r in self.store.catalogue.records() if r.labels["name"] == name)

    def take(self, progress: Progress) -> None:
        self.outcomes.extend(progress.outcomes)
        self.retired.extend(r.labels["name"] for r in progress.retired)

    def run(self) -> None:
        """Step until idle."""
        for _ in range(100_000):
            progress = self.writer.step(STEP_BYTES)
            self.take(progress)
            if progress.idle:
                return
        raise AssertionError("the writer does not come to an end")

    def write(self, spec: Spec) -> Outcome:
        self.specs[spec.name] = spec
        number = self.writer.enqueue(spec.job())
        if isinstance(number, Outcome):
            return number
        self.run()
        return next(o for o in reversed(self.outcomes) if o.job == number)

    def write_durably(self, spec: Spec) -> DiskRecord:
        outcome = self.write(spec)
        assert outcome.result is WriteResult.DURABLE, outcome
        assert outcome.record is not None
        return outcome.record


def restored_bytes(
    store: DiskStore, record: DiskRecord, **options: object
) -> dict[tuple[PartKind, int], bytes] | Damage:
    """Everything a restore hands over, by part; or the damage that ended it."""
    got: dict[tuple[PartKind, int], bytearray] = {}
    for piece in store.restore(record, **options):  # type: ignore[arg-type]
        if isinstance(piece, Damage):
            return piece
        data = got.setdefault((piece.part.kind, piece.part.index), bytearray())
        assert len(data) == piece.offset
        data += piece.data
        assert piece.last == (len(data) == piece.part.n_bytes)
    return {k: bytes(v) for k, v in got.items()}


@cache
def expected_bytes(spec: Spec) -> dict[tuple[PartKind, int], bytes]:
    want = {(PartKind.CHUNK, i): spec.chunk(i) for i in range(spec.n_tokens // CHUNK_ROWS)}
    for kind in (PartKind.PRIVATE, PartKind.TAIL, PartKind.LOGITS):
        if spec.section(kind):
            want[(kind, 0)] = spec.section(kind)
    return want


def check_disk(fs: SimFS, specs: dict[str, Spec], must: set[str], *, may_be_damaged: bool = False) -> set[str]:
    """Open a store on this disk as after a power cut: nothing half, nothing lost, all debris reclaimed."""
    store = DiskStore(fs, 1 << 30)
    names: set[str] = set()
    for found in store.load():
        if isinstance(found, Damage):
            assert may_be_damaged, found
            continue
        assert isinstance(found, Loaded)
        spec = specs[found.record.labels["name"]]
        names.add(spec.name)
        assert np.array_equal(found.tokens, spec.tokens())
        got = {
            (p.kind, p.index): fs.content(p.folder, p.name)[p.offset : p.offset + p.n_bytes]
            for p in restore_parts(store.layout, found.record.chunks, found.record.private)
        }
        assert got == expected_bytes(spec), spec.name
    assert must <= names, must - names
    assert store.catalogue.check() == []
    for _ in reclaim(fs, store.layout, store.catalogue):
        pass
    left = {(folder, e.name) for folder in store.layout.folders for e in fs.entries(folder)}
    listed = set()
    for record in store.catalogue.records():
        listed.add((store.layout.manifests, record.key + ".manifest"))
        listed.add((store.layout.private, record.private.key + ".private"))
        listed.update((store.layout.chunks, ref.key + ".chunk") for ref in record.chunks)
    assert left == listed
    assert store.catalogue.usage().used_bytes == fs.used_bytes()
    assert store.catalogue.check() == []
    store.close()
    return names
