"""The words of the disk tier: keys, file references, parts, sources, damage.

The store moves bytes.  It knows that a checkpoint has chunks, a private file and a manifest, and
what each of them must hash to; it does not know what a model is or which checkpoint is worth more.

    manifests/K.manifest ──► chunks/A.chunk, chunks/B.chunk, …      shared, 256 rows each
                         └─► private/P.private = [ private ][ tail ][ logits ]   one per checkpoint

Keys are 32 lower-case hex digits, drawn at random and never used twice; a file carries the same key
from its birth in tmp/ to its end, so no rename can ever hit an existing name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, Protocol

from gufo_gguf.cache.types import InputMark, Origin, Tokens
from gufo_gguf.core.errors import StoreError

CHECKSUM_BYTES = 16
"""xxh3-128.  It finds damage, not attackers: the folder's 0700 permissions are for those."""

KEY_BYTES = 16


class SourceGone(StoreError):
    """The bytes of a queued write are no longer there (their slot failed); the write is abandoned."""


class DamageReason(StrEnum):
    MISSING = "missing"
    SIZE = "size"
    """Shorter or longer than the manifest says."""
    CHECKSUM = "checksum"
    FORMAT = "format"
    """A manifest that does not parse, or contradicts itself, its name or another manifest."""
    NOT_A_FILE = "not_a_file"
    UNREADABLE = "unreadable"
    """The file system refused; the bytes may be fine."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One file that cannot be trusted, and why."""

    folder: str
    name: str
    reason: DamageReason
    detail: str = ""
    permanent: bool = True
    """False: the next start may find the file in order, so nothing is deleted because of it."""

    def __str__(self) -> str:
        return f"{self.folder}/{self.name}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


class FileRef(NamedTuple):
    """A chunk file as a manifest lists it.  (These are NamedTuples because a start-up makes thousands.)"""

    key: str
    n_bytes: int
    checksum: bytes


class Section(NamedTuple):
    """A range of a private file with a checksum of its own; n_bytes 0 = absent."""

    n_bytes: int
    checksum: bytes


class PrivateFile(NamedTuple):
    """The private file of one checkpoint: its sections follow each other in this order."""

    key: str
    private: Section
    tail: Section
    logits: Section

    @property
    def n_bytes(self) -> int:
        return self.private.n_bytes + self.tail.n_bytes + self.logits.n_bytes


class PartKind(StrEnum):
    CHUNK = "chunk"
    PRIVATE = "private"
    TAIL = "tail"
    LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class Part:
    """A checksummed range of one file, the unit of a restore.

    file:   0 ...... offset ........ offset + n_bytes ...... file_bytes
                    [      this part     )
    """

    kind: PartKind
    index: int
    """Chunk number (rows [index * chunk_rows, (index + 1) * chunk_rows)); 0 for the others."""
    folder: str
    name: str
    offset: int
    n_bytes: int
    file_bytes: int
    checksum: bytes


class CheckpointMeta(NamedTuple):
    """What a manifest says about a checkpoint besides its files."""

    scope: str
    tokens: Tokens
    origin: Origin
    chunk_rows: int
    row_bytes: int
    inputs: tuple[InputMark, ...] = ()
    created_s: int = 0
    """Unix seconds, from the caller's clock; shown as an age, decides nothing."""
    labels: Mapping[str, str] = MappingProxyType({})
    """For people: model name, quantisation, KV types.  The scope alone decides identity."""

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def divided(self) -> tuple[int, int]:
        """(full chunks, rows of the tail)."""
        return divmod(len(self.tokens), self.chunk_rows) if self.row_bytes else (0, 0)

    @property
    def n_chunks(self) -> int:
        return self.divided[0]

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_rows * self.row_bytes

    @property
    def tail_bytes(self) -> int:
        return self.divided[1] * self.row_bytes


class ByteSource(Protocol):
    """Bytes to be written, readable in any pieces, the same each time until the write has ended."""

    @property
    def n_bytes(self) -> int: ...

    def read(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes at [offset, offset + len(out)).  Raises SourceGone."""
        ...


class BufferSource:
    """A ByteSource over a buffer the caller keeps unchanged (a chunk's backing RAM)."""

    def __init__(self, buffer: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(buffer).cast("B")

    @property
    def n_bytes(self) -> int:
        return self._view.nbytes

    def read(self, offset: int, out: memoryview) -> None:
        out[:] = self._view[offset : offset + len(out)]
