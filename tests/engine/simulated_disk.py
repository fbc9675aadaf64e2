"""The disk tier of a simulated server: a folder that outlives its processes, power cuts and damage.

The writer's thread is played by ``step``; what it tells the owner waits in a queue of its own until
the owner gets to it, as it does between two threads.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gufo_gguf.cache.chunks import Chunk
from gufo_gguf.cache.manager import CacheManager
from gufo_gguf.engine.disk_tier import DiskTier
from gufo_gguf.engine.disk_writer import DiskWriter
from gufo_gguf.engine.executor import Executor
from gufo_gguf.engine.pool import BufferPool
from gufo_gguf.store.check import check_store
from gufo_gguf.store.disk import DiskStore
from gufo_gguf.store.layout import Layout
from gufo_gguf.store.simfs import SimFS
from gufo_gguf.store.writer import Writer


class SteppedWriter:
    """What ``DiskWriter`` does, when it is told to."""

    def __init__(self, queue: Writer, deliver: Callable[..., None], rng: random.Random) -> None:
        self.queue = queue
        self._deliver = deliver
        self._rng = rng
        self._inbox: deque[Callable[[], None]] = deque()

    def post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)

    def drain_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def step(self) -> None:
        self.drain_inbox()
        if self.queue.suspended is not None:
            self.queue.probe()
        elif not self.queue.idle:
            progress = self.queue.step(self._rng.choice([64, 1 << 10, 1 << 20]))
            if progress.outcomes or progress.retired:
                self._deliver(progress)

    def stop(self, drain_s: float) -> bool:
        """Here ``drain_s`` counts steps."""
        for _ in range(int(drain_s)):
            if self.queue.idle and not self._inbox:
                break
            self.step()
        self.queue.abandon_all()
        self._deliver(self.queue.step(1 << 20))
        return self.queue.idle


def _names(rng: random.Random) -> Callable[[], str]:
    return lambda: f"{rng.getrandbits(128):032x}"


@dataclass
class SimulatedDisk:
    """One folder; ``attach`` gives it to a server, ``end`` ends that server in one of three ways."""

    rng: random.Random
    budget_bytes: int
    spacing: int
    fs: SimFS = field(default_factory=lambda: SimFS(block_bytes=64, sector_bytes=32))
    tier: DiskTier | None = None
    writer: SteppedWriter | None = None
    damaged: int = 0
    power_cuts: int = 0
    written: int = 0
    restored: int = 0
    to_owner: deque[Callable[[], None]] = field(default_factory=deque)
    chunks: Callable[[], Iterable[Chunk]] = tuple

    def attach(self, manager: CacheManager, backend: object, pool: BufferPool, executor: Executor) -> None:
        store = DiskStore(self.fs, self.budget_bytes, names=_names(self.rng))
        tier = DiskTier(
            store,
            manager.durable,
            backend,  # type: ignore[arg-type]
            pool,
            {},
            self.to_owner.append,
            spacing=self.spacing,
            staging_bytes=self.rng.choice([100, 4096]),
            queue_bytes=self.rng.choice([4096, 1 << 20]),
            clock=lambda: 0.0,
        )
        tier.load()
        self.chunks = manager.tables.chunks.all
        self.writer = SteppedWriter(tier.queue, tier.deliver, self.rng)
        stand_in: DiskWriter = self.writer  # type: ignore[assignment]
        tier.writer = stand_in
        self.tier = executor.disk = tier

    def step(self) -> None:
        """The other thread runs for a while; the owner may or may not hear of it at once."""
        assert self.writer is not None
        for _ in range(self.rng.randint(1, 12)):
            self.writer.step()
        if self.rng.random() < 0.7:
            self.hear()

    def hear(self) -> None:
        while self.to_owner:
            self.to_owner.popleft()()

    def end(self, how: str, executor: Executor) -> None:
        """``stop`` drains as SIGTERM does, ``kill`` is SIGKILL, ``power`` loses what was not synced."""
        assert self.tier is not None
        if how == "stop":
            executor.keep_ends()
            while executor.prepare_write(1 << 20) or self.tier.holds_back:
                self.tier.want_newest()
            self.tier.close(self.rng.choice([0.0, 20.0, 10_000.0]))
            self.hear()
        elif how == "kill":
            self.fs = self.fs.clone(killed=True)
        else:
            self.fs = self.rng.choice(list(self.fs.images(8, self.rng)))
            self.power_cuts += 1
        self.count()
        self.to_owner.clear()
        self.tier = self.writer = None

    def count(self) -> None:
        """Add up what this server wrote and restored."""
        assert self.tier is not None
        self.written += self.tier.counters["disk_writes_total"]
        self.restored += self.tier.counters["disk_restores_total"]

    def harm(self) -> None:
        """One flipped byte, or a file cut short or gone."""
        layout = Layout()
        folders = (layout.manifests, layout.chunks, layout.private)
        files = [(f, e.name) for f in folders for e in self.fs.entries(f) if e.n_bytes]
        if not files:
            return
        folder, name = self.rng.choice(sorted(files))
        data = bytearray(self.fs.content(folder, name))
        kind = self.rng.choice(["flip", "cut", "gone"])
        if kind == "gone":
            self.fs.remove(folder, name)
        else:
            if kind == "flip":
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            else:
                del data[self.rng.randrange(len(data)) :]
            self.fs.put(folder, name, bytes(data))
        self.damaged += 1

    def verify(self) -> None:
        """Nothing on the shelf is damaged unless ``harm`` or a power cut was here."""
        if self.damaged == 0:
            report = check_store(self.fs)
            assert not report.damage and not report.lost, report
        assert self.tier is not None and self.writer is not None
        self.writer.drain_inbox()
        known = {int(c.id) for c in self.chunks()}
        bound = {c for key in self.tier.queue._bindings.files() for c in self.tier.queue._bindings._chunks_of[key]}
        assert bound <= known, "the writer remembers chunks that are gone"
        order = dict(self.tier._order)
        self.tier._rank_all()
        assert order == self.tier._order, "ranks kept up one by one differ from ranks made anew"
        status = self.tier.status()
        assert status["used_bytes"] <= max(self.budget_bytes, 0) or self.damaged, status  # type: ignore[operator]
