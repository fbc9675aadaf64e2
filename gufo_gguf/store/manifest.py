"""The manifest: the one file that makes a checkpoint exist.

    0         8        12        16           24             40         48                 64
    [ magic  )[ format )[ 0      )[ body bytes )[ body xxh3  )[ 0       )[ xxh3 of 0..48   )[ body ...

    body:   [ fixed: numbers, private file, table lengths )   key, creation sequence and time, geometry
            [ tokens )        int32 little-endian, zero-padded to 8: used in place
            [ chunks )        (key, bytes, xxh3) of every full chunk, 40 bytes each, in row order
            [ texts  )        scope, origin, then name/value labels; each length(4) and UTF-8
            [ inputs )        position(8) and digest text of each image

It is parsed as if an enemy wrote it: the size is bounded before a byte is read, the table lengths
must add up to exactly the bytes that are there before anything is made of them, every redundant
number must agree (chunks with tokens, tail with the boundary, key with the file name), and every
bit of the file is under one of the two checksums.  A header whose checksum is right but whose format
is higher was written by a later release: that is a refusal (``NewerFormat``), not damage.

Rejected: JSON or msgpack (tokens as numbers cost ten times the bytes and the time), numpy's npz (a
zip with a parser behind it), tagged sections (eight of them took longer to walk than to read).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

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
_FIXED = struct.Struct("<16sQqIIQ16sQ16sQ16sQ16sIIII")
"""key, sequence, created_s, chunk_rows, 0, row_bytes; private key and its three (bytes, xxh3);
tokens, chunks (counts), texts, inputs (bytes)."""
_ENTRY = struct.Struct("<16sQ16s")
ENTRY_BYTES = _ENTRY.size
_SIZE_WORD = 2
"""Of an entry's five 8-byte words, the one that holds the chunk's bytes."""
_ENTRY_DTYPE = np.dtype(f"V{ENTRY_BYTES}")  # dtypes made once: naming one costs more than using it
_INT32 = np.dtype("<i4")
_UINT64 = np.dtype("<u8")
_MAX_TEXT = 4096
_MAX_LABELS = 1024
_NO_BYTES = b"\0" * 8

assert (_HEADER.size, _FIXED.size % 8, ENTRY_BYTES) == (64, 0, 40)


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
        return cls(b"".join(_ENTRY.pack(bytes.fromhex(r.key), r.n_bytes, r.checksum) for r in refs))

    def __len__(self) -> int:
        return len(self.raw) // ENTRY_BYTES

    def __getitem__(self, i: int) -> FileRef:
        if not 0 <= i < len(self):
            raise IndexError(i)
        key, n_bytes, checksum = _ENTRY.unpack_from(self.raw, i * ENTRY_BYTES)
        return FileRef(key.hex(), n_bytes, checksum)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkTable) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __iter__(self) -> Iterator[FileRef]:
        return (FileRef(key.hex(), n, checksum) for key, n, checksum in _ENTRY.iter_unpack(self.raw))

    def entries(self) -> list[bytes]:
        """The stored 40 bytes of each chunk: equal entries name the same file with the same bytes."""
        return np.frombuffer(self.raw, _ENTRY_DTYPE).tolist() if self.raw else []

    def all_of(self, n_bytes: int) -> bool:
        """Is every chunk listed with this size?"""
        if not self.raw:
            return True
        sizes = np.frombuffer(self.raw, _UINT64)[_SIZE_WORD :: ENTRY_BYTES // 8].tolist()
        return bool(sizes.count(n_bytes) == len(sizes))

    def keys(self) -> list[str]:
        return [key.hex() for key, _, _ in _ENTRY.iter_unpack(self.raw)]


class Manifest(NamedTuple):
    """A checkpoint as its manifest lists it.  ``meta.tokens`` is read-only."""

    key: str
    sequence: int
    """Creation order within the folder; survives restarts, unlike any clock."""
    meta: CheckpointMeta
    chunks: ChunkTable
    private: PrivateFile


# -- writing -------------------------------------------------------------------------------------
def encode(m: Manifest) -> bytes:
    """The file's bytes.  Raises ValueError when the parts do not fit together."""
    meta, p = m.meta, m.private
    problem = _contradiction(m) or meta_problem(meta)
    if problem:
        raise ValueError(problem)
    texts = b"".join(_text(t) for t in (meta.scope, meta.origin.value, *_flat(meta.labels)))
    inputs = b"".join(struct.pack("<Q", i.position) + _text(i.digest) for i in meta.inputs)
    fixed = _FIXED.pack(
        bytes.fromhex(m.key), m.sequence, meta.created_s, meta.chunk_rows, 0, meta.row_bytes,
        bytes.fromhex(p.key), p.private.n_bytes, p.private.checksum, p.tail.n_bytes, p.tail.checksum,
        p.logits.n_bytes, p.logits.checksum, meta.n_tokens, len(m.chunks), len(texts), len(inputs),
    )  # fmt: skip
    tokens = np.ascontiguousarray(meta.tokens, dtype="<i4").tobytes()
    body = b"".join((fixed, tokens, _NO_BYTES[: -len(tokens) % 8], m.chunks.raw, texts, inputs))
    head = _HEADER.pack(MAGIC, FORMAT, 0, len(body), xxhash.xxh3_128_digest(body), _NO_BYTES, b"\0" * CHECKSUM_BYTES)[
        :_HEADER_SUMMED
    ]
    data = head + xxhash.xxh3_128_digest(head) + body
    if len(data) > MAX_BYTES:
        raise ValueError(f"a manifest of {len(data)} bytes exceeds the limit of {MAX_BYTES}")
    return data


def meta_problem(meta: CheckpointMeta) -> str | None:
    """Why this cannot stand in a manifest, whatever files go with it; None = it can."""
    if meta.n_tokens < 1:
        return "an empty checkpoint"
    texts = (meta.scope, *_flat(meta.labels), *(i.digest for i in meta.inputs))
    if len(meta.labels) > _MAX_LABELS or any(len(t.encode()) > _MAX_TEXT for t in texts):
        return "text too long"
    return _input_problem(meta.inputs, meta.n_tokens)


def _flat(labels: Mapping[str, str]) -> list[str]:
    return [text for pair in labels.items() for text in pair]


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


# -- reading -------------------------------------------------------------------------------------
def decode(data: bytes, key: str) -> Manifest:
    """Parse a manifest file named after ``key``.  Raises ManifestError (NewerFormat among them).

    The tokens are a view of ``data``.
    """
    body = _checked_body(memoryview(data))
    try:
        return _assemble(body, key)
    except ManifestError:
        raise
    except (struct.error, ValueError) as e:  # UnicodeDecodeError and an unknown origin are ValueErrors
        raise ManifestError(f"bad field: {e}") from e


def _checked_body(data: memoryview) -> memoryview:
    if len(data) < _HEADER.size + _FIXED.size:
        raise ManifestError("shorter than any manifest")
    if len(data) > MAX_BYTES:
        raise ManifestError("larger than any manifest")
    magic, fmt, zero, n_body, body_sum, pad, head_sum = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ManifestError("not a manifest")
    if xxhash.xxh3_128_digest(data[:_HEADER_SUMMED]) != head_sum:
        raise ManifestError("header checksum")
    if fmt > FORMAT:
        raise NewerFormat(f"manifest format {fmt}, this release knows {FORMAT}")
    if fmt != FORMAT or zero or pad != _NO_BYTES:
        raise ManifestError("header fields")
    body = data[_HEADER.size :]
    if n_body != len(body):
        raise ManifestError(f"{len(body)} bytes of body where {n_body} are announced")
    if xxhash.xxh3_128_digest(body) != body_sum:
        raise ManifestError("body checksum")
    return body


def _assemble(body: memoryview, key: str) -> Manifest:
    (
        raw_key, sequence, created_s, chunk_rows, zero, row_bytes,
        private_key, private_bytes, private_sum, tail_bytes, tail_sum,
        logits_bytes, logits_sum, n_tokens, n_chunks, n_texts, n_inputs,
    ) = _FIXED.unpack_from(body)  # fmt: skip
    if raw_key.hex() != key or zero:
        raise ManifestError("belongs to another name")
    #   fixed │ tokens, padded to 8 │ chunks │ texts │ inputs
    chunks_at = _FIXED.size + 4 * n_tokens + (4 * n_tokens) % 8
    texts_at = chunks_at + ENTRY_BYTES * n_chunks
    inputs_at = texts_at + n_texts
    if inputs_at + n_inputs != len(body) or not n_tokens:
        raise ManifestError("table lengths")
    if n_tokens % 2 and body[chunks_at - 4 : chunks_at] != _NO_BYTES[:4]:
        raise ManifestError("padding")
    tokens: Tokens = np.frombuffer(body, _INT32, n_tokens, _FIXED.size)  # read-only, as bytes are
    scope, origin, labels = _parse_texts(bytes(body[texts_at:inputs_at]))
    meta = CheckpointMeta(
        scope, tokens, origin, chunk_rows, row_bytes, _inputs(body[inputs_at:], n_tokens), created_s, labels
    )
    private = PrivateFile(
        private_key.hex(),
        Section(private_bytes, private_sum),
        Section(tail_bytes, tail_sum),
        Section(logits_bytes, logits_sum),
    )
    manifest = Manifest(key, sequence, meta, ChunkTable(bytes(body[chunks_at:texts_at])), private)
    problem = _contradiction(manifest)
    if problem:
        raise ManifestError(problem)
    return manifest


def _contradiction(m: Manifest) -> str | None:
    """Redundant numbers that disagree; checked before writing and after reading."""
    meta, private = m.meta, m.private
    if len(m.key) != 2 * KEY_BYTES or len(private.key) != 2 * KEY_BYTES:
        return "key length"
    if meta.chunk_rows < 1:
        return "chunks of no rows"
    n_chunks, tail_rows = meta.divided
    if len(m.chunks) != n_chunks:
        return f"{len(m.chunks)} chunks for {meta.n_tokens} tokens"
    if private.tail.n_bytes != tail_rows * meta.row_bytes:
        return f"a tail of {private.tail.n_bytes} bytes where {tail_rows * meta.row_bytes} are due"
    if private.n_bytes > 1 << 62:
        return "private size"
    if not m.chunks.all_of(meta.chunk_bytes):
        return "a chunk of another size"
    return None


def _input_problem(inputs: tuple[InputMark, ...], n_tokens: int) -> str | None:
    at = [i.position for i in inputs]
    if at and (at[0] < 0 or at[-1] >= n_tokens or any(a >= b for a, b in pairwise(at))):
        return "input positions"
    return None


def _take_text(view: memoryview, at: int) -> tuple[str, int]:
    (n,) = struct.unpack_from("<I", view, at)
    at += 4
    if n > _MAX_TEXT or n > len(view) - at:
        raise ManifestError("text length")
    return bytes(view[at : at + n]).decode(), at + n


@lru_cache(maxsize=256)  # a folder's manifests mostly say the same
def _parse_texts(raw: bytes) -> tuple[str, Origin, Mapping[str, str]]:
    view = memoryview(raw)
    words: list[str] = []
    at = 0
    while at < len(view):
        word, at = _take_text(view, at)
        words.append(word)
    if len(words) < 2 or len(words) % 2 or len(words) > 2 + 2 * _MAX_LABELS:
        raise ManifestError("texts")
    labels = MappingProxyType(dict(zip(words[2::2], words[3::2], strict=True)))
    if 2 * len(labels) + 2 != len(words):
        raise ManifestError("a label twice")
    return words[0], Origin(words[1]), labels


def _inputs(view: memoryview, n_tokens: int) -> tuple[InputMark, ...]:
    marks: list[InputMark] = []
    at = 0
    while at < len(view):
        (position,) = struct.unpack_from("<Q", view, at)
        digest, at = _take_text(view, at + 8)
        marks.append(InputMark(position, digest))
    if not marks:
        return ()
    inputs = tuple(marks)
    problem = _input_problem(inputs, n_tokens)
    if problem:
        raise ManifestError(problem)
    return inputs
