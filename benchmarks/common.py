"""What all benchmarks share: interleaved samples, ratios with their spread, results as JSON.

Every figure is a ratio against a peer or a physical limit measured in the same run, because these
machines are shared and noisy: a median over interleaved repeats, with the range beside it.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gufo_gguf.core.errors import GufoError

RESULTS = Path(__file__).resolve().parent.parent / "results"


def interleaved(cases: Mapping[str, Callable[[], float | None]], repeats: int) -> dict[str, list[float]]:
    """Run each case in turn, ``repeats`` times; a case returns its own seconds, or None to be timed."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            started = time.perf_counter()
            own = case()
            samples[name].append(time.perf_counter() - started if own is None else own)
    return samples


def median(values: list[float]) -> float:
    return statistics.median(values)


def spread(values: list[float]) -> str:
    """``median (min .. max)`` in milliseconds."""
    return f"{1e3 * median(values):.2f} ms ({1e3 * min(values):.2f} .. {1e3 * max(values):.2f})"


def environment() -> dict[str, Any]:
    """The machine, as far as it matters for repeating a run; no host name, no path."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def one_line(main: Callable[[], int]) -> int:
    """Run a benchmark's main; an expected failure is one line on stderr and status 1."""
    try:
        return main()
    except GufoError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1


def report(name: str, lines: list[str], data: Mapping[str, Any]) -> None:
    """Print the lines and keep everything as results/<name>.json."""
    print(f"== {name}")
    for line in lines:
        print("  " + line)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"environment": environment(), **data}, indent=1))


class Table:
    """Rows as they come: a run that is cut off has said what it measured."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.data: dict[str, Any] = {}

    def say(self, line: str) -> None:
        self.lines.append(line)
        print("  ... " + line, flush=True)
