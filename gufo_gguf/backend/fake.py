"""A deterministic backend without a model: the cache and the scheduler are tested on it.

It keeps the whole contract of ``backend/base.py`` and is stricter than a real device where that
finds mistakes: rows or private state of another computation, a missing row, a NaN, a transfer out
of a slot in restore are all refused.  ``strict=False`` accepts them as a GPU would; then the next
logits differ, which is what negative controls look for.  The arithmetic is in ``fake_state.py``.

Faults enter by the constructor: ``faults`` is asked before every call and may answer "fail now".

Owner thread only.  Rejected: subclassing the llama.cpp backend with a stub library; the fake would
then share the mistakes it has to find.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gufo_gguf.backend import fake_state as fs
from gufo_gguf.backend.base import BackendInfo, Bytes, Logits, Span
from gufo_gguf.cache.types import Component, ComponentKind, Inventory, Tokens
from gufo_gguf.core.errors import BackendError, ContextFull, SlotNotReady, StateRejected

_POISON = 0xA5


class Faults(Protocol):
    def hit(self, op: str) -> bool:
        """Count one call of ``op``; True = it fails."""
        ...


class FailNth:
    """Fails the n-th call (counted from 1) among the named operations, once; () = all operations."""

    def __init__(self, nth: int, ops: Iterable[str] = ()) -> None:
        self._left = nth
        self._ops = frozenset(ops)
        self.fired: str | None = None

    def hit(self, op: str) -> bool:
        if self._ops and op not in self._ops:
            return False
        self._left -= 1
        if self._left == 0:
            self.fired = op
            return True
        return False


@dataclass(slots=True)
class _Slot:
    """One sequence.  ``rows`` grows by doubling; rows [0, len(tokens)) are valid."""

    tokens: list[int] = field(default_factory=list)
    rows: fs.U8 = field(default_factory=lambda: np.empty((0, 0), dtype=np.uint8))
    link: int = fs.SEED_LINK
    digest: int = 0
    has_logits: bool = False
    # Restore in progress, else None.
    target: list[int] | None = None
    loaded: fs.U8 | None = None
    """One flag per row of the target: 1 = in place."""
    private: fs.U8 | None = None
    parts: bytearray = field(default_factory=bytearray)


class FakeBackend:
    """``n_slots`` hash chains with the transfers of a real backend.

    row_bytes = 0: recurrent-only; private_bytes = 0: rows only (histories may be cut anywhere).
    """

    def __init__(
        self,
        *,
        row_bytes: int = 24,
        private_bytes: int = 64,
        n_slots: int = 1,
        n_ctx: int = 4096,
        n_vocab: int = 64,
        n_batch: int = 512,
        n_ubatch: int = 256,
        strict: bool = True,
        faults: Faults | None = None,
        name: str = "fake",
    ) -> None:
        if row_bytes and row_bytes < fs.MIN_ROW_BYTES:
            raise ValueError(f"row_bytes is {row_bytes}; it must be 0 or at least {fs.MIN_ROW_BYTES}")
        if private_bytes and (private_bytes < fs.MIN_PRIVATE_BYTES or private_bytes % 8):
            raise ValueError(f"private_bytes is {private_bytes}; 0 or a multiple of 8 from {fs.MIN_PRIVATE_BYTES}")
        if row_bytes == 0 and private_bytes == 0:
            raise ValueError("a backend without any state cannot be cached")
        self._row_bytes = row_bytes
        self._private_bytes = private_bytes
        self._strict = strict
        self._faults = faults
        self._slots = [_Slot() for _ in range(n_slots)]
        self._closed = False
        inventory = _inventory(row_bytes, private_bytes)
        self._row_widths = [c.n_bytes for c in inventory.components if c.kind is ComponentKind.ROWS]
        self.info = BackendInfo(
            identity=f"{name}-{row_bytes}-{private_bytes}-{n_ubatch}",
            model_name=name,
            arch="fake",
            device="cpu",
            n_ctx=n_ctx,
            n_ctx_train=n_ctx,
            n_slots=n_slots,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_vocab=n_vocab,
            memory=inventory.memory,
            inventory=inventory,
            uncacheable=None,
            n_params=0,
            model_bytes=0,
        )

    # -- running ---------------------------------------------------------------------------------
    def decode(self, spans: Sequence[Span]) -> None:
        """See ``Backend.decode``.  An injected fault fires after the first micro-batch: the slots are in doubt."""
        failing = self._hit("decode")
        slots = [span.slot for span in spans]
        if not spans or slots != sorted(set(slots)):
            raise BackendError(f"a pass needs one span per slot, slots ascending; got slots {slots}")
        if sum(len(span.tokens) for span in spans) > self.info.n_batch:
            raise BackendError(f"a pass holds at most {self.info.n_batch} tokens")
        for span in spans:
            slot = self._ready(span.slot)
            if len(span.tokens) == 0:
                raise BackendError(f"slot {span.slot}: a span without tokens")
            if len(slot.tokens) + len(span.tokens) > self.info.n_ctx:
                raise ContextFull(f"slot {span.slot} holds {len(slot.tokens)} of {self.info.n_ctx} tokens")
        for done, pieces in enumerate(_micro_batches(spans, self.info.n_ubatch)):
            if failing and done:
                raise BackendError("injected fault in decode")
            total = sum(len(tokens) for _, tokens in pieces)
            for place, (index, tokens) in enumerate(pieces):
                self._advance(self._slots[index], tokens, total, place)
        if failing:
            raise BackendError("injected fault in decode")
        for span in spans:
            self._slots[span.slot].has_logits = span.want_logits

    def logits(self, slot: int) -> Logits:
        state = self._ready(slot)
        if not state.has_logits:
            raise BackendError(f"slot {slot}: no logits were asked for in its last pass")
        return fs.logits_from(state.link, state.digest, self.info.n_vocab)

    def position(self, slot: int) -> int:
        return len(self._ready(slot).tokens)

    def truncate(self, slot: int, n_tokens: int) -> None:
        self._fail("truncate")
        state = self._ready(slot)
        n = len(state.tokens)
        if not 0 <= n_tokens <= n:
            raise BackendError(f"slot {slot} holds {n} tokens; it cannot keep {n_tokens}")
        if n_tokens == 0:
            _clear(state)
        elif n_tokens < n:
            if self._private_bytes:
                raise BackendError(f"slot {slot}: private state cannot be wound back from {n} to {n_tokens}")
            del state.tokens[n_tokens:]
            state.link = int(state.rows[n_tokens - 1, :8].view(np.uint64)[0])
            state.digest = fs.rows_digest(state.rows[:n_tokens], 0)
            state.has_logits = False

    # -- state out -------------------------------------------------------------------------------
    def rows_out(self, slot: int, first: int, n: int, out: Bytes) -> None:
        self._fail("rows_out")
        state = self._ready(slot)
        if first < 0 or n <= 0 or first + n > len(state.tokens):
            raise BackendError(f"slot {slot} holds {len(state.tokens)} rows; asked for [{first}, {first + n})")
        if len(out) < n * self._row_bytes:
            raise BackendError(f"{n} rows need {n * self._row_bytes} bytes; the buffer has {len(out)}")
        column = offset = 0
        for width in self._row_widths:
            block = state.rows[first : first + n, column : column + width]
            out[offset : offset + n * width] = block.reshape(-1)
            column += width
            offset += n * width

    def pieces_out(self, slot: int, pieces: Sequence[tuple[int, int, Bytes]]) -> None:
        for first, n, out in pieces:
            self.rows_out(slot, first, n, out)

    def private_out(self, slot: int, out: Bytes) -> None:
        self._fail("private_out")
        state = self._ready(slot)
        if self._private_bytes == 0:
            raise BackendError("this backend has no private state")
        if len(out) < self._private_bytes:
            raise BackendError(f"private state is {self._private_bytes} bytes; the buffer has {len(out)}")
        payload = fs.private_from(state.link, len(state.tokens), state.digest, self._private_bytes)
        out[: self._private_bytes] = payload

    # -- state in --------------------------------------------------------------------------------
    def begin_restore(self, slot: int, tokens: Tokens, keep_rows: int = 0, *, trusted: bool = False) -> None:
        self._fail("begin_restore")
        state = self._ready(slot)
        target = [int(t) for t in tokens]
        if not 0 < len(target) <= self.info.n_ctx:
            raise BackendError(f"slot {slot}: a state of {len(target)} tokens does not fit {self.info.n_ctx}")
        if not 0 <= keep_rows <= min(len(target), len(state.tokens)):
            raise BackendError(f"slot {slot} holds {len(state.tokens)} rows; it cannot keep {keep_rows}")
        if self._strict and state.tokens[:keep_rows] != target[:keep_rows]:
            raise BackendError(f"slot {slot}: the rows to keep are those of other tokens")
        self._reserve_rows(state, len(target))
        state.rows[keep_rows : len(target)] = _POISON
        state.target = target
        state.loaded = np.zeros(len(target), dtype=np.uint8)
        state.loaded[:keep_rows] = 1
        state.private = None
        state.has_logits = False

    def load_rows(self, slot: int, first: int, n: int, buffer: Bytes, buffer_rows: int) -> None:
        self._fail("load_rows")
        state = self._restoring(slot)
        assert state.target is not None and state.loaded is not None
        if first < 0 or n <= 0 or first + n > len(state.target):
            raise BackendError(
                f"slot {slot}: rows [{first}, {first + n}) lie outside the announced {len(state.target)}"
            )
        if n > buffer_rows or len(buffer) < buffer_rows * self._row_bytes:
            raise BackendError(f"slot {slot}: {n} of {buffer_rows} rows out of a buffer of {len(buffer)} bytes")
        column = offset = 0
        for width in self._row_widths:
            block = buffer[offset : offset + n * width].reshape(n, width)
            state.rows[first : first + n, column : column + width] = block
            column += width
            offset += buffer_rows * width
        state.loaded[first : first + n] = 1

    def load_pieces(self, slot: int, pieces: Sequence[tuple[int, int, Bytes, int]]) -> None:
        for first, n, buffer, buffer_rows in pieces:
            self.load_rows(slot, first, n, buffer, buffer_rows)

    def load_row_bytes(self, slot: int, first: int, n: int, buffer_rows: int, offset: int, data: Bytes) -> None:
        whole = self._gather(slot, offset, data, buffer_rows * self._row_bytes)
        if whole is not None:
            self.load_rows(slot, first, n, whole, buffer_rows)

    def load_private_bytes(self, slot: int, offset: int, data: Bytes) -> None:
        whole = self._gather(slot, offset, data, self._private_bytes)
        if whole is not None:
            self.load_private(slot, whole)

    def _gather(self, slot: int, offset: int, data: Bytes, total: int) -> Bytes | None:
        """The payload, once its last part has come."""
        state = self._restoring(slot)
        if offset != len(state.parts) or offset + len(data) > total:
            raise self._reject(slot, f"bytes at {offset} do not continue the {len(state.parts)} given")
        state.parts += data.tobytes()
        if len(state.parts) < total:
            return None
        whole = np.frombuffer(bytes(state.parts), dtype=np.uint8)
        state.parts = bytearray()
        return whole

    def load_private(self, slot: int, buffer: Bytes) -> None:
        self._fail("load_private")
        state = self._restoring(slot)
        if self._private_bytes == 0:
            raise BackendError("this backend has no private state")
        if len(buffer) < self._private_bytes:
            raise self._reject(slot, f"private payload of {len(buffer)} bytes, expected {self._private_bytes}")
        payload = np.array(buffer[: self._private_bytes], dtype=np.uint8)
        if fs.has_nan(payload):
            raise self._reject(slot, "private payload holds NaN")
        state.private = payload

    def finish_restore(self, slot: int) -> None:
        failing = self._hit("finish_restore")
        state = self._restoring(slot)
        assert state.target is not None and state.loaded is not None
        n = len(state.target)
        if failing:
            raise self._reject(slot, "injected fault")
        if self._row_bytes and not state.loaded.all():
            raise self._reject(slot, f"row {int(np.argmin(state.loaded))} of {n} is missing")
        if self._private_bytes and state.private is None:
            raise self._reject(slot, "private state is missing")
        rows = state.rows[:n]
        tokens = np.array(state.target, dtype=np.int32)
        if self._row_bytes and self._strict:
            broken = fs.chain_breaks(rows, tokens)
            if broken is not None:
                raise self._reject(slot, f"row {broken} does not follow from the rows before it")
        digest = fs.rows_digest(rows, 0)
        if state.private is not None:
            link, position = fs.private_link(state.private)
            if position != n:
                raise self._reject(slot, f"private state stands at {position}, rows at {n}")
            expected = fs.private_from(link, n, digest, self._private_bytes)
            if not np.array_equal(expected, state.private):
                if self._strict:
                    raise self._reject(slot, "private state was not computed from these rows")
                # As on a device: the wrong bytes run, and everything after them differs.
                link = fs.combine(link, int(state.private.view(np.uint64).sum(dtype=np.uint64)))
            elif self._strict and self._row_bytes and link != int(rows[n - 1, :8].view(np.uint64)[0]):
                raise self._reject(slot, "private state belongs to another last row")
        else:
            link = int(rows[n - 1, :8].view(np.uint64)[0])
        state.tokens, state.link, state.digest = state.target, link, digest
        state.target = state.loaded = state.private = None

    def abort_restore(self, slot: int) -> None:
        _clear(self._slot(slot))

    # -- memory ----------------------------------------------------------------------------------
    def alloc(self, n_bytes: int) -> Bytes:
        """Poisoned memory: a byte that nobody wrote does not look like state."""
        self._fail("alloc")
        return np.full(n_bytes, _POISON, dtype=np.uint8)

    def close(self) -> None:
        self._closed = True

    # -- inside ----------------------------------------------------------------------------------
    def _hit(self, op: str) -> bool:
        if self._closed:
            raise BackendError("the backend is closed")
        return self._faults is not None and self._faults.hit(op)

    def _fail(self, op: str) -> None:
        if self._hit(op):
            raise BackendError(f"injected fault in {op}")

    def _slot(self, slot: int) -> _Slot:
        if not 0 <= slot < len(self._slots):
            raise BackendError(f"there is no slot {slot}")
        return self._slots[slot]

    def _ready(self, slot: int) -> _Slot:
        state = self._slot(slot)
        if state.target is not None:
            raise SlotNotReady(f"slot {slot} is being restored")
        return state

    def _restoring(self, slot: int) -> _Slot:
        state = self._slot(slot)
        if state.target is None:
            raise BackendError(f"slot {slot} is not being restored")
        return state

    def _reject(self, slot: int, why: str) -> StateRejected:
        _clear(self._slots[slot])
        return StateRejected(f"slot {slot}: {why}")

    def _advance(self, slot: _Slot, tokens: Tokens, total: int, place: int) -> None:
        """One micro-batch's share of one slot: rows, link and digest move on by len(tokens)."""
        first, n = len(slot.tokens), len(tokens)
        salt = fs.combine(n, total, place, slot.digest)
        links = fs.chain(slot.link, tokens, salt)
        slot.tokens.extend(tokens.tolist())
        slot.link = int(links[-1])
        if self._row_bytes:
            self._reserve_rows(slot, first + n)
            rows = fs.rows_from(links, np.full(n, salt, dtype=np.uint64), self._row_bytes)
            slot.rows[first : first + n] = rows
            slot.digest = (slot.digest + fs.rows_digest(rows, first)) & fs.MASK

    def _reserve_rows(self, slot: _Slot, n_rows: int) -> None:
        have = len(slot.rows)
        if n_rows <= have and slot.rows.shape[1] == self._row_bytes:
            return
        grown = np.full((max(n_rows, 2 * have, 64), self._row_bytes), _POISON, dtype=np.uint8)
        if have:
            grown[:have] = slot.rows
        slot.rows = grown


def _clear(slot: _Slot) -> None:
    slot.tokens = []
    slot.rows[:] = _POISON
    slot.link, slot.digest, slot.has_logits = fs.SEED_LINK, 0, False
    slot.target = slot.loaded = slot.private = None
    slot.parts = bytearray()


def _inventory(row_bytes: int, private_bytes: int) -> Inventory:
    """Two components of each kind with unlike sizes, so that a packing mistake shows."""
    components: list[Component] = []
    if row_bytes:
        k = max(1, row_bytes // 3)
        components.append(Component("fake.k", ComponentKind.ROWS, "u8", k, 1))
        components.append(Component("fake.v", ComponentKind.ROWS, "u8", row_bytes - k, 1))
    if private_bytes:
        r = private_bytes // 4 // 4 * 4
        components.append(Component("fake.s", ComponentKind.PRIVATE, "f32", private_bytes - r, 1))
        components.append(Component("fake.r", ComponentKind.PRIVATE, "f32", r, 1))
    memory = "kv" if not private_bytes else "hybrid" if row_bytes else "recurrent"
    return Inventory(memory, tuple(components))


def _micro_batches(spans: Sequence[Span], n_ubatch: int) -> list[list[tuple[int, Tokens]]]:
    """All tokens of a pass in order, cut every n_ubatch: each batch is its (slot, tokens) pieces."""
    batches: list[list[tuple[int, Tokens]]] = [[]]
    room = n_ubatch
    for span in spans:
        tokens = span.tokens
        while len(tokens):
            if room == 0:
                batches.append([])
                room = n_ubatch
            piece, tokens = tokens[:room], tokens[room:]
            batches[-1].append((span.slot, piece))
            room -= len(piece)
    return batches
