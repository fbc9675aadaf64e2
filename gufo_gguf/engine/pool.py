"""Backing RAM: the bytes behind the buffer ids that the cache hands out.

The cache reserves bytes in its ledger and names buffers; this pool owns the memory.  Memory comes
from the backend (pinned where the device has such), is recycled by size, and is prepared ahead in
steps while nothing runs, so that a capture on the request path finds it ready: pinning and first
touch cost about 0.4 s per GB.

Rejected: one arena of the whole budget at start (pins memory nobody may need) and a slab allocator
(sizes are few: a chunk, a private state, logits, tails rounded to a granule).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from gufo_gguf.backend.base import Bytes
from gufo_gguf.cache.types import BufferId

GRANULE = 16 * 1024
"""Sizes are rounded up to this, so that tails of different lengths can share memory."""


def rounded(n_bytes: int) -> int:
    """The size class of a buffer, in bytes."""
    granule = GRANULE if n_bytes >= GRANULE else 512
    return max(granule, -(-n_bytes // granule) * granule)


class BufferPool:
    """``alloc`` gives host memory; ``budget_bytes`` bounds what is held, used and spare together."""

    def __init__(self, alloc: Callable[[int], Bytes], budget_bytes: int) -> None:
        self._alloc = alloc
        self._budget = budget_bytes
        self._used: dict[BufferId, Bytes] = {}
        self._spare: dict[int, list[Bytes]] = defaultdict(list)
        self.held_bytes = 0
        self.peak_bytes = 0

    def get(self, buffer: BufferId, n_bytes: int) -> Bytes:
        """The memory of a buffer, n_bytes long; made at its first use."""
        memory = self._used.get(buffer)
        if memory is None:
            memory = self._used[buffer] = self._take(rounded(n_bytes))
        return memory[:n_bytes]

    def free(self, buffers: Iterable[BufferId]) -> None:
        """Give buffers back; ids whose memory was never used cost nothing."""
        for buffer in buffers:
            memory = self._used.pop(buffer, None)
            if memory is not None:
                self._spare[memory.nbytes].append(memory)

    def prepare(self, sizes: Mapping[int, int], step_bytes: int) -> int:
        """Have ``count`` spare buffers of each size ready, allocating at most step_bytes now.

        Buffers made together lie side by side, so that a restore can move a run of them in one copy.
        Returns the bytes allocated; 0 = all ready (or the budget is held already).
        """
        for n_bytes, count in sizes.items():
            size = rounded(n_bytes)
            room = min(max(step_bytes, size), self._budget - self.held_bytes)
            n = min(count - len(self._spare[size]), room // size)
            if n > 0:
                slab = self._new(n * size)
                slab[::4096] = 0  # first touch here, not in the middle of a capture
                # the last one goes out first: hand them out in ascending order
                self._spare[size] += [slab[i * size : (i + 1) * size] for i in reversed(range(n))]
                return n * size
        return 0

    def used(self) -> frozenset[BufferId]:
        """Ids whose memory is in use; for checks."""
        return frozenset(self._used)

    def _take(self, size: int) -> Bytes:
        spare = self._spare[size]
        if spare:
            return spare.pop()
        self._shed(size)
        return self._new(size)

    def _new(self, size: int) -> Bytes:
        memory = self._alloc(size)
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return memory

    def _shed(self, need: int) -> None:
        """Let spare memory of other sizes go while a new buffer would exceed the budget."""
        for size in sorted(self._spare, reverse=True):
            spare = self._spare[size]
            while spare and self.held_bytes + need > self._budget:
                spare.pop()
                self.held_bytes -= size
