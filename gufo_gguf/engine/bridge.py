"""The owner thread: the only one that touches the backend and the cache's tables.

Other threads leave jobs and questions in an inbox.  Between passes the owner empties it; with no
model work it preserves a piece of what idle slots lend, looks into the inbox again, and sleeps when
nothing is left to do.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from gufo_gguf.core.errors import GufoError

log = logging.getLogger("gufo.engine")

T = TypeVar("T")


class Owner:
    """``step`` does a unit of model work, ``idle_step`` a unit of background work; both say if they did any.

    ``idle_wait_s``: seconds after which an idle thread looks for background work again, None = never.
    """

    def __init__(
        self,
        step: Callable[[], bool],
        idle_step: Callable[[], bool],
        on_failure: Callable[[Exception], None],
        idle_wait_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._step = step
        self._idle_step = idle_step
        self._on_failure = on_failure
        self._idle_wait_s = idle_wait_s
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = False
        self.failure: Exception | None = None
        """What ended the thread, if something did."""
        self._thread = threading.Thread(target=self._run, name="gufo-owner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, action: Callable[[], None]) -> None:
        """Run an action on the owner thread, soon."""
        self._inbox.put(action)

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Run a question on the owner thread; its answer (or exception) arrives in the future."""
        future: Future[T] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(question())
            except Exception as error:  # the asker's to handle
                future.set_exception(error)

        if self.failure is not None or not self._thread.is_alive():
            future.set_exception(GufoError("the engine is closed"))
        else:
            self._inbox.put(answer)
        return future

    def wake(self) -> None:
        """Look at the flags of jobs again (a cancel)."""
        self._inbox.put(None)

    def stop(self, timeout_s: float) -> bool:
        """Ask the thread to end and wait; False when it did not within the time."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._empty_inbox(wait=False)
                if self._step():
                    continue
                if self._inbox.empty() and not self._idle_step():
                    self._empty_inbox(wait=True, timeout_s=self._idle_wait_s())
        except Exception as error:
            log.exception("the owner thread failed; all requests end with an error")
            self.failure = error
            self._on_failure(error)
            self._refuse_rest(error)

    def _empty_inbox(self, *, wait: bool, timeout_s: float | None = None) -> None:
        try:
            action = self._inbox.get(block=wait, timeout=timeout_s)
            while True:
                if action is not None:
                    action()
                action = self._inbox.get(block=False)
        except queue.Empty:
            return

    def _refuse_rest(self, error: Exception) -> None:
        """Serve late questions with their actions: jobs that arrive now fail at once."""
        while not self._stopping:
            action = self._inbox.get()
            if action is not None:
                action()
                self._on_failure(error)
