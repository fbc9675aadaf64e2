"""How many processor cores this process may run on."""

from __future__ import annotations

import os


def allowed_cores() -> int:
    """Logical cores of the process's affinity mask, all of the machine's where there is none; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
