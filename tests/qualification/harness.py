"""Take a checkpoint, put it somewhere, continue, and compare with the run that never stopped.

A *plan* is two lists of passes, before and after the checkpoint.  A pass decodes spans of one or
two conversations (the subject, and a neighbour in the next slot) at once.  The uninterrupted run
executes both lists in a context of its own and gives no state in between; it is the reference.

    before                          | after
    prefill ... [joint decodes]     | decodes, a prefill, decodes   (beside the neighbour if joint)
                                checkpoint of all conversations

Equal conditions: the same passes, the same neighbours, the same thread count, build and device.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gufo_gguf.backend.base import Bytes, Span
from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions
from gufo_gguf.cache.types import Tokens
from tests.qualification import cells

CHUNK_ROWS = 256
N_BATCH = 256
N_UBATCH = 128
N_CTX = 2560
"""Tokens per slot: the deepest checkpoint, a continuation, and a longer conversation as dirt."""
N_DECODES = 6
N_PREFILL = 150
"""More than a ubatch, and not a multiple of one."""
N_JOINT = 12
"""Passes decoded beside the neighbour before the checkpoint."""
N_NEIGHBOUR = 40
"""Tokens the neighbour holds before it joins."""

PART_BYTES = 10_007
"""Prime: parts end within rows, blocks and values."""

THREADS = int(os.environ.get("GUFO_QUALIFY_THREADS", "1"))
"""One by default: two OpenMP threads on a busy machine may take a second per token."""

N_GPU_LAYERS = int(os.environ.get("GUFO_QUALIFY_GPU_LAYERS", "-1"))
"""All by default; fewer leave some layers' state in host memory, beside that on a device."""

Pass = tuple[tuple[int, int, int], ...]
"""(conversation, first, end) of each span; conversation i runs in slot base + i."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model file and the settings under which its state is compared."""

    path: Path
    kv: str = "f16"
    swa_full: bool = False
    n_threads: int = THREADS

    def open(self, n_ctx: int = N_CTX, n_slots: int = 4) -> LlamaBackend:
        return LlamaBackend(
            self.path,
            LlamaOptions(
                n_ctx=n_ctx,
                n_slots=n_slots,
                n_batch=N_BATCH,
                n_ubatch=N_UBATCH,
                n_threads=self.n_threads,
                n_gpu_layers=N_GPU_LAYERS,
                cache_type_k=self.kv,
                cache_type_v=self.kv,
                swa_full=self.swa_full,
            ),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    conversations: tuple[Tokens, ...]
    before: tuple[Pass, ...]
    after: tuple[Pass, ...]
    at: tuple[int, ...]
    """Tokens of each conversation at the checkpoint."""

    @property
    def who(self) -> range:
        return range(len(self.conversations))


def random_tokens(name: str, n: int, n_vocab: int) -> Tokens:
    """n tokens that depend on the name only."""
    return np.random.default_rng(zlib.crc32(name.encode())).integers(0, n_vocab, n, dtype=np.int32)


def prefill(who: int, first: int, end: int, step: int = N_BATCH) -> list[Pass]:
    return [((who, at, min(at + step, end)),) for at in range(first, end, step)]


def decodes(first: Sequence[int], n: int) -> list[Pass]:
    """n passes of one token of each conversation, from its position in ``first``."""
    return [tuple((who, at + i, at + i + 1) for who, at in enumerate(first)) for i in range(n)]


def make_plan(name: str, n_tokens: int, joint: bool, n_vocab: int) -> Plan:
    """The plan of a case: a checkpoint at n_tokens of the subject."""
    n_joint = min(N_JOINT, n_tokens) if joint else 0
    at = (n_tokens, N_NEIGHBOUR + n_joint) if joint else (n_tokens,)
    before = prefill(0, 0, n_tokens - n_joint)
    if joint:
        before += prefill(1, 0, N_NEIGHBOUR) + decodes((n_tokens - n_joint, N_NEIGHBOUR), n_joint)
    middle = tuple(n + N_DECODES for n in at)
    resumed = (middle[0] + N_PREFILL, *middle[1:])
    after = decodes(at, N_DECODES) + prefill(0, middle[0], resumed[0]) + decodes(resumed, N_DECODES)
    conversations = tuple(random_tokens(f"{name}/{who}", n + N_DECODES, n_vocab) for who, n in enumerate(resumed))
    return Plan(conversations, tuple(before), tuple(after), at)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One conversation's state: chunks of rows as the cache would keep them, and private bytes."""

    tokens: Tokens
    chunks: tuple[Bytes, ...]
    """Packed, CHUNK_ROWS rows each; the last has the tail's rows only."""
    private: Bytes
    cells: tuple[cells.Section, ...] = ()

    @property
    def rows(self) -> Bytes:
        return np.concatenate(self.chunks) if self.chunks else np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a continuation gave and left."""

    logits: npt.NDArray[np.float32]
    """(n_passes x conversations, n_vocab)."""
    end: tuple[Checkpoint, ...]


def execute(backend: LlamaBackend, base: int, plan: Plan, passes: Iterable[Pass]) -> npt.NDArray[np.float32]:
    """Run passes with conversation i in slot base + i; all logits asked for."""
    logits = []
    for one in passes:
        backend.decode([Span(base + who, plan.conversations[who][a:b], True) for who, a, b in one])
        logits += [backend.logits(base + who) for who, _, _ in one]
    return np.array(logits)


def capture(backend: LlamaBackend, slot: int, tokens: Tokens) -> Checkpoint:
    """The state of a slot that has evaluated exactly these tokens."""
    inventory = backend.info.inventory
    assert inventory is not None
    n = backend.position(slot)
    assert n == len(tokens), f"slot {slot} is at {n}, not at {len(tokens)}"
    chunks = []
    for first in range(0, n if inventory.row_bytes else 0, CHUNK_ROWS):
        n_rows = min(CHUNK_ROWS, n - first)
        chunk = np.empty(n_rows * inventory.row_bytes, np.uint8)
        backend.rows_out(slot, first, n_rows, chunk)
        chunks.append(chunk)
    private = np.empty(inventory.private_bytes, np.uint8)
    backend.private_out(slot, private)
    book = cells.parse(backend.metadata(slot), inventory.memory, slot)
    return Checkpoint(np.array(tokens), tuple(chunks), private, book)


def take(backend: LlamaBackend, base: int, plan: Plan) -> tuple[Checkpoint, ...]:
    """Run up to the checkpoint and take it, of all conversations."""
    execute(backend, base, plan, plan.before)
    return tuple(capture(backend, base + who, plan.conversations[who][: plan.at[who]]) for who in plan.who)


class Loading(StrEnum):
    """How the payloads travel; the result must not depend on it."""

    ONE_BY_ONE = "one by one"
    """Chunk after chunk, each looked through for NaN."""
    BLOCKS = "blocks"
    """All chunks in one call; runs of them at equal distances are one copy per tensor."""
    PARTS = "parts"
    """As through a small buffer from a disk, in parts of a size that divides nothing."""


def restore(
    backend: LlamaBackend,
    slot: int,
    checkpoint: Checkpoint,
    *,
    keep_rows: int = 0,
    n_tokens: int | None = None,
    announce: Tokens | None = None,
    how: Loading = Loading.ONE_BY_ONE,
) -> None:
    """Bring a checkpoint into a slot.

    keep_rows rows stay as they lie; n_tokens < all: cut there (rows-only memories); ``announce``
    lies about the tokens (negative controls).
    """
    inventory = backend.info.inventory
    assert inventory is not None
    n = len(checkpoint.tokens) if n_tokens is None else n_tokens
    tokens = checkpoint.tokens[:n] if announce is None else announce
    backend.begin_restore(slot, tokens, keep_rows, trusted=how is not Loading.ONE_BY_ONE)
    pieces = _pieces(backend, checkpoint, keep_rows, n)
    match how:
        case Loading.ONE_BY_ONE:
            for piece in pieces:
                backend.load_rows(slot, *piece)
        case Loading.BLOCKS:
            backend.load_pieces(slot, _in_one_buffer(backend, pieces))
        case Loading.PARTS:
            for first, n_rows, buffer, buffer_rows in pieces:
                for at in range(0, buffer.nbytes, PART_BYTES):
                    part = buffer[at : at + PART_BYTES].copy()
                    backend.load_row_bytes(slot, first, n_rows, buffer_rows, at, part)
    if inventory.private_bytes and how is Loading.PARTS:
        for at in range(0, checkpoint.private.nbytes, PART_BYTES):
            backend.load_private_bytes(slot, at, checkpoint.private[at : at + PART_BYTES].copy())
    elif inventory.private_bytes:
        backend.load_private(slot, checkpoint.private)
    backend.finish_restore(slot)


RestorePiece = tuple[int, int, Bytes, int]
"""(first row, rows, packed buffer, rows that the buffer holds), as ``load_rows`` takes it."""


def _pieces(backend: LlamaBackend, checkpoint: Checkpoint, keep_rows: int, n: int) -> list[RestorePiece]:
    """The pieces of rows [keep_rows, n)."""
    inventory = backend.info.inventory
    assert inventory is not None
    pieces = []
    for i, chunk in enumerate(checkpoint.chunks):
        first, buffer_rows = i * CHUNK_ROWS, chunk.nbytes // inventory.row_bytes
        end = min(first + buffer_rows, n)
        if first < keep_rows < end:  # the chunk lies packed: rows of its middle need their own packing
            chunk, buffer_rows = tail_of(chunk, inventory.row_bytes, keep_rows - first, backend), end - keep_rows
            first = keep_rows
        if keep_rows <= first < end:
            pieces.append((first, end - first, chunk, buffer_rows))
    return pieces


def _in_one_buffer(backend: LlamaBackend, pieces: list[RestorePiece]) -> list[RestorePiece]:
    """The same pieces in one buffer (alive while a view of it is).

    Two at one distance, then a longer gap, then the rest: a run of equal distances ends and begins.
    """
    distance = max((buffer.nbytes for _, _, buffer, _ in pieces), default=0) + 64
    whole = backend.alloc(distance * len(pieces) + 192)
    moved = []
    for i, (first, n_rows, buffer, buffer_rows) in enumerate(pieces):
        at = i * distance + (192 if i >= 2 else 0)
        view = whole[at : at + buffer.nbytes]
        view[:] = buffer
        moved.append((first, n_rows, view, buffer_rows))
    return moved


def tail_of(chunk: Bytes, row_bytes: int, skip: int, backend: LlamaBackend) -> Bytes:
    """Rows [skip, end) of a packed chunk, packed again."""
    n_rows = chunk.nbytes // row_bytes
    return np.concatenate([part.reshape(n_rows, -1)[skip:].reshape(-1) for _, part in row_parts(chunk, backend)])


def row_parts(chunk: Bytes, backend: LlamaBackend) -> list[tuple[str, Bytes]]:
    """(component id, its rows) of a packed chunk, as views."""
    inventory = backend.info.inventory
    assert inventory is not None
    n_rows = chunk.nbytes // inventory.row_bytes
    parts, at = [], 0
    for component in inventory.components:
        if component.kind == "rows":
            parts.append((component.id, chunk[at : at + n_rows * component.n_bytes]))
            at += n_rows * component.n_bytes
    return parts


def private_parts(private: Bytes, backend: LlamaBackend) -> list[tuple[str, Bytes]]:
    """(component id, its bytes) of a private payload, as views."""
    inventory = backend.info.inventory
    assert inventory is not None
    parts, at = [], 0
    for component in inventory.components:
        if component.kind == "private":
            parts.append((component.id, private[at : at + component.n_bytes]))
            at += component.n_bytes
    return parts


def proceed(backend: LlamaBackend, base: int, plan: Plan) -> Outcome:
    """Continue after the checkpoint, and say what came out and what is left in the slots."""
    logits = execute(backend, base, plan, plan.after)
    return Outcome(logits, tuple(capture(backend, base + who, plan.conversations[who]) for who in plan.who))


def uninterrupted(model: Model, plan: Plan, n_ctx: int = N_CTX, n_slots: int = 4) -> Outcome:
    """The reference: both halves in one go, in a fresh context, giving no state in between."""
    with model.open(n_ctx, n_slots) as backend:
        execute(backend, 0, plan, plan.before)
        outcome = proceed(backend, 0, plan)
    assert all(np.ptp(one) > 0 for one in outcome.logits), "a reference that says nothing agrees with anything"
    return outcome


def n_different(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> int:
    """Bytes that differ; of arrays of unlike sizes all bytes of the longer."""
    if a.nbytes != b.nbytes:
        return max(a.nbytes, b.nbytes)
    return int(np.count_nonzero(a.reshape(-1).view(np.uint8) != b.reshape(-1).view(np.uint8)))


def n_different_cells(a: tuple[cells.Section, ...], b: tuple[cells.Section, ...]) -> int:
    """Cells and tensor lists that differ."""
    if len(a) != len(b):
        return max(len(a), len(b))
    n = 0
    for mine, other in zip(a, b, strict=True):
        n += mine.tensors != other.tensors
        n += abs(len(mine.cells) - len(other.cells))
        n += sum(x != y for x, y in zip(mine.cells, other.cells, strict=False))
    return n


def compare_states(a: Checkpoint, b: Checkpoint) -> dict[str, int]:
    return {
        "rows": n_different(a.rows, b.rows),
        "private": n_different(a.private, b.private),
        "cells": n_different_cells(a.cells, b.cells),
    }


def compare(reference: Outcome, outcome: Outcome) -> dict[str, int]:
    """Differing bytes of logits, rows and private state, and differing cells, of all conversations."""
    found = {"logits": n_different(reference.logits, outcome.logits)}
    for a, b in zip(reference.end, outcome.end, strict=True):
        for name, n in compare_states(a, b).items():
            found[name] = found.get(name, 0) + n
    return found


def component_rows(backend: LlamaBackend, checkpoint: Checkpoint) -> dict[str, npt.NDArray[np.uint8]]:
    """(n_tokens, bytes per row) of each row component, out of its chunks."""
    parts: dict[str, list[npt.NDArray[np.uint8]]] = {}
    for i, chunk in enumerate(checkpoint.chunks):
        n_rows = min(CHUNK_ROWS, len(checkpoint.tokens) - i * CHUNK_ROWS)
        for name, rows in row_parts(chunk, backend):
            parts.setdefault(name, []).append(rows.reshape(n_rows, -1))
    return {name: np.concatenate(pieces) for name, pieces in parts.items()}


def n_rewritten(backend: LlamaBackend, before: Checkpoint, after: Checkpoint) -> int:
    """Bytes of the earlier state's rows that are not the same later: rows are append-only, so 0."""
    later = component_rows(backend, after)
    return sum(n_different(rows, later[name][: len(rows)]) for name, rows in component_rows(backend, before).items())
