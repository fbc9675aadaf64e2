"""Runs agents against a ``gufo serve`` of its own and looks at the server from outside."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from gufo_gguf.models.default import model_path
from gufo_gguf.store.check import check_store
from gufo_gguf.store.fs import PosixFileSystem
from tests.engine.served import Served
from tests.soak.agents import AGENTS, Tally

_SAMPLE_S = 1.0
_GROWTH_BYTES = 24 << 20
_GROWTH_SHARE = 0.04
_FLAGS = (
    "-c",
    4096,
    "--cache-ram-bytes",
    "24M",
    "--cache-disk-bytes",
    "48M",
    "--max-queue",
    4,
    "--config",
    "/dev/null",
)


@dataclass
class Report:
    minutes: float
    tally: Tally
    rss: list[int]
    """Bytes, one sample a second."""
    found: list[str] = field(default_factory=list)
    """What was wrong with the server afterwards."""

    def growth(self) -> int:
        """Bytes by which the last fifth of the run lies above the fifth after the warm-up (two fifths)."""
        fifth = len(self.rss) // 5
        if fifth < 3:
            return 0
        return int(statistics.median(self.rss[-fifth:]) - statistics.median(self.rss[2 * fifth : 3 * fifth]))

    def problems(self) -> list[str]:
        found = [*self.tally.wrong, *self.found]
        allowed = max(_GROWTH_BYTES, int(_GROWTH_SHARE * max(self.rss, default=0)))
        if self.growth() > allowed:
            found.append(f"memory grew by {self.growth() >> 20} MiB after the warm-up")
        counts = self.tally.counts
        for what in ("facts right", "clients killed"):
            if not counts[what]:
                found.append(f"the run shows nothing: no {what}")
        if counts["facts near a tie"] > max(2, counts["facts right"] // 500):
            found.append(
                f"{counts['facts near a tie']} answers differ from a cold one's by little: too many for rounding"
            )
        if counts["facts unsure"] > counts["facts right"]:
            found.append("the run shows little: more facts were unsure than right")
        return found

    def summary(self) -> dict[str, Any]:
        prompt = max(1, self.tally.prompt_tokens)
        return {
            "minutes": self.minutes,
            **dict(sorted(self.tally.counts.items())),
            "cached share of prompt tokens": round(self.tally.cached_tokens / prompt, 3),
            "rss MiB, after warm-up and at the end": [self.rss[2 * len(self.rss) // 5] >> 20, self.rss[-1] >> 20],
            "growth MiB": round(self.growth() / 2**20, 1),
        }


def soak(
    minutes: float, seed: int, sessions: int, model: Path | None, say: Callable[[str], None] = lambda line: None
) -> Report:
    """One run; the server is a process of its own with a small RAM budget and a disk tier."""
    with tempfile.TemporaryDirectory(prefix="gufo-soak-") as folder:
        disk = Path(folder) / "cache"
        server = Served(model or model_path(), "-j", sessions, "--cache-disk", disk, *_FLAGS)
        try:
            report = asyncio.run(_run(server, minutes, seed, say))
            _afterwards(server, report)
            log = server.stop()
            report.found += [line for line in log.splitlines() if " ERROR " in line or " CRITICAL " in line]
            if "Traceback" in log:
                report.found.append("the server's log holds a traceback")
        finally:
            server.discard()
        fs = PosixFileSystem(str(disk), create=False)
        try:
            report.found += [f"on disk: {damage}" for damage in check_store(fs).damage]
        finally:
            fs.shut()
    return report


async def _run(server: Served, minutes: float, seed: int, say: Callable[[str], None]) -> Report:
    tally = Tally()
    rss: list[int] = []
    process = psutil.Process(server.child.pid)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # a killed client's socket dies with it
    async with httpx.AsyncClient(base_url=server.http.base_url, timeout=120, limits=limits) as http:
        agents = [kind(http, random.Random(f"{seed}-{i}"), tally) for i, kind in enumerate(AGENTS)]
        tasks = [asyncio.create_task(agent.run()) for agent in agents]
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            await asyncio.sleep(_SAMPLE_S)
            rss.append(process.memory_info().rss)
            if len(rss) % 30 == 0:
                say(f"{len(rss)} s: {rss[-1] >> 20} MiB, {dict(tally.counts)}")
            broken = next((t for t in tasks if t.done()), None)
            if broken is not None:
                broken.result()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Report(minutes, tally, rss)


def _afterwards(server: Served, report: Report) -> None:
    """Every client is gone: soon nothing may be left of them."""
    for _ in range(200):
        busy = [slot for slot in server.http.get("/slots").json() if slot["is_processing"]]
        waiting = _metric(server, "llamacpp:requests_deferred") + _metric(server, "llamacpp:requests_processing")
        if not busy and waiting == 0:
            break
        time.sleep(0.1)
    else:
        report.found.append(f"not idle 20 s after the last client: {busy}, {waiting} requests")
    checked = server.http.get("/v1/cache/check").json()
    report.found += [f"check: {problem}" for problem in checked["problems"]]
    status = server.cache()
    if status["ram"]["unique_bytes"] > status["ram"]["budget_bytes"]:
        report.found.append("more in RAM than the budget allows")


def _metric(server: Served, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(name + " ")))
