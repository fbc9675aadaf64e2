"""The manifest: the one file that makes a checkpoint exist.

    0         8        12        16          24              40         48                64
    [ magic  )[ format )[ 0 )     [ body bytes )[ body xxh3  ) [ 0 )     [ xxh3 of 0..48  )[ body ...

The body is a fixed sequence of sections, each ``tag(4) zero(4) length(8)`` and its bytes, zero-padded
to 8, so that the tokens lie aligned and are used in place:

    META  key, creation sequence, creation time, chunk_rows, row_bytes
    SCOP  identity of the state            ORIG  why it was captured
    LABL  name/value pairs for people      TOKS  int32 little-endian token ids
    INPT  (position, digest) of images     CHNK  (key, bytes, xxh3) of every full chunk, in row order
    PRIV  key of the private file and (bytes, xxh3) of its private, tail and logits sections

It is parsed as if an enemy wrote it: the size is bounded before a byte is read, every length is
compared with the bytes that are left before anything is made of it, every redundant number must
agree (chunks with tokens, tail with the boundary, ids with the file name), and every bit of the
file is under one of the two checksums.  A header whose checksum is right but whose format is
higher was written by a later release: that is a refusal (``NewerFormat``), not damage.

Rejected: JSON or msgpack (tokens as numbers cost 10 times the bytes and the time), numpy's npz (a
zip with a parser behind it), a file per section (more names to publish).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from gufo_gguf.cache.types import InputMark, Origin, Tokens
from gufo_gguf.store.types import CHECKSUM_BYTES, KEY_BYTES, CheckpointMeta, FileRef, PrivateFile, Section

MAGIC = b"GUFOCKPT"
FORMAT = 1
MAX_BYTES = 16 << 20
"""4 Mi tokens and their chunks; a larger file is refused before it is read."""

_HEADER = struct.Struct("<8sIIQ16s8s16s")
_HEADER_SUMMED = 48
_SECTION = struct.Struct("<4sIQ")
_META = struct.Struct("<16sQqIIQ")
_CHUNK = struct.Struct("<16sQ16s")
_PRIVATE = struct.Struct("<16s" + "Q16s" * 3)
_TAGS = (b"META", b"SCOP", b"ORIG", b"LABL", b"TOKS", b"INPT", b"CHNK", b"PRIV")
_MAX_TEXT = 4096
_MAX_PAIRS = 1024

assert _HEADER.size == 64
assert _SECTION.size == 16


class ManifestError(ValueError):
    """The bytes are not a manifest; the message says where they stop being one."""


class NewerFormat(ManifestError):
    """An intact manifest of a later release."""


class ChunkTable:
    """The chunk list in its stored form: 40 bytes a chunk, made into objects only when asked.

    A start-up holds hundreds of thousands of references; as objects they would cost more time and
    memory than reading the manifests did.
    """

    __slots__ = ("raw",)

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    @classmethod
    def of(cls, refs: list[FileRef] | tuple[FileRef, ...]) -> ChunkTable:
        return cls(b"".join(_CHUNK.pack(bytes.fromhex(r.key), r.n_bytes, r.checksum) for r in refs))

    def __len__(self) -> int:
        return len(self.raw) // _CHUNK.size

    def __getitem__(self, i: int) -> FileRef:
        if not 0 <= i < len(self):
            raise IndexError(i)
        key, n_bytes, checksum = _CHUNK.unpack_from(self.raw, i * _CHUNK.size)
        return FileRef(key.hex(), n_bytes, checksum)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkTable) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def rows(self) -> list[tuple[bytes, int, bytes]]:
        """(key as 16 bytes, bytes, checksum) of all chunks."""
        return list(_CHUNK.iter_unpack(self.raw))


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """A checkpoint as its manifest lists it.  ``meta.tokens`` is read-only."""

    key: str
    sequence: int
    """Creation order within the folder; survives restarts, unlike any clock."""
    meta: CheckpointMeta
    chunks: ChunkTable
    private: PrivateFile


def encode(m: Manifest) -> bytes:
    """The file's bytes.  Raises ValueError when the parts do not fit together."""
    problem = _contradiction(m)
    if problem:
        raise ValueError(problem)
    meta = m.meta
    p = m.private
    sections = (
        _META.pack(bytes.fromhex(m.key), m.sequence, meta.created_s, meta.chunk_rows, 0, meta.row_bytes),
        meta.scope.encode(),
        meta.origin.value.encode(),
        b"".join(_text(t) for pair in meta.labels.items() for t in pair),
        np.ascontiguousarray(meta.tokens, dtype="<i4").tobytes(),
        b"".join(struct.pack("<Q", i.position) + _text(i.digest) for i in meta.inputs),
        m.chunks.raw,
        _PRIVATE.pack(
            bytes.fromhex(p.key),
            *(x for s in (p.private, p.tail, p.logits) for x in (s.n_bytes, s.checksum)),
        ),
    )
    body = b"".join(
        _SECTION.pack(tag, 0, len(data)) + data + b"\0" * (-len(data) % 8)
        for tag, data in zip(_TAGS, sections, strict=True)
    )
    head = _HEADER.pack(MAGIC, FORMAT, 0, len(body), xxhash.xxh3_128_digest(body), b"\0" * 8, b"\0" * CHECKSUM_BYTES)[
        :_HEADER_SUMMED
    ]
    data = head + xxhash.xxh3_128_digest(head) + body
    if len(data) > MAX_BYTES:
        raise ValueError(f"a manifest of {len(data)} bytes exceeds the limit of {MAX_BYTES}")
    return data


def decode(data: memoryview, key: str) -> Manifest:
    """Parse a manifest file named after ``key``.  Raises ManifestError (NewerFormat among them).

    The tokens are a view of ``data``, which must not change afterwards.
    """
    sections = _sections(_checked_body(data))
    try:
        return _assemble(sections, key)
    except (struct.error, UnicodeDecodeError, ValueError) as e:
        if isinstance(e, ManifestError):
            raise
        raise ManifestError(f"bad section: {e}") from e


def _checked_body(data: memoryview) -> memoryview:
    if len(data) < _HEADER.size:
        raise ManifestError("shorter than a header")
    if len(data) > MAX_BYTES:
        raise ManifestError("larger than any manifest")
    magic, fmt, zero, n_body, body_sum, pad, head_sum = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ManifestError("not a manifest")
    if xxhash.xxh3_128_digest(data[:_HEADER_SUMMED]) != head_sum:
        raise ManifestError("header checksum")
    if fmt > FORMAT:
        raise NewerFormat(f"manifest format {fmt}, this release knows {FORMAT}")
    if fmt != FORMAT or zero or any(pad):
        raise ManifestError("header fields")
    body = data[_HEADER.size :]
    if n_body != len(body):
        raise ManifestError(f"{len(body)} bytes of body where {n_body} are announced")
    if xxhash.xxh3_128_digest(body) != body_sum:
        raise ManifestError("body checksum")
    return body


def _sections(body: memoryview) -> list[memoryview]:
    found: list[memoryview] = []
    at = 0
    for tag in _TAGS:
        if len(body) - at < _SECTION.size:
            raise ManifestError(f"no section {tag.decode()}")
        got, zero, length = _SECTION.unpack_from(body, at)
        at += _SECTION.size
        padded = length + (-length % 8)
        if got != tag or zero or padded > len(body) - at:
            raise ManifestError(f"section {tag.decode()}")
        if any(body[at + length : at + padded]):
            raise ManifestError(f"padding of section {tag.decode()}")
        found.append(body[at : at + length])
        at += padded
    if at != len(body):
        raise ManifestError("bytes after the last section")
    return found


def _assemble(sections: list[memoryview], key: str) -> Manifest:
    fixed, scope, origin, labels, tokens, inputs, chunks, private = sections
    raw_key, sequence, created_s, chunk_rows, zero, row_bytes = _META.unpack(fixed)
    if raw_key.hex() != key or zero:
        raise ManifestError("belongs to another name")
    if len(tokens) % 4 or len(chunks) % _CHUNK.size:
        raise ManifestError("a table of broken entries")
    if max(len(scope), len(origin)) > _MAX_TEXT:
        raise ManifestError("text too long")
    words = _texts(labels)
    if len(words) % 2 or len(words) > 2 * _MAX_PAIRS:
        raise ManifestError("labels")
    ids: Tokens = np.frombuffer(tokens, dtype="<i4")
    ids.flags.writeable = False
    private_key, *numbers = _PRIVATE.unpack(private)
    manifest = Manifest(
        key=key,
        sequence=sequence,
        meta=CheckpointMeta(
            scope=bytes(scope).decode(),
            tokens=ids,
            origin=Origin(bytes(origin).decode()),
            chunk_rows=chunk_rows,
            row_bytes=row_bytes,
            inputs=_inputs(inputs),
            created_s=created_s,
            labels=dict(zip(words[::2], words[1::2], strict=True)),
        ),
        chunks=ChunkTable(bytes(chunks)),
        private=PrivateFile(
            private_key.hex(),
            Section(numbers[0], numbers[1]),
            Section(numbers[2], numbers[3]),
            Section(numbers[4], numbers[5]),
        ),
    )
    problem = _contradiction(manifest)
    if problem:
        raise ManifestError(problem)
    return manifest


def _contradiction(m: Manifest) -> str | None:
    """Redundant numbers that disagree; checked before writing and after reading."""
    meta = m.meta
    if len(m.key) != 2 * KEY_BYTES or len(m.private.key) != 2 * KEY_BYTES:
        return "key length"
    if meta.chunk_rows < 1:
        return "chunks of no rows"
    if len(m.chunks) != meta.n_chunks:
        return f"{len(m.chunks)} chunks for {meta.n_tokens} tokens"
    if m.private.tail.n_bytes != meta.tail_bytes:
        return f"a tail of {m.private.tail.n_bytes} bytes where {meta.tail_bytes} are due"
    # A chunk entry is five 64-bit words; the third is its size.
    if np.any(np.frombuffer(m.chunks.raw, dtype="<u8")[2::5] != meta.chunk_bytes):
        return "a chunk of another size"
    if m.private.n_bytes > 1 << 62:
        return "private size"
    return meta_problem(meta)


def meta_problem(meta: CheckpointMeta) -> str | None:
    """Why this cannot stand in a manifest, whatever files go with it; None = it can."""
    if meta.chunk_rows < 1 or meta.n_tokens < 1:
        return "an empty checkpoint"
    ends = [i.position for i in meta.inputs]
    if ends != sorted(set(ends)) or (ends and ends[-1] >= meta.n_tokens) or len(ends) > meta.n_tokens:
        return "input positions"
    texts = [meta.scope, *meta.labels.keys(), *meta.labels.values(), *(i.digest for i in meta.inputs)]
    if len(meta.labels) > _MAX_PAIRS or any(len(t.encode()) > _MAX_TEXT for t in texts):
        return "text too long"
    return None


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def _take_text(view: memoryview, at: int) -> tuple[str, int]:
    (n,) = struct.unpack_from("<I", view, at)
    at += 4
    if n > _MAX_TEXT or n > len(view) - at:
        raise ManifestError("text length")
    return bytes(view[at : at + n]).decode(), at + n


def _texts(view: memoryview) -> list[str]:
    words: list[str] = []
    at = 0
    while at < len(view):
        word, at = _take_text(view, at)
        words.append(word)
    return words


def _inputs(view: memoryview) -> tuple[InputMark, ...]:
    marks: list[InputMark] = []
    at = 0
    while at < len(view):
        (position,) = struct.unpack_from("<Q", view, at)
        digest, at = _take_text(view, at + 8)
        marks.append(InputMark(position, digest))
    return tuple(marks)
