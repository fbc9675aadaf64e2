"""Answers on their way out: as server-sent events, or whole.

What a stream does in time:

    submit ── first event (or keep-alive time) ── headers ── frames … ── closing frames
               │ an error here is an HTTP error      │ an error here is an error frame

Three things watch one connection: the pump that turns engine events into frames, a listener for the
client going away (which cancels the generation, so that its slot is free at the next pass), and a
ticker that sends an event without content when nothing was sent for a while, since comments do not
count as events for some clients.  Starlette's StreamingResponse was rejected: it sends headers
before it knows whether the request failed, and learns of a lost client only between chunks;
sse-starlette adds a task group and a string format per event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gufo_gguf.engine.types import Event, Finished, FinishReason
from gufo_gguf.server.errors import Problem, ProblemError, log_failure, problem_of, problem_response
from gufo_gguf.server.port import StreamPort
from gufo_gguf.server.state import Active, Generation

Indexed = tuple[int, Event]


async def merged(generation: Generation) -> AsyncIterator[Indexed]:
    """Events of all streams with the stream's number, as they come; ends after every ``Finished``."""
    if len(generation.streams) == 1:
        async for event in generation.streams[0]:
            yield 0, event
        return
    queue: asyncio.Queue[Indexed] = asyncio.Queue()

    async def pump(index: int, stream: StreamPort) -> None:
        async for event in stream:
            queue.put_nowait((index, event))

    tasks = [asyncio.create_task(pump(i, s)) for i, s in enumerate(generation.streams)]
    try:
        open_streams = len(tasks)
        while open_streams:
            item = await queue.get()
            open_streams -= isinstance(item[1], Finished)
            yield item
    finally:
        for task in tasks:
            task.cancel()


def failure(event: Event, generation: Generation) -> Exception | None:
    """What went wrong, if this event says that something did."""
    if not isinstance(event, Finished):
        return None
    if event.reason is FinishReason.CANCELLED:
        if generation.ended is not None:
            return ProblemError(generation.ended)
        # a client that left reads nothing any more, so this is the server's doing
        return ProblemError(Problem(503, "the request was cancelled by the server", code="cancelled"))
    if event.reason is FinishReason.ERROR:
        return event.error or RuntimeError("the engine gave no reason")
    return None


async def disconnected(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class FrameWriter(Protocol):
    """One API's way of writing a stream; stateful, made per request.  Each call gives whole frames."""

    def start(self) -> bytes: ...

    def event(self, index: int, event: Event) -> bytes: ...

    def keepalive(self) -> bytes: ...

    def error(self, problem: Problem) -> bytes: ...

    def end(self) -> bytes: ...

    def close(self) -> None: ...


class EventStream(Response):
    """An ASGI response that writes a generation as server-sent events."""

    def __init__(
        self, generation: Generation, writer: FrameWriter, active: Active, keepalive_s: float, path: str
    ) -> None:
        self.generation = generation
        self.writer = writer
        self.active = active
        self.keepalive_s = keepalive_s
        self.path = path
        self.status_code = 200
        self.background = None
        self._sent_s = 0.0
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.active.track(self.generation):
            gone = asyncio.create_task(disconnected(receive))
            pump = asyncio.create_task(self._pump(scope, receive, send))
            ticker = asyncio.create_task(self._tick(send))
            try:
                await asyncio.wait((gone, pump), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (gone, pump, ticker):
                    task.cancel()
                for task in (gone, ticker, pump):
                    with suppress(asyncio.CancelledError):
                        await task
                self.writer.close()

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = self.writer
        try:
            async for index, event in merged(self.generation):
                error = failure(event, self.generation)
                if error is not None:
                    raise error
                frames = writer.event(index, event)
                if not self._started:
                    frames = await self._start(send) + frames
                if frames:
                    await self._send(send, frames)
            await self._send(send, writer.end())
        except Exception as error:
            problem = problem_of(error)
            if problem.status == 500:
                log_failure(self.path, error)
            if self._started:
                await self._send(send, writer.error(problem))
            else:
                await problem_response(problem, self.path)(scope, receive, send)
        finally:
            if self._started:
                with suppress(Exception):  # the client may be gone: nothing left to tell it
                    await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send) -> bytes:
        self._started = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        return self.writer.start()

    async def _send(self, send: Send, frames: bytes) -> None:
        self._sent_s = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": frames, "more_body": True})

    async def _tick(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time()
        while True:
            wait_s = self._sent_s + self.keepalive_s - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            frames = b"" if self._started else await self._start(send)
            await self._send(send, frames + self.writer.keepalive())


class ClientGone(Exception):
    """The client left before its answer was ready."""


async def collect(request: Request, generation: Generation, active: Active) -> list[list[Event]]:
    """All events of each stream.  Raises ClientGone, or the first failure."""
    out: list[list[Event]] = [[] for _ in generation.streams]

    async def gather() -> None:
        async for index, event in merged(generation):
            error = failure(event, generation)
            if error is not None:
                raise error
            out[index].append(event)

    with active.track(generation):
        gone = asyncio.create_task(disconnected(request.receive))
        work = asyncio.create_task(gather())
        try:
            await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone
            work.result()
        finally:
            for task in (gone, work):
                task.cancel()
            for task in (gone, work):
                with suppress(asyncio.CancelledError, Exception):
                    await task
    return out
