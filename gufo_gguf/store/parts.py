"""From a checkpoint's files to the parts a restore reads, in the order in which it wants them."""

from __future__ import annotations

from gufo_gguf.store.layout import FileClass, Layout
from gufo_gguf.store.manifest import ChunkTable
from gufo_gguf.store.types import FileRef, Part, PartKind, PrivateFile


def chunk_part(layout: Layout, index: int, ref: FileRef) -> Part:
    """A whole chunk file."""
    return Part(
        PartKind.CHUNK, index, layout.chunks, ref.key + FileClass.CHUNK, 0, ref.n_bytes, ref.n_bytes, ref.checksum
    )


def private_parts(layout: Layout, private: PrivateFile) -> list[Part]:
    """The sections of a private file that are not empty."""
    parts: list[Part] = []
    at = 0
    name = private.key + FileClass.PRIVATE
    for kind, section in (
        (PartKind.PRIVATE, private.private),
        (PartKind.TAIL, private.tail),
        (PartKind.LOGITS, private.logits),
    ):
        if section.n_bytes:
            parts.append(
                Part(kind, 0, layout.private, name, at, section.n_bytes, private.n_bytes, section.checksum)
            )  # fmt: skip
        at += section.n_bytes
    return parts


def restore_parts(
    layout: Layout,
    chunks: ChunkTable,
    private: PrivateFile,
    *,
    first_chunk: int = 0,
    end_chunk: int | None = None,
    kinds: frozenset[PartKind] = frozenset(PartKind),
) -> list[Part]:
    """Chunks [first_chunk, end_chunk) in row order, then the tail, the private state and the logits.

    ``first_chunk`` > 0: the slot still holds the rows before it.  ``end_chunk`` and ``kinds`` leave
    out what a cut of a rows-only checkpoint does not need.
    """
    end = len(chunks) if end_chunk is None else end_chunk
    wanted = range(first_chunk, end) if PartKind.CHUNK in kinds else range(0)
    parts = [chunk_part(layout, i, chunks[i]) for i in wanted]
    by_kind = {p.kind: p for p in private_parts(layout, private)}
    order = (PartKind.TAIL, PartKind.PRIVATE, PartKind.LOGITS)
    return parts + [by_kind[k] for k in order if k in by_kind and k in kinds]
