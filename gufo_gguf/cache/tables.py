"""The tables of one cache, held together: what the manager's parts share.

A plain bundle without behaviour beyond wiring, so that each part (admission, capture, check) can
be a file of its own and still see one consistent world.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gufo_gguf.cache.buffers import Buffers
from gufo_gguf.cache.checkpoints import CheckpointTable
from gufo_gguf.cache.chunks import ChunkTable
from gufo_gguf.cache.events import EventLog
from gufo_gguf.cache.index import PrefixIndex
from gufo_gguf.cache.ledger import Ledger
from gufo_gguf.cache.retention import Thrash
from gufo_gguf.cache.slots import SlotTable
from gufo_gguf.cache.types import CacheLimits, StateShape

if TYPE_CHECKING:
    from gufo_gguf.cache.durable import Durable


class Tables:
    def __init__(self, shape: StateShape, limits: CacheLimits, n_slots: int, n_ctx: int, log: EventLog) -> None:
        self.shape = shape
        self.limits = limits
        self.n_ctx = n_ctx
        self.log = log
        self.ledger = Ledger(limits.ram_bytes)
        self.buffers = Buffers()
        self.slots = SlotTable(n_slots)
        self.chunks = ChunkTable(n_slots, shape.chunk_rows, shape.chunk_bytes, self.ledger, self.buffers)
        self.index = PrefixIndex(rows_only=shape.rows_only)
        self.thrash = Thrash()
        self.durable: Durable | None = None
        """Entries of the disk tier; None without one."""
        self.checkpoints = CheckpointTable(shape, self.ledger, self.buffers, self.chunks, self.index, log)

    def full_chunks(self, n_tokens: int) -> int:
        """How many full chunks a state of n tokens has: 0 for memories without rows."""
        return n_tokens // self.shape.chunk_rows if self.shape.row_bytes else 0

    def tail_rows(self, n_tokens: int) -> int:
        """Rows beyond the last full chunk."""
        return n_tokens % self.shape.chunk_rows if self.shape.row_bytes else 0
