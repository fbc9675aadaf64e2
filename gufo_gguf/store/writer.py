"""The write queue as a step machine: no thread, no clock; whoever owns the thread calls ``step``.

    enqueue ─► [ job ][ job ][ job ] ─► running job, one bounded operation per turn ─► outcome
                    └── superseded by a newer checkpoint: dropped before or while it runs

A step moves at most ``max_bytes`` through one staging buffer, or does one operation that is not a
copy (a sync, a link, a removal), so the caller can stop within one operation of model work
appearing.  A job that starts pins what it can reuse, sweeps debris, retires victims if its blocks
do not fit (by the caller's rank), reserves, and only then writes.

Sharing: a chunk carries the cache's id.  ``bind`` says which file holds a chunk that came from disk;
the writer binds what it writes itself.  So two checkpoints share a file exactly when they share the
chunk in RAM, by inheritance, and never because their bytes or tokens look alike.

When the disk refuses (full, read-only, gone, broken) the job ends as FAILED and the writer suspends:
one outcome says why, everything queued behind it is refused with the same reason, and ``probe``
tells when the folder can be written again.  Waiting between probes is the caller's, who has a clock.

Called from one thread at a time, except that the catalogue may be read meanwhile by the owner.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Generator, Hashable, Iterable, Iterator

from gufo_gguf.store.bindings import Bindings
from gufo_gguf.store.catalogue import Catalogue, DiskRecord, EvictionPlan, Rank
from gufo_gguf.store.fs import FileSystem, remove_quietly, write_all
from gufo_gguf.store.jobs import Outcome, Progress, WriteJob, WriteResult, manifest_estimate, misfit
from gufo_gguf.store.layout import FileClass, Layout, Names
from gufo_gguf.store.manifest import MAX_BYTES
from gufo_gguf.store.publish import Publication, disk_estimate
from gufo_gguf.store.scan import reclaim
from gufo_gguf.store.types import ByteSource, Damage, SourceGone


class Writer:
    def __init__(
        self,
        fs: FileSystem,
        layout: Layout,
        catalogue: Catalogue,
        *,
        names: Names,
        rank: Rank,
        staging_bytes: int = 1 << 20,
        queue_bytes: int = 1 << 30,
    ) -> None:
        """``queue_bytes`` bounds what queued jobs may keep alive in RAM (chunks counted once)."""
        self._fs = fs
        self._layout = layout
        self._catalogue = catalogue
        self._names = names
        self._rank = rank
        self._staging = memoryview(bytearray(staging_bytes))
        self._queue_bytes = queue_bytes
        self._queue: deque[tuple[int, WriteJob]] = deque()
        self._next_job = 0
        self._running: tuple[int, WriteJob, Publication] | None = None
        self._steps: Iterator[int] | None = None
        self._bindings = Bindings()
        self._outcomes: list[Outcome] = []
        self._retired: list[DiskRecord] = []
        self._step_bytes = 0
        self._sweep_wanted = False
        self.suspended: str | None = None
        """Why nothing is written at the moment."""

    # -- sharing ---------------------------------------------------------------------------------
    def bind(self, chunk: Hashable, key: str) -> None:
        """This chunk's bytes are those of a published file (it was restored from there)."""
        self._bindings.bind(chunk, key)

    def unbind(self, chunk: Hashable) -> None:
        """The cache has freed the chunk; its id will not come again."""
        self._bindings.unbind(chunk)

    def key_of(self, chunk: Hashable) -> str | None:
        return self._bindings.key_of(chunk)

    # -- the queue -------------------------------------------------------------------------------
    @property
    def idle(self) -> bool:
        """Nothing left to do, or nothing that can be done while suspended."""
        waiting = self._queue or self._sweep_wanted
        return self._running is None and self._steps is None and (self.suspended is not None or not waiting)

    @property
    def jobs(self) -> tuple[int, ...]:
        """Waiting and running, in the order in which they will end."""
        running = () if self._running is None else (self._running[0],)
        return running + tuple(number for number, _ in self._queue)

    def pinned_bytes(self) -> int:
        """RAM that queued and running jobs keep alive."""
        jobs = [job for _, job in self._queue]
        if self._running is not None:
            jobs.append(self._running[1])
        chunks = {c.chunk: c.source.n_bytes for job in jobs for c in job.chunks if self._file_of(c.chunk) is None}
        return sum(chunks.values()) + sum(job.private_bytes for job in jobs)

    def enqueue(self, job: WriteJob, supersedes: Iterable[int] = ()) -> int | Outcome:
        """Queue a job and return its number, or say why not.  ValueError: its parts do not fit together.

        ``supersedes``: jobs this checkpoint covers; they end as SUPERSEDED in the next step, and what
        a running one has written of their common chunks is reused.
        """
        if self.suspended is not None:
            return Outcome(-1, WriteResult.SUSPENDED, self.suspended)
        problem = misfit(job)
        if problem:
            raise ValueError(problem)
        if manifest_estimate(job) > MAX_BYTES:
            return Outcome(-1, WriteResult.TOO_LARGE, f"a manifest may have {MAX_BYTES} bytes")
        for number in supersedes:
            self._drop(number, WriteResult.SUPERSEDED)
        number = self._next_job
        self._queue.append((number, job))
        if self.pinned_bytes() > self._queue_bytes:
            self._queue.pop()
            return Outcome(-1, WriteResult.QUEUE_FULL, f"{self._queue_bytes} bytes may wait")
        self._next_job += 1
        return number

    def abandon_all(self) -> None:
        """Empty the queue, the running job included; outcomes come with the next step."""
        for number in self.jobs:
            self._drop(number, WriteResult.ABANDONED)

    def _drop(self, number: int, result: WriteResult, detail: str = "") -> None:
        if self._running is not None and self._running[0] == number:
            if not self._running[2].done:
                self._end(result, detail)
            return
        kept = deque(item for item in self._queue if item[0] != number)
        if len(kept) != len(self._queue):
            self._queue = kept
            self._outcomes.append(Outcome(number, result, detail))

    # -- steps -----------------------------------------------------------------------------------
    def step(self, max_bytes: int) -> Progress:
        """Do one bounded piece of work.  Never raises for anything the disk does."""
        if max_bytes < 1:
            raise ValueError("a step of no bytes makes no progress")
        n_bytes = 0
        if self._steps is None and self.suspended is None:
            if self._queue:
                self._start(*self._queue.popleft())
            elif self._sweep_wanted:
                self._sweep_wanted = False
                self._steps = self._sweep()
        if self._steps is not None:
            self._step_bytes = min(max_bytes, len(self._staging))
            try:
                n_bytes = next(self._steps)
            except StopIteration:
                self._steps = None
                self._running = None
            except SourceGone as e:
                self._end(WriteResult.SOURCE_GONE, str(e))
            except OSError as e:
                self._suspend(e)
            except Exception as e:
                self._end(WriteResult.FAILED, repr(e))
                raise
        outcomes, self._outcomes = tuple(self._outcomes), []
        retired, self._retired = tuple(self._retired), []
        return Progress(n_bytes, outcomes, retired, self.idle)

    def probe(self) -> bool:
        """Can the folder be written again?  Tries with a small file of its own; resumes on success."""
        name = self._names() + FileClass.PRIVATE
        try:
            handle = self._fs.create(self._layout.tmp, name)
            try:
                write_all(self._fs, handle, self._staging[:4096])
                self._fs.sync(handle)
            finally:
                self._fs.close(handle)
        except OSError as e:
            if not remove_quietly(self._fs, self._layout.tmp, name):
                self._catalogue.found_debris(self._layout.tmp, name, disk_estimate(4096))
            self.suspended = _reason(self._fs, e)
            return False
        if not remove_quietly(self._fs, self._layout.tmp, name):
            self._catalogue.found_debris(self._layout.tmp, name, disk_estimate(4096))
        self.suspended = None
        return True

    # -- one job ---------------------------------------------------------------------------------
    def _start(self, number: int, job: WriteJob) -> None:
        publication = Publication(self._fs, self._layout, self._catalogue, self._names)
        self._running = (number, job, publication)
        self._steps = self._run(number, job, publication)

    def _run(self, number: int, job: WriteJob, publication: Publication) -> Iterator[int]:
        reusable = [self._file_of(c.chunk) for c in job.chunks]
        held = publication.hold(key for key in reusable if key is not None)
        todo = [c for c, key in zip(job.chunks, reusable, strict=True) if key not in held]
        need = sum(disk_estimate(c.source.n_bytes) for c in todo) + disk_estimate(job.private_bytes)
        need += disk_estimate(manifest_estimate(job))
        if not (yield from self._make_room(need)):
            plan = self._catalogue.plan_room(need, self._rank)
            self._end(WriteResult.TOO_LARGE, f"needs {need} bytes; {plan}")
            return
        publication.reserve(need)
        for chunk, key in zip(job.chunks, reusable, strict=True):
            if key is not None and key in held:
                publication.reuse_chunk(key)
                continue
            publication.begin_chunk()
            yield from self._copy(publication, chunk.source)
            self.bind(chunk.chunk, publication.end_chunk().key)
            yield 0
        publication.begin_private()
        for source in (job.private, job.tail, job.logits):
            if source is not None:
                yield from self._copy(publication, source)
            publication.end_section()
        publication.end_private()
        yield 0
        for record in publication.commit(job.meta):
            if record is not None:
                self._outcomes.append(Outcome(number, WriteResult.DURABLE, record=record))
            yield 0

    def _copy(self, publication: Publication, source: ByteSource) -> Iterator[int]:
        at, end = 0, source.n_bytes
        while at < end:
            piece = self._staging[: min(self._step_bytes, end - at)]
            source.read(at, piece)
            publication.write(piece)
            at += len(piece)
            yield len(piece)

    def _make_room(self, need: int) -> Generator[int, None, bool]:
        """Sweep, then retire by rank, until ``need`` fits; the generator's value is whether it does."""
        if not self._fits(need):
            yield from self._sweep()
        plan = self._catalogue.plan_room(need, self._rank)
        if isinstance(plan, EvictionPlan) and plan.victims:
            self._begin_retire(plan.victims)
            yield 0  # the index hears that they go before the first file does
            yield from self._sweep()
        return self._fits(need)

    def _fits(self, need: int) -> bool:
        return isinstance(self._catalogue.plan_room(need, lambda _: None), EvictionPlan)

    # -- removal ---------------------------------------------------------------------------------
    def retire(self, records: Iterable[DiskRecord]) -> None:
        """Take these checkpoints off the disk: invisible now, removed in the steps to come."""
        self._begin_retire(records)
        self._sweep_wanted = True

    def quarantine(self, damage: Damage) -> tuple[DiskRecord, ...]:
        """Hide every checkpoint that needs a damaged file and return them; removed if damaged for good."""
        key = damage.name.rpartition(".")[0]
        hit = [r for r in self._catalogue.records() if r.key == key] or self._catalogue.dependents(key)
        self._catalogue.mark_bad(key)
        if damage.permanent:
            self.retire(hit)
        else:
            self._catalogue.hide(r.key for r in hit)
        return tuple(hit)

    def sweep(self) -> None:
        """Remove debris and loose files in the steps to come (the background pass after a start)."""
        self._sweep_wanted = True

    def _begin_retire(self, records: Iterable[DiskRecord]) -> None:
        records = tuple(records)
        self._catalogue.begin_retire(r.key for r in records)
        self._retired.extend(records)

    def _sweep(self) -> Iterator[int]:
        for _ in reclaim(self._fs, self._layout, self._catalogue):
            yield 0
        for key in self._bindings.files():
            if self._catalogue.file(key) is None:
                self._bindings.forget(key)

    def _file_of(self, chunk: Hashable) -> str | None:
        """The file that holds a chunk, if it can still be referenced."""
        key = self._bindings.key_of(chunk)
        return key if key is not None and self._catalogue.usable_chunk(key) is not None else None

    # -- ends ------------------------------------------------------------------------------------
    def _end(self, result: WriteResult, detail: str = "") -> None:
        self._steps = None
        if self._running is None:  # a sweep broke off: what it left is tried again by the next one
            self._sweep_wanted = True
            return
        number, _, publication = self._running
        publication.abandon()
        self._running = None
        self._outcomes.append(Outcome(number, result, detail))
        # What the job leaves (loose chunks, a doubtful manifest) is for the next job or the next sweep.
        self._sweep_wanted = True

    def _suspend(self, error: OSError) -> None:
        self.suspended = _reason(self._fs, error)
        self._end(WriteResult.FAILED, self.suspended)
        for number in self.jobs:
            self._drop(number, WriteResult.SUSPENDED, self.suspended)


def _reason(fs: FileSystem, error: OSError) -> str:
    what = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EROFS: "the disk is read-only",
        errno.EACCES: "the folder cannot be written",
        errno.ENOENT: "the folder is gone",
    }.get(error.errno or 0, error.strerror or str(error))
    return f"the cache folder {fs.root}: {what}"
