"""Manifests: what goes in comes out; what was not written by us is refused, at no more cost than its size."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from gufo_gguf.cache.types import InputMark, Origin
from gufo_gguf.store.manifest import MAX_BYTES, ChunkTable, Manifest, ManifestError, NewerFormat, decode, encode
from gufo_gguf.store.types import CheckpointMeta, FileRef, PrivateFile, Section

KEY = "0123456789abcdef" * 2

keys = st.binary(min_size=16, max_size=16).map(bytes.hex)
sums = st.binary(min_size=16, max_size=16)
sections = st.builds(Section, st.integers(0, 1 << 40), sums)
text = st.text(max_size=40)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    tokens = np.array(draw(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=40)), dtype=np.int32)
    rows, row_bytes = draw(st.integers(1, 20)), draw(st.integers(0, 1 << 20))
    positions = sorted(draw(st.sets(st.integers(0, len(tokens) - 1), max_size=4)))
    meta = CheckpointMeta(
        scope=draw(text),
        tokens=tokens,
        origin=draw(st.sampled_from(Origin)),
        chunk_rows=rows,
        row_bytes=row_bytes,
        inputs=tuple(InputMark(p, draw(text)) for p in positions),
        created_s=draw(st.integers(-(1 << 62), 1 << 62)),
        labels=draw(st.dictionaries(text, text, max_size=5)),
    )
    chunks = [FileRef(draw(keys), meta.chunk_bytes, draw(sums)) for _ in range(meta.n_chunks)]
    private = PrivateFile(draw(keys), draw(sections), Section(meta.tail_bytes, draw(sums)), draw(sections))
    return Manifest(draw(keys), draw(st.integers(0, (1 << 64) - 1)), meta, ChunkTable.of(chunks), private)


@settings(max_examples=60)
@given(manifests())
def test_round_trip(m: Manifest) -> None:
    data = encode(m)
    back = decode(data, m.key)
    assert encode(back) == data
    assert np.array_equal(back.meta.tokens, m.meta.tokens)
    assert not back.meta.tokens.flags.writeable
    assert back.meta.tokens.flags.aligned
    assert (back.key, back.sequence, back.chunks, back.private) == (m.key, m.sequence, m.chunks, m.private)
    for name in ("scope", "origin", "chunk_rows", "row_bytes", "inputs", "created_s", "labels"):
        assert getattr(back.meta, name) == getattr(m.meta, name)
    assert [back.chunks[i] for i in range(len(back.chunks))] == list(m.chunks)


@settings(max_examples=20)
@given(manifests(), keys)
def test_another_name_is_refused(m: Manifest, key: str) -> None:
    if key != m.key:
        with pytest.raises(ManifestError, match="another name"):
            decode(bytes(encode(m)), key)


@settings(max_examples=40)
@given(manifests(), st.data())
def test_any_cut_or_addition_is_refused(m: Manifest, data: st.DataObject) -> None:
    good = encode(m)
    n = data.draw(st.integers(0, len(good) - 1))
    for bad in (good[:n], good + b"\0" * (n + 1)):
        with pytest.raises(ManifestError):
            decode(bytes(bad), m.key)


def resealed(data: bytes) -> bytes:
    """The same bytes with checksums and lengths made right again: what an enemy would write."""
    body = data[64:]
    head = data[:12] + data[12:16] + struct.pack("<Q", len(body)) + xxhash.xxh3_128_digest(body) + data[40:48]
    return head + xxhash.xxh3_128_digest(head) + body


def decode_bounded(data: bytes, key: str) -> Manifest | None:
    """Decode; nothing but ManifestError, and memory in proportion to the input."""
    tracemalloc.start()
    try:
        return decode(bytes(data), key)
    except ManifestError:
        return None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < (1 << 17) + 64 * len(data), (peak, len(data))


@settings(max_examples=200)
@given(st.binary(max_size=400))
def test_random_bytes(data: bytes) -> None:
    assert decode_bounded(data, KEY) is None
    assert decode_bounded(resealed(b"GUFOCKPT\x01\0\0\0\0\0\0\0" + bytes(48) + data), KEY) is None


@settings(max_examples=150)
@given(manifests(), st.data())
def test_a_resealed_change_is_refused_or_consistent(m: Manifest, data: st.DataObject) -> None:
    """Behind right checksums anything may stand; lengths above all are aimed at."""
    good = bytearray(encode(m))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(64, len(good) - 8))
        if data.draw(st.booleans()):
            at = 64 + (at - 64) // 8 * 8
            good[at : at + 8] = struct.pack(
                "<Q", data.draw(st.sampled_from([0, 1, 7, 1 << 20, 1 << 31, 1 << 63, (1 << 64) - 1]))
            )
        else:
            good[at] ^= data.draw(st.integers(1, 255))
    back = decode_bounded(resealed(bytes(good)), m.key)
    if back is not None:  # a change of a token, a checksum, a digest: a manifest like any other
        assert encode(back) == resealed(bytes(good))
        assert len(back.chunks) == back.meta.n_chunks
        assert back.private.tail.n_bytes == back.meta.tail_bytes


def simple(n_tokens: int = 5, row_bytes: int = 2) -> Manifest:
    meta = CheckpointMeta("s", np.arange(n_tokens, dtype=np.int32), Origin.PROMPT, 4, row_bytes)
    zero = Section(0, bytes(16))
    chunks = [FileRef(KEY, 8, bytes(16))] * meta.n_chunks
    return Manifest(
        KEY, 1, meta, ChunkTable.of(chunks), PrivateFile(KEY, zero, Section(meta.tail_bytes, bytes(16)), zero)
    )


@pytest.mark.parametrize("n_tokens", [5, 6])
def test_every_byte_means_something(n_tokens: int) -> None:
    """Each byte of the body, changed behind right checksums, changes what is read or is refused."""
    good = encode(simple(n_tokens))
    for at in range(64, len(good)):
        bad = bytearray(good)
        bad[at] ^= 1
        back = decode_bounded(resealed(bytes(bad)), KEY)
        assert back is None or encode(back) == resealed(bytes(bad)), at


def test_a_later_format_is_not_damage() -> None:
    data = bytearray(encode(simple()))
    data[8:12] = struct.pack("<I", 2)
    with pytest.raises(NewerFormat, match="format 2"):
        decode(bytes(resealed(bytes(data))), KEY)
    # A flipped bit in the same field is damage: the header's checksum tells them apart.
    with pytest.raises(ManifestError) as caught:
        decode(bytes(data), KEY)
    assert not isinstance(caught.value, NewerFormat)


def test_too_large_is_refused_on_both_sides() -> None:
    with pytest.raises(ValueError, match="exceeds"):
        encode(simple(MAX_BYTES // 4, row_bytes=0))
    with pytest.raises(ManifestError, match="larger"):
        decode(bytes(bytes(MAX_BYTES + 1)), KEY)


@pytest.mark.parametrize(
    "change",
    [
        {"chunks": ChunkTable(b"")},
        {"chunks": ChunkTable.of([FileRef(KEY, 9, bytes(16))])},
        {"private": PrivateFile(KEY, Section(0, bytes(16)), Section(1, bytes(16)), Section(0, bytes(16)))},
        {"key": "ab"},
    ],
)
def test_contradictions_are_not_written(change: dict[str, object]) -> None:
    m = simple()
    fields = {"key": m.key, "sequence": 1, "meta": m.meta, "chunks": m.chunks, "private": m.private} | change
    with pytest.raises(ValueError, match=r"."):
        encode(Manifest(**fields))  # type: ignore[arg-type]
