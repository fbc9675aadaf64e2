"""Plain copies of given sizes: the physical limit that transfers are measured against in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_REPEATS = 4


@dataclass(frozen=True, slots=True)
class Limit:
    """Seconds of one plain copy in each direction."""

    kind: str
    to_host: float
    to_device: float


def plain_copy(n_bytes: int) -> Limit:
    """Pinned host memory from and to the device through torch; memcpy where there is no GPU."""
    try:
        import torch  # type: ignore[import-not-found]

        if not torch.cuda.is_available():
            raise ImportError
    except ImportError:
        a, b = np.ones(n_bytes, np.uint8), np.zeros(n_bytes, np.uint8)
        return Limit("memcpy", _best(lambda: np.copyto(b, a)), _best(lambda: np.copyto(a, b)))
    pinned = torch.ones(n_bytes, dtype=torch.uint8).pin_memory()
    gpu = torch.ones(n_bytes, dtype=torch.uint8, device="cuda")

    def copy(to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return Limit("cuda pinned", _best(lambda: copy(pinned, gpu)), _best(lambda: copy(gpu, pinned)))


def _best(action: Callable[[], None]) -> float:
    """Of some repeats: a limit is what is possible, not what is usual."""
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)
