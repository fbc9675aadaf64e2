"""When background work runs, and how much of it; time is a number the test moves."""

from __future__ import annotations

import random

from gufo_gguf.engine.background import IDLE_S, PIECE_ROWS, Background
from gufo_gguf.engine.disk_writer import BURST_BYTES, YIELD_S
from gufo_gguf.engine.job import Phase
from tests.engine.simulation import Conversation, World


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Plain(random.Random):
    """Requests without stable boundaries and without an answer."""

    def randint(self, a: int, b: int) -> int:
        return a

    def random(self) -> float:
        return 0.5


def world() -> tuple[World, Background, Clock]:
    w = World(6, budget_bytes=1 << 20, n_slots=1, disk=True)
    assert w.disk is not None and w.disk.tier is not None
    w.disk.tier._spacing = 64
    clock = Clock()
    return w, Background(w.executor, w.manager, w.pool, clock), clock


def run(w: World, conversation: Conversation) -> None:
    w.submit(conversation)
    while not w.scheduler.idle():
        w.scheduler.step()
    w.open.clear()


def write(w: World) -> int:
    """Let the writer's thread finish; how many checkpoints are on disk."""
    assert w.disk is not None and w.disk.writer is not None and w.disk.tier is not None
    for _ in range(1000):
        w.disk.writer.step()
        w.disk.hear()
    return int(w.disk.tier.status()["checkpoints"])  # type: ignore[call-overload]


def idle(background: Background) -> None:
    while background.idle_step():
        pass


def test_a_server_that_is_never_idle_still_writes_to_disk() -> None:
    w, background, clock = world()
    w.submit(Conversation(list(range(40)) * 3))
    job = w.open[0][0]
    while job.phase is not Phase.DECODE:
        background.between_passes()
        w.scheduler.step()
    assert write(w) == 0, "no burst is due yet"
    clock.now += YIELD_S
    background.between_passes()
    assert write(w) == 1


def test_a_burst_between_passes_is_bounded() -> None:
    w, background, clock = world()
    pieces = 0
    prepare = w.executor.prepare_write

    def counted(max_rows: int) -> bool:
        nonlocal pieces
        pieces += 1
        assert max_rows == PIECE_ROWS
        prepare(max_rows)
        return True

    w.executor.prepare_write = counted  # type: ignore[method-assign]
    for _ in range(10):
        background.between_passes()
    assert pieces == 0
    for _ in range(3):
        clock.now += YIELD_S
        background.between_passes()
    assert 0 < pieces * PIECE_ROWS * w.shape.row_bytes <= 3 * BURST_BYTES


def test_what_spacing_holds_back_is_written_after_a_long_pause() -> None:
    w, background, clock = world()
    conversation = Conversation(list(range(40)) * 2)
    run(w, conversation)
    idle(background)
    assert write(w) == 1
    conversation.tokens += [1, 2, 3, 4, 5, 6, 7, 8]
    background.between_passes()
    run(w, conversation)
    idle(background)
    assert write(w) == 1, "closer than the spacing"
    assert background.wait_s() == IDLE_S
    clock.now += IDLE_S - 1
    idle(background)
    assert write(w) == 1 and background.wait_s() == 1.0
    clock.now += 1
    idle(background)
    assert write(w) == 2
    assert background.wait_s() is None, "nothing is held back any more"


def test_a_request_starts_the_pause_again() -> None:
    w, background, clock = world()
    conversation = Conversation(list(range(40)) * 2)
    run(w, conversation)
    conversation.tokens += [1, 2, 3]
    run(w, conversation)
    idle(background)
    clock.now += IDLE_S - 1
    background.between_passes()
    assert background.wait_s() == IDLE_S


def test_what_came_from_disk_is_not_written_there_again() -> None:
    w, background, _ = world()
    w.rng = Plain()
    tokens = list(range(40)) * 2
    run(w, Conversation(tokens.copy()))
    idle(background)
    assert write(w) == 1
    assert w.disk is not None
    w.disk.end("kill", w.executor)
    before = w.backend
    w.start()
    w.backend.seen, w.backend.logits_of = before.seen, before.logits_of
    background = Background(w.executor, w.manager, w.pool, Clock())
    run(w, Conversation(tokens.copy()))
    assert w.disk.tier is not None and w.disk.tier.counters["disk_restores_total"] == 1
    w.disk.tier.want_newest()  # as a stop does
    idle(background)
    write(w)
    boundaries = [record.n_tokens for record in w.disk.tier._of_number.values()]
    assert len(boundaries) == len(set(boundaries)), boundaries


def test_the_end_of_a_system_prompt_is_written_first_and_by_the_same_spacing() -> None:
    w, background, clock = world()
    w.rng = Plain()
    w.systems_known, system = True, list(range(70, 110))
    w.systems = [system, [*system, *range(20)]]

    def boundaries() -> list[int]:
        write(w)
        assert w.disk is not None and w.disk.tier is not None
        return sorted(record.n_tokens for record in w.disk.tier._of_number.values())

    run(w, Conversation([*system, 1, 2, 3]))
    idle(background)
    assert boundaries() == [40], "the prompt's end waits: too close"
    run(w, Conversation([*w.systems[1], 4, 5, 6]))
    idle(background)
    assert boundaries() == [40], "so does another system prompt that begins with the first"
    clock.now += IDLE_S
    idle(background)
    assert boundaries() == [40, 43, 63], "the newest of each conversation"
