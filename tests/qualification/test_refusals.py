"""Payloads that are not the announced state are refused; the slot is then empty and usable.

begin_restore -> load_rows* -> load_private? -> finish_restore
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gufo_gguf.backend.base import Span
from gufo_gguf.backend.llama import LlamaBackend
from gufo_gguf.core.errors import StateRejected
from tests.qualification import harness
from tests.qualification.cases import Case, Path
from tests.qualification.harness import CHUNK_ROWS, Checkpoint, Model, Plan
from tests.qualification.qualify import model_of

pytestmark = [pytest.mark.native, pytest.mark.slow]

AT = 300
"""One whole chunk and a tail of 44 rows."""
SLOT = 1


class Opened:
    """A variant with a good checkpoint in hand, and slot 1 to spoil."""

    def __init__(self, variant: str, kv: str) -> None:
        self.model: Model = model_of(Case(variant, Path.SAME, kv, AT, False, "f16"))
        self.backend: LlamaBackend = self.model.open(n_ctx=512, n_slots=3)
        assert self.backend.info.inventory is not None
        self.row_bytes = self.backend.info.inventory.row_bytes
        self.private_bytes = self.backend.info.inventory.private_bytes
        self.plan: Plan = harness.make_plan(variant, AT, False, self.backend.info.n_vocab)
        (self.good,) = harness.take(self.backend, 0, self.plan)
        self.reference = harness.uninterrupted(self.model, self.plan, n_ctx=512, n_slots=3)

    def begin(self) -> None:
        # the slot is in use: what the refused restore must not bring back
        if self.backend.position(SLOT) == 0:
            self.backend.decode([Span(SLOT, self.good.tokens[:20], False)])
        self.backend.begin_restore(SLOT, self.good.tokens)

    def load(self, *chunks: int) -> None:
        for i in chunks:
            chunk = self.good.chunks[i]
            n_rows = chunk.nbytes // self.row_bytes
            self.backend.load_rows(SLOT, i * CHUNK_ROWS, n_rows, chunk, n_rows)

    def refused(self, action: Callable[[], None], message: str) -> None:
        """The action is refused; the slot is empty, runs, and is as good as a fresh one."""
        with pytest.raises(StateRejected, match=message):
            action()
        assert self.backend.position(SLOT) == 0
        with pytest.raises(ValueError, match="not being restored"):
            self.backend.finish_restore(SLOT)

    def check_cold(self) -> None:
        """Computed from nothing in the spoilt slot, and restored into it: both as the reference."""
        self.backend.truncate(SLOT, 0)
        harness.execute(self.backend, SLOT, self.plan, self.plan.before)
        cold = harness.compare(self.reference, harness.proceed(self.backend, SLOT, self.plan))
        harness.restore(self.backend, SLOT, self.good)
        restored = harness.compare(self.reference, harness.proceed(self.backend, SLOT, self.plan))
        assert (any(cold.values()), any(restored.values())) == (False, False), (cold, restored)


@pytest.fixture(scope="module")
def opened() -> Iterator[Callable[[str, str], Opened]]:
    """One context per (variant, KV type) for the module: refusals must not leak into each other."""
    known: dict[tuple[str, str], Opened] = {}

    def get(variant: str, kv: str = "f16") -> Opened:
        if (variant, kv) not in known:
            known[variant, kv] = Opened(variant, kv)
        return known[variant, kv]

    yield get
    for each in known.values():
        each.backend.close()


Get = Callable[..., Opened]
HYBRIDS = ("qwen4exp", "lfm2", "mamba2", "gemma3-ring")
WITH_ROWS = ("llama", "qwen4exp", "gemma3-ring")


# -- private state -------------------------------------------------------------------------------


def _spoil(at: int, value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(private: np.ndarray) -> np.ndarray:
        private[at : at + 4] = np.frombuffer(struct.pack("<i", value), np.uint8)
        return private

    return change


BAD_PRIVATE: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "short": (lambda p: p[:-1].copy(), "bytes"),
    "long": (lambda p: np.append(p, np.uint8(0)), "bytes"),
    "empty": (lambda p: p[:0].copy(), "bytes"),
    "not a state": (_spoil(0, 0), "layout"),
    "other layout": (_spoil(4, 99), "layout"),
    "other position": (_spoil(8, AT - 1), "token 299"),
}


@pytest.mark.parametrize("what", BAD_PRIVATE)
@pytest.mark.parametrize("variant", HYBRIDS)
def test_a_private_payload_that_is_not_this_state(opened: Get, variant: str, what: str) -> None:
    it = opened(variant)
    change, message = BAD_PRIVATE[what]
    bad = change(it.good.private.copy())
    it.begin()
    if it.row_bytes:
        it.load(0, 1)
    it.refused(lambda: it.backend.load_private(SLOT, bad), message)
    it.check_cold()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (lambda t: np.where(t == AT - 1, -1, t), "does not end"),
        (lambda t: np.full_like(t, -1), "does not end"),
        (lambda t: np.where(t == AT - 1, AT, t), f"position {AT}"),
        (lambda t: np.where(t == AT - 2, AT - 1, t), "twice"),
        (lambda t: np.where(t == AT - 1, -7, t), "position -7"),
    ],
    ids=["newest missing", "empty", "beyond", "twice", "negative"],
)
def test_a_ring_whose_cell_table_cannot_be(
    opened: Get, table: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    it = opened("gemma3-ring")
    bad = it.good.private.copy()
    cells = dict(harness.private_parts(bad, it.backend))["window_cells"]
    cells[:] = table(cells.view(np.int32)).astype(np.int32).view(np.uint8)
    it.begin()
    it.load(0, 1)
    it.refused(lambda: it.backend.load_private(SLOT, bad), message)
    it.check_cold()


# -- rows ----------------------------------------------------------------------------------------


def _short(it: Opened) -> None:
    it.backend.load_rows(SLOT, 0, CHUNK_ROWS, it.good.chunks[0][:-1], CHUNK_ROWS)


def _more_than_the_buffer(it: Opened) -> None:
    it.backend.load_rows(SLOT, 0, CHUNK_ROWS, it.good.chunks[0], CHUNK_ROWS - 1)


def _gap(it: Opened) -> None:
    it.load(1)


def _twice(it: Opened) -> None:
    it.load(0, 0)


def _overlap(it: Opened) -> None:
    it.load(0)
    it.backend.load_rows(SLOT, CHUNK_ROWS - 1, 44, it.good.chunks[1], 44)


def _beyond(it: Opened) -> None:
    it.load(0)
    it.backend.load_rows(SLOT, CHUNK_ROWS, 45, np.zeros(45 * it.row_bytes, np.uint8), 45)


def _rows_missing(it: Opened) -> None:
    it.load(0)
    if it.private_bytes:
        it.backend.load_private(SLOT, it.good.private)
    it.backend.finish_restore(SLOT)


def _nothing(it: Opened) -> None:
    it.backend.finish_restore(SLOT)


BAD_ROWS: dict[str, tuple[Callable[[Opened], None], str]] = {
    "short": (_short, "short"),
    "more than the buffer": (_more_than_the_buffer, "short"),
    "gap": (_gap, "continue at row 0"),
    "twice": (_twice, "continue at row 256"),
    "overlap": (_overlap, "continue at row 256"),
    "beyond": (_beyond, "continue at row 256"),
    "missing at finish": (_rows_missing, "256 of 300 rows"),
    "nothing loaded": (_nothing, "0 of 300 rows"),
}


@pytest.mark.parametrize("what", BAD_ROWS)
@pytest.mark.parametrize("variant", WITH_ROWS)
def test_pieces_that_do_not_make_the_state(opened: Get, variant: str, what: str) -> None:
    it = opened(variant)
    action, message = BAD_ROWS[what]
    it.begin()
    it.refused(lambda: action(it), message)
    it.check_cold()


@pytest.mark.parametrize("variant", HYBRIDS)
def test_a_restore_without_its_private_state(opened: Get, variant: str) -> None:
    it = opened(variant)
    it.begin()
    if it.row_bytes:
        it.load(0, 1)
    it.refused(lambda: it.backend.finish_restore(SLOT), "private state was not loaded")
    it.check_cold()


# -- many pieces, and parts of pieces ------------------------------------------------------------


@pytest.mark.parametrize("variant", WITH_ROWS)
def test_several_pieces_of_which_one_does_not_fit(opened: Get, variant: str) -> None:
    it = opened(variant)
    good, tail = it.good.chunks
    for second, message in (
        ((CHUNK_ROWS, 45, np.zeros(45 * it.row_bytes, np.uint8), 45), "continue at row 256"),
        ((CHUNK_ROWS + 1, 43, tail, 44), "continue at row 256"),
        ((CHUNK_ROWS, 44, tail[:-1], 44), "short"),
    ):
        it.begin()
        pieces = [(0, CHUNK_ROWS, good, CHUNK_ROWS), second]
        it.refused(lambda pieces=pieces: it.backend.load_pieces(SLOT, pieces), message)  # type: ignore[misc]
    it.check_cold()


@pytest.mark.parametrize("variant", WITH_ROWS)
def test_parts_that_do_not_continue(opened: Get, variant: str) -> None:
    it = opened(variant)
    chunk = it.good.chunks[0]
    load = it.backend.load_row_bytes
    for actions, message in (
        ([(0, CHUNK_ROWS, CHUNK_ROWS, 1, chunk[1:100])], "at byte 0 of row 0"),
        ([(0, CHUNK_ROWS, CHUNK_ROWS, 0, chunk[:100]), (0, CHUNK_ROWS, CHUNK_ROWS, 101, chunk[101:])], "at byte 100"),
        ([(0, CHUNK_ROWS, CHUNK_ROWS, 0, chunk[:100]), (0, CHUNK_ROWS, CHUNK_ROWS, 99, chunk[99:])], "at byte 100"),
        ([(0, CHUNK_ROWS, CHUNK_ROWS, 0, np.append(chunk, chunk[:1]))], "longer"),
        ([(CHUNK_ROWS, 44, 44, 0, it.good.chunks[1])], "of row 0"),
    ):
        if it.backend.position(SLOT) == 0:
            it.backend.decode([Span(SLOT, it.good.tokens[:20], False)])
        it.backend.begin_restore(SLOT, it.good.tokens, trusted=True)
        *before, last = actions
        for action in before:
            load(SLOT, *action)
        it.refused(lambda last=last: load(SLOT, *last), message)  # type: ignore[misc]
    it.check_cold()


@pytest.mark.parametrize("variant", WITH_ROWS)
def test_a_chunk_given_in_part_is_not_complete(opened: Get, variant: str) -> None:
    it = opened(variant)
    it.backend.truncate(SLOT, 0)
    it.backend.begin_restore(SLOT, it.good.tokens, trusted=True)
    it.load(0)
    it.backend.load_row_bytes(SLOT, CHUNK_ROWS, 44, 44, 0, it.good.chunks[1][:-1])
    if it.private_bytes:
        it.backend.load_private(SLOT, it.good.private)
    it.refused(lambda: it.backend.finish_restore(SLOT), "256 of 300 rows")
    it.check_cold()


@pytest.mark.parametrize("variant", HYBRIDS)
def test_private_bytes_that_do_not_continue_or_are_not_all(opened: Get, variant: str) -> None:
    it = opened(variant)
    private = it.good.private
    part = it.backend.load_private_bytes

    def begin(*parts: tuple[int, int]) -> None:
        it.backend.truncate(SLOT, 0)
        it.backend.begin_restore(SLOT, it.good.tokens, trusted=True)
        if it.row_bytes:
            it.load(0, 1)
        for a, b in parts:
            part(SLOT, a, private[a:b])

    begin((0, 10), (10, 1000))  # the header itself comes in two parts
    it.refused(lambda: part(SLOT, 1001, private[1001:]), "at 1001")
    begin((0, 1000))
    it.refused(lambda: part(SLOT, 1000, np.append(private[1000:], private[:1])), "longer")
    begin((0, len(private) - 1))
    it.refused(lambda: it.backend.finish_restore(SLOT), "private state")
    begin((0, 1000))
    it.refused(lambda: it.backend.load_private(SLOT, private), "already")
    begin((0, len(private)))
    it.refused(lambda: part(SLOT, len(private), private[:1]), "longer|continue")
    it.check_cold()


@pytest.mark.parametrize("variant", WITH_ROWS)
def test_parts_are_for_trusted_payloads(opened: Get, variant: str) -> None:
    """Looked through for NaN, a part that ends within a block would show scales where none are."""
    it = opened(variant)
    it.begin()
    it.refused(lambda: it.backend.load_row_bytes(SLOT, 0, 256, 256, 0, it.good.chunks[0][:999]), "trusted")
    if it.private_bytes:
        it.begin()
        it.load(0, 1)
        it.refused(lambda: it.backend.load_private_bytes(SLOT, 0, it.good.private[:999]), "trusted")
    it.check_cold()


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("variant", ["llama", *HYBRIDS])
def test_damage_that_was_loaded_before_its_checksum_was_known_leaves_nothing(
    opened: Get, variant: str, kv: str
) -> None:
    """All ones is NaN in every type.  Trusted parts are not looked through: giving up must clean up."""
    it = opened(variant, kv)
    it.backend.truncate(SLOT, 0)
    it.backend.begin_restore(SLOT, it.good.tokens, trusted=True)
    for i, chunk in enumerate(it.good.chunks):
        n_rows = chunk.nbytes // it.row_bytes
        it.backend.load_row_bytes(SLOT, i * CHUNK_ROWS, n_rows, n_rows, 0, np.full_like(chunk, 255))
    if it.private_bytes:
        it.backend.load_private_bytes(SLOT, 0, it.good.private[:16])
        damaged = np.full_like(it.good.private, 255)[16:-1]
        it.backend.load_private_bytes(SLOT, 16, damaged)
    it.backend.abort_restore(SLOT)
    it.check_cold()


# -- NaN -----------------------------------------------------------------------------------------

# A NaN survives clearing (0 x NaN), so one that got in would poison the slot's next conversation.
NAN_F16, NAN_F16_NEGATIVE, NAN_F32 = b"\x01\x7e", b"\x01\xfc", b"\x00\x00\xc0\x7f"


def _nan_rows(it: Opened, component: int, row: int, nan: bytes) -> Checkpoint:
    chunks = tuple(chunk.copy() for chunk in it.good.chunks)
    parts = [part for _, part in harness.row_parts(chunks[1], it.backend)]
    part = parts[component]
    at = row * (part.nbytes // (AT - CHUNK_ROWS))
    part[at : at + len(nan)] = np.frombuffer(nan, np.uint8)  # a row starts with a value, or with a block's scale
    return Checkpoint(it.good.tokens, chunks, it.good.private)


@pytest.mark.parametrize("nan", [NAN_F16, NAN_F16_NEGATIVE], ids=["nan", "-nan"])
@pytest.mark.parametrize(("component", "row"), [(0, 0), (-1, 43), (1, 20)])
@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("variant", WITH_ROWS)
def test_rows_that_hold_nan(opened: Get, variant: str, kv: str, component: int, row: int, nan: bytes) -> None:
    it = opened(variant, kv)
    bad = _nan_rows(it, component, row, nan)
    it.refused(lambda: harness.restore(it.backend, SLOT, bad), "NaN")
    it.check_cold()


@pytest.mark.parametrize("variant", HYBRIDS)
def test_each_private_component_that_holds_nan(opened: Get, variant: str) -> None:
    it = opened(variant)
    names = [name for name, _ in harness.private_parts(it.good.private, it.backend)][1:]
    for name in [n for n in names if n != "window_cells"]:
        bad = it.good.private.copy()
        part = dict(harness.private_parts(bad, it.backend))[name]
        nan = NAN_F16 if variant == "gemma3-ring" else NAN_F32
        part[-len(nan) :] = np.frombuffer(nan, np.uint8)
        it.begin()
        if it.row_bytes:
            it.load(0, 1)
        it.refused(lambda bad=bad: it.backend.load_private(SLOT, bad), "NaN")  # type: ignore[misc]
    it.check_cold()


def test_clearing_everything_empties_all_slots(opened: Get) -> None:
    it = opened("qwen4exp")
    it.begin()
    it.backend.clear_all()
    assert [it.backend.position(slot) for slot in range(3)] == [0, 0, 0]
    it.check_cold()


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", WITH_ROWS)
def test_a_restore_that_cannot_begin_leaves_the_slot_as_it_was(opened: Get, variant: str) -> None:
    it = opened(variant)
    backend = it.backend
    harness.restore(backend, SLOT, it.good)
    too_long = np.zeros(backend.info.n_ctx + 1, np.int32)
    for tokens, keep_rows, message in (
        (it.good.tokens[:0], 0, "0 tokens"),
        (too_long, 0, f"context of {backend.info.n_ctx}"),
        (it.good.tokens, AT + 1, "keep_rows"),
        (np.zeros(400, np.int32), 301, "row 300"),
    ):
        with pytest.raises(ValueError, match=message):
            backend.begin_restore(SLOT, tokens, keep_rows)
    outcome = harness.proceed(backend, SLOT, it.plan)
    assert not any(harness.compare(it.reference, outcome).values())


def test_rows_that_are_not_there_are_not_given(opened: Get) -> None:
    it = opened("llama")
    out = np.empty(600 * it.row_bytes, np.uint8)
    for first, n, buffer, message in (
        (AT, 1, out, "row 300"),
        (0, AT + 1, out, "row 300"),
        (500, 100, out, "beyond"),
        (0, AT, out[: AT * it.row_bytes - 1], "too small"),
    ):
        with pytest.raises(ValueError, match=message):
            it.backend.rows_out(0, first, n, buffer)
    with pytest.raises(ValueError, match="slot 3 of 3"):
        it.backend.rows_out(3, 0, 1, out)
