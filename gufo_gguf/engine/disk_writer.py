"""The thread that writes the disk tier, and how it stays out of the model's way.

The store's writer is a step machine; this thread steps it.  While the model works it waits, at most
0.5 s at a time, and then does one bounded burst (one piece per wait would take twenty minutes for a
deep checkpoint).  All calls of the writer happen here; other threads post actions.  What the steps
bring about (checkpoints durable, retired, refused) is handed to the owner thread.

A folder that refuses (full, gone, read-only) suspends writing; it is probed again every few seconds.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from gufo_gguf.store.jobs import Progress
from gufo_gguf.store.writer import Writer

log = logging.getLogger("gufo.disk")

YIELD_S = 0.5
BURST_BYTES = 32 << 20
PROBE_S = 5.0
_STEP_BYTES = 1 << 20


class DiskWriter:
    """``quiet`` is set while there is no model work; ``deliver`` takes progress to the owner thread."""

    def __init__(self, writer: Writer, quiet: threading.Event, deliver: Callable[[Progress], None]) -> None:
        self._writer = writer
        self._quiet = quiet
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stop_by_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="gufo-disk", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, action: Callable[[], None]) -> None:
        """Run an action on the writer's thread, before its next step."""
        self._inbox.put(action)

    def stop(self, drain_s: float) -> bool:
        """Write what is queued for at most drain_s seconds, then end; False when work was left behind."""
        self._stop_by_s = time.monotonic() + drain_s
        self._inbox.put(None)
        self._quiet.set()
        self._thread.join(drain_s + 5.0)
        return not self._thread.is_alive() and self._writer.idle

    def _run(self) -> None:
        try:
            while True:
                self._take_actions(wait=self._writer.idle and self._stop_by_s is None)
                if self._stop_by_s is not None and (self._writer.idle or time.monotonic() >= self._stop_by_s):
                    self._writer.abandon_all()
                    self._deliver(self._writer.step(_STEP_BYTES))
                    return
                if self._writer.suspended is not None:
                    self._writer.probe()
                elif not self._writer.idle:
                    self._quiet.wait(YIELD_S)
                    self._burst()
        except Exception:
            log.exception("the disk writer failed; the server goes on without writing to disk")

    def _take_actions(self, *, wait: bool) -> None:
        try:
            action = self._inbox.get(timeout=PROBE_S if self._writer.suspended is not None else None) if wait else None
            while True:
                if action is not None:
                    action()
                action = self._inbox.get(block=False)
        except queue.Empty:
            return

    def _burst(self) -> None:
        done = 0
        while done < BURST_BYTES and not self._writer.idle:
            progress = self._writer.step(_STEP_BYTES)
            done += progress.n_bytes
            if progress.outcomes or progress.retired:
                self._deliver(progress)
            if not self._inbox.empty():
                return
