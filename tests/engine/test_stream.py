"""Streams carry every event once, in order, to a thread or to a coroutine."""

import asyncio
import threading

from gufo_gguf.cache.types import RequestReport
from gufo_gguf.engine.bridge import Owner
from gufo_gguf.engine.stream import Stream
from gufo_gguf.engine.types import Finished, FinishReason, TextDelta, Timings

END = Finished(FinishReason.STOP, None, 1, 1, Timings(0, 1, 1.0, 1, 1.0), RequestReport())


def _fill(stream: Stream, n: int) -> None:
    for i in range(n):
        stream.put(TextDelta(str(i), (i,)))
    stream.put(END)


def test_a_thread_reads_all_events_in_order() -> None:
    stream = Stream("x", lambda: None)
    threading.Thread(target=_fill, args=(stream, 200)).start()
    events = list(stream)
    assert [e.tokens for e in events[:-1]] == [(i,) for i in range(200)]
    assert events[-1] is END


def test_a_coroutine_gets_what_was_put_before_it_listened() -> None:
    stream = Stream("x", lambda: None)
    _fill(stream, 5)

    async def read() -> list[object]:
        return [e async for e in stream]

    assert len(asyncio.run(read())) == 6


def test_a_coroutine_is_woken_from_another_thread() -> None:
    stream = Stream("x", lambda: None)

    async def read() -> list[object]:
        threading.Timer(0.05, _fill, args=(stream, 100)).start()
        return [e async for e in stream]

    assert len(asyncio.run(read())) == 101


def test_events_after_the_readers_loop_is_gone_do_no_harm() -> None:
    stream = Stream("x", lambda: None)

    async def read_one() -> None:
        stream.put(TextDelta("a", (1,)))
        async for _ in stream:
            return

    asyncio.run(read_one())
    _fill(stream, 3)


def _owner(step=lambda: False, idle=lambda: False, failed=lambda e: None) -> Owner:
    owner = Owner(step, idle, failed)
    owner.start()
    return owner


def test_questions_are_answered_on_the_owner_thread() -> None:
    owner = _owner()
    assert owner.ask(lambda: threading.current_thread().name).result(5) == "gufo-owner"
    assert owner.stop(5)


def test_a_question_that_raises_hands_the_exception_to_its_asker_only() -> None:
    owner = _owner()
    future = owner.ask(lambda: 1 // 0)
    assert isinstance(future.exception(5), ZeroDivisionError)
    assert owner.ask(lambda: 3).result(5) == 3
    assert owner.stop(5)


def test_a_failing_step_ends_all_jobs_and_later_ones() -> None:
    failures: list[Exception] = []
    armed = threading.Event()

    def step() -> bool:
        if armed.is_set():
            raise RuntimeError("broken")
        return False

    seen = threading.Event()

    def failed(error: Exception) -> None:
        failures.append(error)
        seen.set()

    owner = _owner(step, failed=failed)
    armed.set()
    owner.wake()
    assert seen.wait(5)
    assert str(failures[0]) == "broken"
    assert owner.ask(lambda: 1).exception(5) is not None
    owner.stop(5)
