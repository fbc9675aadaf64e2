"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def cgroup_available(root: Path = CGROUP) -> int | None:
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


def available_bytes(root: Path = CGROUP, *, free: int | None = None) -> int:
    """What the kernel calls available (or ``free``), cut down to what a cgroup still allows."""
    free = int(psutil.virtual_memory().available) if free is None else free
    limit = cgroup_available(root)
    return free if limit is None else min(free, limit)
