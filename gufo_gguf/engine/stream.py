"""The way of events from the owner thread to whoever waits: a thread, or a coroutine.

One writer, one reader.  The reader binds to an asyncio loop by ``async for``; until then events
gather in a list, so nothing is lost between submit and the first await.  The queue is unbounded on
purpose: a slow client must not stall the pass that others share, and max_tokens bounds it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from gufo_gguf.engine.types import Event, Finished


class Stream:
    """Events of one request; the last one is always ``Finished``."""

    def __init__(self, request_id: str, cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._events: deque[Event] = deque()
        self._ready = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None

    def put(self, event: Event) -> None:
        """Owner thread: hand an event over."""
        with self._ready:
            self._events.append(event)
            self._ready.notify()
            if self._loop is not None and self._wake is not None:
                try:
                    self._loop.call_soon_threadsafe(self._wake.set)
                except RuntimeError:  # the reader's loop is closed: nobody is listening any more
                    self._loop = None

    def cancel(self) -> None:
        """Stop the generation; idempotent.  ``Finished`` still comes, and the slot is free at the next pass."""
        self._cancel()

    def __iter__(self) -> Iterator[Event]:
        while True:
            with self._ready:
                while not self._events:
                    self._ready.wait()
                event = self._events.popleft()
            yield event
            if isinstance(event, Finished):
                return

    async def __aiter__(self) -> AsyncIterator[Event]:
        wake = asyncio.Event()
        with self._ready:
            self._loop, self._wake = asyncio.get_running_loop(), wake
        while True:  # a deque needs no lock for one writer and one reader
            if not self._events:
                wake.clear()
                if not self._events:  # what comes after this sets it again, in a later turn of the loop
                    await wake.wait()
                continue
            event = self._events.popleft()
            yield event
            if isinstance(event, Finished):
                return
