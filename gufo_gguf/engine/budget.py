"""How much RAM the cache may use when nobody says: half of what is free, at most 32 GiB.

"Free" is what the kernel calls available, cut down to what a cgroup still allows; memory-mapped
weights that were just read count as available there, so the model's own bytes are taken off when
they are mapped.
"""

from __future__ import annotations

from pathlib import Path

import psutil

AUTOMATIC_MAX = 32 << 30
_CGROUP = Path("/sys/fs/cgroup")


def cgroup_available(root: Path = _CGROUP) -> int | None:
    """Bytes a memory cgroup (v2, then v1) still allows; None without a limit."""
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (root / limit_file).read_text().strip()
            used = int((root / used_file).read_text())
        except (OSError, ValueError):
            continue
        if limit == "max" or int(limit) >= 1 << 60:
            return None
        return max(0, int(limit) - used)
    return None


def automatic_ram_bytes(mapped_model_bytes: int = 0, *, available: int | None = None, root: Path = _CGROUP) -> int:
    """The default of --cache-ram-bytes, in bytes."""
    free = psutil.virtual_memory().available if available is None else available
    limit = cgroup_available(root)
    if limit is not None:
        free = min(free, limit)
    return min(max(0, free - mapped_model_bytes) // 2, AUTOMATIC_MAX)


def conversations_that_fit(
    budget_bytes: int,
    n_tokens: int,
    row_bytes: int,
    private_bytes: int,
    *,
    max_checkpoints: int | None = None,
    own_bytes: int = 0,
) -> int:
    """How many conversations of ``n_tokens`` a budget keeps warm, each by one checkpoint that shares nothing.

    ``own_bytes`` is what a checkpoint costs besides rows and private state (blocks and manifest on
    disk).  A lower bound: conversations with a common system prompt share its rows.
    """
    each = n_tokens * row_bytes + private_bytes + own_bytes
    fit = budget_bytes // each if each else 0
    return fit if max_checkpoints is None else min(fit, max_checkpoints)
