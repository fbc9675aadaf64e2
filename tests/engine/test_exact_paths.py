"""On real architectures, every way to a reused state continues byte for byte as the run it came from.

``TracedEngine.ask`` compares after each request: rows, private state and positions against the
lineage replayed in an untouched context with the same pass ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.conftest import TinyModel
from tests.engine.lineage import TracedEngine

pytestmark = [pytest.mark.native, pytest.mark.slow]

ARCHITECTURES = ["qwen4exp", "qwen35", "lfm2", "mamba2", "gemma3", "llama"]


def text(seed: int, n: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, 300, n)]


@pytest.fixture(params=ARCHITECTURES)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def one_slot(arch: str, tiny_model: TinyModel) -> Iterator[TracedEngine]:
    engine = TracedEngine(tiny_model(arch))
    yield engine
    engine.close()


@pytest.fixture
def two_slots(arch: str, tiny_model: TinyModel) -> Iterator[TracedEngine]:
    engine = TracedEngine(tiny_model(arch), n_slots=2)
    yield engine
    engine.close()


def test_live_then_borrowed_then_spilled_then_overwritten(one_slot: TracedEngine) -> None:
    a, b = text(1, 330), text(2, 200)
    first = one_slot.ask(a)
    a += first.tokens + text(3, 20)
    assert one_slot.ask(a).finished.report.reuse_source == "live"
    edited = a[:335] + text(4, 30)  # rows still lie borrowed in the slot
    assert one_slot.ask(edited).finished.timings.cache_n > 0
    one_slot.spill()
    one_slot.ask(b)  # overwrites the slot
    back = one_slot.ask(a + text(5, 10))
    assert back.finished.report.reuse_source == "ram"
    assert back.finished.timings.cache_n >= 330


def test_overwritten_without_idle_time_is_preserved_first(one_slot: TracedEngine) -> None:
    a = text(11, 300)
    one_slot.ask(a)
    one_slot.ask(text(12, 150))
    assert one_slot.ask(a + text(13, 5)).finished.timings.cache_n >= 300


def test_an_identical_resend_evaluates_nothing(one_slot: TracedEngine) -> None:
    a = text(21, 150)
    first = one_slot.ask(a)
    one_slot.ask(text(22, 70))
    again = one_slot.ask(a)
    assert again.finished.timings.cache_n == 150 and again.finished.timings.prompt_n == 0
    assert again.tokens == first.tokens


def test_restored_into_another_slot_while_the_first_is_kept(two_slots: TracedEngine) -> None:
    a = text(31, 280)
    two_slots.ask(a)
    forked = two_slots.ask(a[:280] + text(32, 25))
    assert forked.finished.timings.cache_n >= 256 or forked.finished.report.reuse_source != "none"
    other = two_slots.ask(text(33, 90))
    assert other.finished.report.reuse_source == "none"
    two_slots.ask(a[:280] + text(34, 25))
    assert "ram" in two_slots.executor.sources or "live" in two_slots.executor.sources


def test_the_first_owner_of_a_shared_chunk_is_evicted(arch: str, tiny_model: TinyModel) -> None:
    engine = TracedEngine(tiny_model(arch), max_checkpoints=2)
    try:
        a = text(41, 200)
        for turn in range(5):  # each turn's checkpoints push the older ones out
            answer = engine.ask(a)
            a += answer.tokens + text(50 + turn, 40)
        engine.ask(text(60, 64), n=1)
        back = engine.ask(a)
        assert len(engine.manager.checkpoints()) <= 2
        assert back.finished.reason == "length"
    finally:
        engine.close()


def test_fifty_turns(arch: str, tiny_model: TinyModel) -> None:
    engine = TracedEngine(tiny_model(arch))
    try:
        a = text(71, 60)
        compare, engine.compare = engine.compare, lambda slot: None  # type: ignore[method-assign]
        for turn in range(50):
            a += engine.ask(a, n=3).tokens + text(100 + turn, 9)
            if turn % 10 == 4:
                engine.ask(text(200 + turn, 40), n=1)
            if turn % 10 == 7:
                engine.spill()
        engine.compare = compare  # type: ignore[method-assign]
        last = engine.ask(a, n=3)
        assert last.finished.timings.cache_n > 500
    finally:
        engine.close()


def test_a_cancelled_request_keeps_what_it_computed(one_slot: TracedEngine) -> None:
    a = text(81, 400)
    stopped = one_slot.ask(a, cancel_after=2)
    assert stopped.finished.reason == "cancelled"
    retried = one_slot.ask(a)
    assert retried.finished.timings.cache_n >= 128


def test_the_comparison_sees_one_changed_bit_in_every_buffer(one_slot: TracedEngine) -> None:
    a = text(91, 150)
    one_slot.ask(a)
    one_slot.spill()
    one_slot.ask(text(92, 70))
    pool = one_slot.pool
    for buffer in pool.used():
        memory = pool.get(buffer, one_slot.manager.buffer_bytes(buffer))
        memory[memory.nbytes // 2 | 3] ^= 0x80  # a sign: the last bit of a number may be rounded away again
    with pytest.raises(AssertionError, match="bytes differ"):
        one_slot.ask(a + text(93, 5))
