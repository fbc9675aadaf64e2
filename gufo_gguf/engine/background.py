"""The cache's background work on the owner thread: when it runs and how much of it.

    no model work     preserve what idle slots lend, prepare writes to disk, have memory ready: a piece
                      at a time, and nothing more once model work appears
    between passes    every YIELD_S a burst of preparing writes, so that a server that is never idle
                      still gets its conversations to disk
    idle for IDLE_S   the newest boundary of each history that spacing kept off the disk is written

Nothing here fails a request: no memory means later, and what breaks latches the cache off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gufo_gguf.cache.manager import CacheManager
from gufo_gguf.core.errors import GufoError
from gufo_gguf.engine.disk_writer import BURST_BYTES, YIELD_S
from gufo_gguf.engine.executor import Executor
from gufo_gguf.engine.pool import BufferPool

log = logging.getLogger("gufo.engine")

IDLE_S = 60.0
PIECE_ROWS = 256
_PREPARE_STEP = 128 << 20


class Background:
    """Owner thread only.  ``clock`` gives monotonic seconds."""

    def __init__(self, executor: Executor, manager: CacheManager, pool: BufferPool, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._manager = manager
        self._pool = pool
        self._clock = clock
        self._burst_pieces = max(1, BURST_BYTES // max(1, manager.shape.row_bytes * PIECE_ROWS))
        self._worked_s = self._prepared_s = clock()

    # -- while there is model work ---------------------------------------------------------------
    def between_passes(self) -> None:
        """Call before each pass; costs a look at the clock, and now and then a bounded burst."""
        now = self._worked_s = self._clock()
        if self._executor.disk is None or now - self._prepared_s < YIELD_S:
            return
        self._prepared_s = now

        def burst() -> bool:
            return all(self._executor.prepare_write(PIECE_ROWS) for _ in range(self._burst_pieces))

        self._guarded(burst)

    # -- while there is none ---------------------------------------------------------------------
    def idle_step(self) -> bool:
        """One piece of work; False when nothing is left to do for now."""
        return self._guarded(self._idle_step)

    def _idle_step(self) -> bool:
        if self._executor.spill(PIECE_ROWS) or self._executor.prepare_write(PIECE_ROWS):
            return True
        if self.wait_s() == 0.0:
            assert self._executor.disk is not None
            self._executor.disk.want_newest()
            return True
        return self.prepare_memory(self._manager.stats().chunks_borrowed)

    def wait_s(self) -> float | None:
        """Seconds of idle time until there is something to do; None: not before a request comes."""
        disk = self._executor.disk
        if disk is None or not disk.holds_back:
            return None
        return max(0.0, self._worked_s + IDLE_S - self._clock())

    def prepare_memory(self, n_chunks: int) -> bool:
        """Have memory ready for what is lent by slots now, and for a few captures more."""
        shape = self._manager.shape
        if not self._manager.ram:
            return False
        # a cold request leaves six states: memory that has to be pinned meanwhile would stall the device
        states = max(2, min(6, self._manager.limits.ram_bytes // (8 * max(1, shape.private_bytes))))
        spare = {shape.private_bytes: states, shape.chunk_bytes: n_chunks + 4}
        return self._pool.prepare({n: k for n, k in spare.items() if n > 0}, _PREPARE_STEP) > 0

    def _guarded(self, work: Callable[[], bool]) -> bool:
        try:
            return work()
        except MemoryError as error:  # nothing is lost: what needs memory later asks again
            log.warning("no memory to prepare for the cache: %s", error)
            return False
        except (GufoError, OSError, ValueError) as error:
            log.error("background work of the cache failed, the cache is off from now on: %s", error)
            self._manager.latch(f"background work failed: {error}")
            return False
