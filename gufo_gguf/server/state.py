"""What all routes share, and the requests that are being answered now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request

from gufo_gguf.core.errors import Overloaded
from gufo_gguf.engine.types import GenerateRequest
from gufo_gguf.server.chat.clock import ConversationClock
from gufo_gguf.server.errors import Problem, ProblemError
from gufo_gguf.server.port import EnginePort, StreamPort
from gufo_gguf.server.settings import ServerSettings

T = TypeVar("T")


class Generation:
    """The engine's streams behind one HTTP request: one per prompt and choice."""

    def __init__(self, streams: Sequence[StreamPort], id: str = "") -> None:
        self.streams = streams
        self.id = id
        """The id of the answer."""
        self.ended: Problem | None = None
        """Why the server cancelled it, if it was not for shutting down."""
        self._timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """Idempotent; every stream still ends with ``Finished``, and its slot is free at the next pass."""
        for stream in self.streams:
            stream.cancel()

    def end(self, problem: Problem) -> None:
        """Cancel, and have the client told this."""
        if self.ended is None:
            self.ended = problem
        self.cancel()

    def limit(self, seconds: float) -> None:
        """End it when it is not done after so long."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end, _too_long(seconds))

    def done(self) -> None:
        """Nothing is to come; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self.cancel()


# both are final: a client that sends the same again by itself would wait as long again
_NO_RETRY = {"x-should-retry": "false"}
_CANCELLED = Problem(503, "the request was cancelled", code="cancelled", headers=_NO_RETRY)


def _too_long(seconds: float) -> Problem:
    message = f"the request was not done after its limit of {seconds:g} s"
    return Problem(504, message, code="timeout", headers=_NO_RETRY)


class Active:
    """Running generations; event-loop thread only.  Draining refuses new ones."""

    def __init__(self, engine: EnginePort, limit: int, timeout_s: float | None = None) -> None:
        self.engine = engine
        self._limit = limit
        self._timeout_s = timeout_s
        self._running: set[Generation] = set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._running)

    def start(self, requests: Sequence[GenerateRequest], id: str, timeout_s: float | None = None) -> Generation:
        """Queue all or none, named after the answer's id; ``timeout_s`` is the request's own limit.

        Raises what ``Engine.submit`` raises, and 503 when draining or full.
        """
        if self.draining:
            raise ProblemError(
                Problem(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})
            )
        if len(self._running) >= self._limit:
            raise Overloaded(f"{self._limit} requests are being answered already")
        streams: list[StreamPort] = []
        try:
            for i, request in enumerate(requests):
                name = f"{id}-{i}" if len(requests) > 1 else id
                streams.append(self.engine.submit(replace(request, request_id=name)))
        except BaseException:
            Generation(streams).cancel()
            raise
        generation = Generation(streams, id)
        limits = [seconds for seconds in (timeout_s, self._timeout_s) if seconds]
        if limits:
            generation.limit(min(limits))
        return generation

    def cancel(self, id: str) -> bool:
        """Cancel by the answer's id; False when no such answer is under way."""
        found = [generation for generation in self._running if generation.id == id]
        for generation in found:
            generation.end(_CANCELLED)
        return bool(found)

    @contextmanager
    def track(self, generation: Generation) -> Iterator[None]:
        """Known to ``cancel_all`` inside; whatever way the block is left, nothing keeps running."""
        self._running.add(generation)
        try:
            yield
        finally:
            self._running.discard(generation)
            generation.done()

    def cancel_all(self) -> None:
        for generation in list(self._running):
            generation.cancel()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; give the running ones ``seconds``, then cancel them."""
        self.draining = True
        deadline = asyncio.get_running_loop().time() + seconds
        while self._running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        self.cancel_all()


_ASKERS = 8


@dataclass(slots=True)
class State:
    engine: EnginePort
    settings: ServerSettings
    active: Active
    clock: ConversationClock
    started_s: float
    """Unix time of the start; ``created`` of the model."""
    fingerprint: str
    """``system_fingerprint``: changes with everything that may change answers."""
    followers: int = 0
    """Open streams of the cache's events."""
    _askers: CapacityLimiter | None = None

    async def ask(self, question: Callable[[], T]) -> T:
        """Ask the engine what only its owner thread can say; the answer may take as long as a pass.

        In threads of their own: in the pool that all share, a dozen dashboards could hold every thread,
        and requests would wait for being tokenized.
        """
        if self._askers is None:  # made by the loop it belongs to
            self._askers = CapacityLimiter(_ASKERS)
        return await to_thread.run_sync(question, limiter=self._askers)


def _state(request: Request) -> State:
    state: State = request.app.state.gufo
    return state


StateDep = Annotated[State, Depends(_state)]


def _scope_key(request: Request) -> str:
    return str(request.scope.get("gufo_key_scope", ""))


ScopeDep = Annotated[str, Depends(_scope_key)]
"""The cache isolation key of the caller; "" unless keys are isolated."""
