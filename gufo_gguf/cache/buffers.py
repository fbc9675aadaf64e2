"""Names of backing memory: which buffer ids exist, how large they are, which may be reused.

The cache plans with names; the engine's pool holds the bytes.  A freed name is handed to the
engine once, through ``take_freed``, and never used again.  Rejected: reusing names, because a late
copy into an old name would then land in new state.
"""

from __future__ import annotations

from gufo_gguf.cache.ledger import InvariantBroken
from gufo_gguf.cache.types import BufferId


class Buffers:
    def __init__(self) -> None:
        self._size: dict[BufferId, int] = {}
        self._freed: list[BufferId] = []
        self._freed_size: dict[BufferId, int] = {}
        self._next = 1

    def new(self, n_bytes: int) -> BufferId:
        buffer = BufferId(self._next)
        self._next += 1
        self._size[buffer] = n_bytes
        return buffer

    def free(self, buffer: BufferId) -> None:
        if buffer not in self._size:
            raise InvariantBroken(f"buffer {buffer} is freed twice")
        self._freed_size[buffer] = self._size.pop(buffer)
        self._freed.append(buffer)

    def size(self, buffer: BufferId) -> int:
        """Bytes of a buffer that is in use, or freed and not yet taken."""
        size = self._size.get(buffer)
        return self._freed_size[buffer] if size is None else size

    def in_use(self) -> dict[BufferId, int]:
        return dict(self._size)

    def take_freed(self) -> list[BufferId]:
        freed, self._freed = self._freed, []
        self._freed_size.clear()
        return freed
