"""Will a context fit into this machine's memory?  Asked before it is made.

Afterwards is too late: memory is promised freely and taken when it is touched, and then the kernel
ends the process, or another one.  Two small contexts tell what a large one takes, as what a cell
costs is the same everywhere:

    bytes
      |                                  . need
      |                          .
      |      2n x      .
      |  n x   .
      +--------------------------------------- cells

Only host memory is weighed; a device's own allocator says no by itself.
"""

from __future__ import annotations

from collections.abc import Callable

CELL_BYTES = 64
"""What llama.cpp notes of a cell besides its rows, at least: position, sequences, shift, extras."""

SMALL_CELLS = 2048
"""Per slot; a sliding window is full there."""

UNCHECKED_CELLS = 32_768
"""Contexts up to this size are just made."""


def context_bytes(host_bytes: Callable[[int], int], n_ctx: int, n_slots: int) -> int:
    """About how many bytes a context of n_slots x n_ctx cells takes in host memory.

    ``host_bytes`` makes a context of so many cells per slot, says what it takes, and frees it.
    """
    first, second = host_bytes(SMALL_CELLS), host_bytes(2 * SMALL_CELLS)
    per_cell = max(0, second - first) / SMALL_CELLS + CELL_BYTES * n_slots
    return int(first + per_cell * max(0, n_ctx - SMALL_CELLS))
