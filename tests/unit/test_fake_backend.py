"""The fake backend keeps the contract, tells computations apart and refuses every wrong byte."""

from __future__ import annotations

import numpy as np
import pytest

from gufo_gguf.backend.base import Span
from gufo_gguf.backend.fake import FailNth, FakeBackend
from gufo_gguf.core.errors import BackendError, ContextFull, SlotNotReady, StateRejected

KINDS = {"hybrid": (40, 64), "rows": (24, 0), "recurrent": (0, 64)}


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, n, dtype=np.int32)


def make(kind: str = "hybrid", **options: object) -> FakeBackend:
    row_bytes, private_bytes = KINDS[kind]
    settings = {"n_slots": 3, "n_ctx": 2048, "n_batch": 512, "n_ubatch": 64} | options
    return FakeBackend(row_bytes=row_bytes, private_bytes=private_bytes, **settings)


def run(backend: FakeBackend, slot: int, text: np.ndarray, step: int = 512) -> None:
    for i in range(0, len(text), step):
        backend.decode([Span(slot, text[i : i + step], True)])


def save(backend: FakeBackend, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, private) of everything in the slot."""
    n = backend.position(slot)
    assert backend.info.inventory is not None
    rows = backend.alloc(n * backend.info.inventory.row_bytes)
    private = backend.alloc(backend.info.inventory.private_bytes)
    if len(rows):
        backend.rows_out(slot, 0, n, rows)
    if len(private):
        backend.private_out(slot, private)
    return rows, private


def load(backend: FakeBackend, slot: int, text: np.ndarray, rows: np.ndarray, private: np.ndarray) -> None:
    backend.begin_restore(slot, text)
    if len(rows):
        backend.load_rows(slot, 0, len(text), rows, len(text))
    if len(private):
        backend.load_private(slot, private)
    backend.finish_restore(slot)


@pytest.mark.parametrize("kind", KINDS)
def test_restored_state_continues_byte_equal(kind: str) -> None:
    backend = make(kind)
    text = tokens(300)
    run(backend, 0, text)
    rows, private = save(backend, 0)
    run(backend, 2, tokens(50, 9))  # dirty target
    load(backend, 2, text, rows, private)
    more = tokens(100, 1)
    for slot in (0, 2):
        run(backend, slot, more[:60])
        run(backend, slot, more[60:], step=1)
    assert np.array_equal(backend.logits(0), backend.logits(2))
    for a, b in zip(save(backend, 0), save(backend, 2), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_tokens_of_other_passes_have_other_bytes(kind: str) -> None:
    backend = make(kind)
    text = tokens(200)
    run(backend, 0, text)
    run(backend, 1, text, step=50)
    backend.decode([Span(2, text[:10], False)])
    assert not np.array_equal(save(backend, 0)[kind == "recurrent"], save(backend, 1)[kind == "recurrent"])
    run(backend, 2, text[10:])
    assert not np.array_equal(backend.logits(0), backend.logits(2)), "a pass that ends elsewhere"


def test_a_neighbour_changes_the_bytes() -> None:
    alone, beside = make(), make()
    for backend in (alone, beside):
        run(backend, 0, tokens(64))
        run(backend, 1, tokens(64, 5))
    one = np.array([7], dtype=np.int32)
    alone.decode([Span(0, one, True)])
    beside.decode([Span(0, one, True), Span(1, one, True)])
    assert not np.array_equal(alone.logits(0), beside.logits(0))


def test_rows_are_append_only() -> None:
    backend = make()
    run(backend, 0, tokens(200))
    before = save(backend, 0)[0]
    run(backend, 0, tokens(200, 1))
    out = backend.alloc(200 * 40)
    backend.rows_out(0, 0, 200, out)
    assert np.array_equal(before, out)


def test_prefix_of_a_larger_packed_buffer() -> None:
    backend = make("rows")
    text = tokens(100)
    run(backend, 0, text)
    rows, _ = save(backend, 0)
    backend.begin_restore(1, text[:70])
    backend.load_rows(1, 0, 70, rows, 100)
    backend.finish_restore(1)
    backend.truncate(0, 70)
    for slot in (0, 1):
        run(backend, slot, tokens(30, 3))
    assert np.array_equal(backend.logits(0), backend.logits(1))


@pytest.mark.parametrize("what", ["row", "row filler", "private", "private filler", "rows of another computation"])
@pytest.mark.parametrize("strict", [True, False])
def test_one_wrong_byte_shows(what: str, strict: bool) -> None:
    backend = make(strict=strict)
    text = tokens(130)
    run(backend, 0, text)
    run(backend, 1, text, step=13)
    rows, private = save(backend, 0)
    if what == "row":
        rows[13 * 50] ^= 1  # a byte of the first component: part of a link
    elif what == "row filler":
        rows[-1] ^= 1
    elif what == "private":
        private[0] ^= 1
    elif what == "private filler":
        private[-8] ^= 1
    else:
        rows = save(backend, 1)[0]
    if strict:
        with pytest.raises(StateRejected):
            load(backend, 2, text, rows, private)
        assert backend.position(2) == 0
        return
    load(backend, 2, text, rows, private)
    for slot in (0, 2):
        run(backend, slot, tokens(5, 3))
    assert not np.array_equal(backend.logits(0), backend.logits(2))


def test_a_rows_only_chain_is_checked_without_private_state() -> None:
    backend = make("rows")
    text = tokens(130)
    run(backend, 0, text)
    rows, private = save(backend, 0)
    other = text.copy()
    other[77] += 1
    with pytest.raises(StateRejected, match="row 77"):
        load(backend, 1, other, rows, private)


def test_incomplete_and_damaged_restores_are_refused_and_clear_the_slot() -> None:
    backend = make()
    text = tokens(20)
    run(backend, 0, text)
    rows, private = save(backend, 0)
    backend.begin_restore(1, text)
    backend.load_rows(1, 0, 19, rows, 20)
    backend.load_private(1, private)
    with pytest.raises(StateRejected, match="row 19"):
        backend.finish_restore(1)
    backend.begin_restore(1, text)
    backend.load_rows(1, 0, 20, rows, 20)
    with pytest.raises(StateRejected, match="private state is missing"):
        backend.finish_restore(1)
    private[:4] = 0xFF
    backend.begin_restore(1, text)
    with pytest.raises(StateRejected, match="NaN"):
        backend.load_private(1, private)
    run(backend, 1, text)
    assert backend.position(1) == 20


def test_a_slot_in_restore_neither_runs_nor_gives_state() -> None:
    backend = make()
    text = tokens(20)
    run(backend, 0, text)
    backend.begin_restore(0, text, keep_rows=20)
    with pytest.raises(SlotNotReady):
        backend.decode([Span(0, text, False)])
    with pytest.raises(SlotNotReady):
        backend.rows_out(0, 0, 20, backend.alloc(1000))
    with pytest.raises(SlotNotReady):
        backend.private_out(0, backend.alloc(64))
    with pytest.raises(SlotNotReady):
        backend.position(0)
    backend.abort_restore(0)
    assert backend.position(0) == 0


def test_kept_rows_must_be_those_of_the_tokens() -> None:
    backend = make()
    run(backend, 0, tokens(20))
    with pytest.raises(BackendError, match="other tokens"):
        backend.begin_restore(0, tokens(20, 1), keep_rows=10)


def test_context_full_changes_nothing() -> None:
    backend = make(n_ctx=100)
    run(backend, 0, tokens(95))
    before = save(backend, 0)
    with pytest.raises(ContextFull):
        backend.decode([Span(0, tokens(6), True)])
    assert all(np.array_equal(a, b) for a, b in zip(before, save(backend, 0), strict=True))


def test_private_state_cannot_be_wound_back() -> None:
    backend = make()
    run(backend, 0, tokens(20))
    with pytest.raises(BackendError, match="wound back"):
        backend.truncate(0, 10)
    backend.truncate(0, 0)
    assert backend.position(0) == 0


def test_the_nth_call_fails_once() -> None:
    faults = FailNth(2, ["rows_out"])
    backend = make(faults=faults)
    run(backend, 0, tokens(20))
    save(backend, 0)
    with pytest.raises(BackendError, match="injected"):
        save(backend, 0)
    assert faults.fired == "rows_out"
    save(backend, 0)


def test_a_failed_pass_leaves_the_slot_in_doubt() -> None:
    backend = make(faults=FailNth(2, ["decode"]))
    run(backend, 0, tokens(20))
    with pytest.raises(BackendError, match="injected"):
        backend.decode([Span(0, tokens(100, 1), True)])
    assert backend.position(0) == 84, "the first micro-batch of 64 went through"


def test_logits_only_when_asked_for() -> None:
    backend = make()
    backend.decode([Span(0, tokens(5), False)])
    with pytest.raises(BackendError, match="no logits"):
        backend.logits(0)
