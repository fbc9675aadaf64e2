"""The engine: one model, its cache, and the thread that owns both.

    with Engine.load("model.gguf") as engine:
        stream = engine.submit(GenerateRequest(tokens))
        for event in stream: ...

All public methods are thread-safe: they talk to the owner thread.  Nothing here decides what to
cache or what to run next; that is ``cache/`` and ``scheduler``.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gufo_gguf.backend import native
from gufo_gguf.backend.chat import ChatFormat
from gufo_gguf.backend.detok import Detokenizer
from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions
from gufo_gguf.cache.events import EventLog, encode
from gufo_gguf.cache.index import join_scope
from gufo_gguf.cache.manager import CacheManager
from gufo_gguf.cache.types import CacheLimits, Lookup, PromptView, StateShape, Tokens
from gufo_gguf.core.errors import ConfigError, ContextLengthExceeded, GufoError, Overloaded, RequestError, StoreError
from gufo_gguf.engine.ablation import Ablation
from gufo_gguf.engine.background import Background
from gufo_gguf.engine.bridge import Owner
from gufo_gguf.engine.budget import automatic_ram_bytes, fit_table, one_checkpoint_bytes
from gufo_gguf.engine.disk_tier import DiskTier
from gufo_gguf.engine.disk_writer import DiskWriter
from gufo_gguf.engine.executor import Executor
from gufo_gguf.engine.frontier import keep_frontier, probe
from gufo_gguf.engine.job import Job, Phase
from gufo_gguf.engine.pool import BufferPool
from gufo_gguf.engine.prefetch import Prefetched, prefetch
from gufo_gguf.engine.request_sampler import RequestSampler
from gufo_gguf.engine.scheduler import SHARED_PREFIX_MIN, Scheduler
from gufo_gguf.engine.stream import Stream
from gufo_gguf.engine.types import GenerateRequest
from gufo_gguf.store.disk import DiskStore

log = logging.getLogger("gufo.engine")

_PINNED_FIRST = 2 << 30


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of an engine; the CLI's flags have the same names."""

    llama: LlamaOptions = field(default_factory=LlamaOptions)
    cache: bool = True
    """False: nothing is read from or left in a cache; live slots are not continued either."""
    cache_ram_bytes: int | None = None
    """Budget of the RAM tier; None = half of the free RAM, at most 32 GiB; 0 = no RAM tier."""
    cache_log: Path | None = None
    """Decision log, JSON lines, appended."""
    cache_disk: Path | None = None
    """Folder of the disk tier; None = no disk tier."""
    cache_disk_bytes: int = 8 << 30
    cache_disk_staging_bytes: int = 1 << 20
    cache_disk_spacing: int = 2048
    """Tokens between the prompt checkpoints of one history that go to disk at once; what lies closer is
    written when the engine has been idle for a while, and when it closes."""
    prefill_chunk: int = 512
    max_queue: int = 64
    alias: str | None = None
    chunk_rows: int = 256
    ablation: Ablation = field(default_factory=Ablation)
    """Parts of the cache left out; for benchmarks."""


class Engine:
    """See the module's docstring.  Made by ``Engine.load``."""

    def __init__(self, backend: LlamaBackend, options: EngineOptions) -> None:
        self.options = options
        self.info = backend.info
        self.model_id = options.alias or backend.path.stem
        self.vocab = backend.vocab()
        self.chat = ChatFormat(native.library(), backend.model_ptr, options.llama.chat_template)
        self._backend = backend
        self._ids = itertools.count(1)
        self._log_file: IO[str] | None = None
        inventory = backend.info.inventory
        enabled = options.cache and inventory is not None
        if options.cache and inventory is None:
            log.warning("%s is served without a cache: %s", self.model_id, backend.info.uncacheable)
        shape = StateShape(
            row_bytes=inventory.row_bytes if inventory else 0,
            private_bytes=inventory.private_bytes if inventory else 0,
            logits_bytes=4 * backend.info.n_vocab,
            chunk_rows=options.chunk_rows,
        )
        self.ram_bytes = self._ram_budget(shape) if enabled else 0
        limits = options.ablation.limits(CacheLimits(ram_bytes=self.ram_bytes, chunk_rows=options.chunk_rows))
        self._events = EventLog(sinks=self._sinks(options.cache_log))
        self._manager = CacheManager(
            shape,
            limits,
            backend.info.n_slots,
            backend.info.n_ctx,
            self._events,
            enabled=enabled,
            ram=self.ram_bytes > 0,
        )
        self._pool = BufferPool(backend.alloc, max(self.ram_bytes, 1 << 20) * 9 // 8)
        self._executor = Executor(backend, self._manager, self._pool)
        self._executor.eager_copies = options.ablation.eager_copies
        self._scheduler = Scheduler(
            backend,
            self._manager,
            self._executor,
            lambda request: RequestSampler(backend, self.vocab, request),
            self._text_for,
            self.vocab.is_eog,
            prefill_chunk=options.prefill_chunk,
            shared_prefix_min=options.ablation.shared_prefix_min(SHARED_PREFIX_MIN),
        )
        self._shape = shape
        self._jobs: dict[str, Job] = {}
        self._closed = False
        self._quiet = threading.Event()
        self._background = Background(self._executor, self._manager, self._pool, time.monotonic)
        self._owner = Owner(self._step, self._idle_step, self._scheduler.fail_all, self._background.wait_s)
        self._disk = self._open_disk() if enabled and options.cache_disk is not None else None
        if backend.pinned:  # pinning stalls a device: the first 2 GiB before it works, then in steps
            first = min(_PINNED_FIRST, self.ram_bytes // 2)
            while self._pool.held_bytes < first and self._background.prepare_memory(first // max(1, shape.chunk_bytes)):
                pass
        self._owner.start()

    @classmethod
    def load(
        cls, path: str | Path, options: EngineOptions = EngineOptions(), progress: Callable[[float], None] | None = None
    ) -> Engine:
        """Load a GGUF model and start serving it.

        Raises ModelError or ConfigError, each naming what is wrong and the remedy.
        """
        backend = LlamaBackend(path, options.llama, progress)
        try:
            return cls(backend, options)
        except BaseException:
            backend.close()
            raise

    # -- requests --------------------------------------------------------------------------------
    def submit(self, request: GenerateRequest) -> Stream:
        """Queue a request.  Raises RequestError, ContextLengthExceeded or Overloaded at once."""
        n_prompt = len(request.tokens)
        if self._closed:
            raise Overloaded("the server is shutting down")
        if n_prompt == 0:
            raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
        if n_prompt >= self.info.n_ctx:
            raise ContextLengthExceeded(n_prompt, self.info.n_ctx)
        bad = (request.tokens < 0) | (request.tokens >= self.info.n_vocab)
        if bad.any():
            raise RequestError(
                f"token id {int(request.tokens[bad][0])} is outside the vocabulary of {self.info.n_vocab}",
                param="prompt",
            )
        if len(self._scheduler.waiting) >= self.options.max_queue:
            raise Overloaded(f"{self.options.max_queue} requests are waiting already (--max-queue)")
        request_id = request.request_id or f"gufo-{next(self._ids)}"
        prompt = self._view(request)
        job: Job

        def cancel() -> None:
            job.cancelled = True
            self._owner.wake()

        stream = Stream(request_id, cancel)

        def emit(event: Any) -> None:
            if job.phase is Phase.DONE:
                self._jobs.pop(request_id, None)
            stream.put(event)

        job = Job(request, prompt, emit, id=request_id)
        self._jobs[request_id] = job
        self._owner.post(lambda: self._scheduler.add(job))
        return stream

    def cancel(self, request_id: str) -> bool:
        """Cancel by id; False when no such request is under way."""
        job = self._jobs.get(request_id)
        if job is None:
            return False
        job.cancelled = True
        self._owner.wake()
        return True

    def keep(self, tokens: Tokens, scope: str = "") -> int | None:
        """Make the state that an idle slot holds after ``tokens`` a checkpoint, computing nothing.

        For coming back to the end of an answer.  Returns the boundary (all tokens, or all but a last one
        that was never evaluated); 0 when the cache refused it; None when no slot ends there any more.
        """
        full = join_scope(self.info.identity, scope)
        return self._owner.ask(
            lambda: keep_frontier(self._backend, self._manager, self._executor, full, tokens)
        ).result()

    def lookup(self, tokens: Tokens, scope: str = "") -> Lookup:
        """Where a prompt that begins with ``tokens`` could start now; changes nothing."""
        view = probe(join_scope(self.info.identity, scope), tokens)
        return self._owner.ask(lambda: self._manager.lookup(view)).result()

    def prefetch(self, request: GenerateRequest) -> Prefetched:
        """Have the deepest state of the request's prompt in RAM, loading it from disk if it lies there.

        Computes nothing.  Raises Overloaded when no slot is idle: a restore has to go through one.
        """
        view = self._view(request)
        found = self._owner.ask(lambda: prefetch(self._manager, self._executor, view)).result()
        if found is None:
            raise Overloaded("every slot is busy; a prefetch needs an idle one")
        return found

    def _view(self, request: GenerateRequest) -> PromptView:
        """The request's prompt as the cache sees it."""
        scope = join_scope(self.info.identity, request.scope)
        use = request.cache_prompt and self.options.cache
        part = self.options.ablation
        stable, system_end = part.stable(request.stable), part.system_end(request.system_end)
        return PromptView(scope, request.tokens, stable, system_end, request.inputs, read=use, write=use)

    # -- what is going on ------------------------------------------------------------------------
    def cache_status(self) -> dict[str, Any]:
        """Budgets, checkpoints, chunks and tiers; sizes in bytes, boundaries in tokens."""
        return self._owner.ask(self._cache_status).result()

    def cache_events(self, since: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """Decisions with a sequence number above ``since``, oldest first, at most ``limit``."""
        import json

        return self._owner.ask(lambda: [json.loads(encode(e)) for e in self._events.since(since)[:limit]]).result()

    def slots(self) -> list[dict[str, Any]]:
        """One entry per slot: what lies there and whether a request runs in it."""
        return self._owner.ask(self._slots).result()

    def counters(self) -> dict[str, float]:
        """Monotonic counters (names end in _total) since the start."""
        return dict(self._scheduler.counters)

    @property
    def failure(self) -> Exception | None:
        """What ended the owner thread; None while it works."""
        return self._owner.failure

    def check(self) -> list[str]:
        """Recount every reference and byte of the cache; an empty list is the only good answer."""
        return self._owner.ask(self._manager.check).result()

    def close(self, drain_s: float = 5.0) -> None:
        """Stop the owner thread and free the model; idempotent.  Running requests end with an error."""
        if self._closed:
            return
        self._closed = True
        if self._disk is not None:  # what should survive a restart is queued while the owner still runs
            log.info("writing the newest boundaries to %s, for at most %.0f s", self.options.cache_disk, drain_s)
            try:
                self._owner.ask(self._queue_newest).exception(drain_s)
            except TimeoutError:
                log.warning("a pass took longer than %.0f s: the newest boundaries are not written to disk", drain_s)
            self._disk.close(drain_s)
        if not self._owner.stop(drain_s):
            log.error("the owner thread did not stop within %.0f s; the model is left to the process's end", drain_s)
            return
        self._scheduler.fail_all(GufoError("the engine was closed"))
        self._backend.close()
        if self._log_file is not None:
            self._log_file.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- owner thread ----------------------------------------------------------------------------
    def _step(self) -> bool:
        if not self._scheduler.idle():
            self._quiet.clear()
            self._background.between_passes()
        return self._scheduler.step()

    def _idle_step(self) -> bool:
        self._quiet.set()
        return self._background.idle_step()

    def _cache_status(self) -> dict[str, Any]:
        from dataclasses import asdict

        return {
            "enabled": self._manager.off is None,
            "uncacheable": self.info.uncacheable,
            "memory": self.info.memory,
            "row_bytes": self._shape.row_bytes,
            "private_bytes": self._shape.private_bytes,
            "chunk_rows": self._shape.chunk_rows,
            "ram": asdict(self._manager.stats()),
            "disk": self._disk.status() if self._disk is not None else None,
            "fits": fit_table(
                self._shape,
                self._manager.limits,
                self._disk.status()["budget_bytes"] if self._disk is not None else 0,  # type: ignore[arg-type]
                self.info.n_ctx,
            ),
            "pool": {"held_bytes": self._pool.held_bytes, "peak_bytes": self._pool.peak_bytes},
            "checkpoints": [asdict(row) for row in self._manager.checkpoints()],
            "last_seq": self._events.seq,
        }

    def _slots(self) -> list[dict[str, Any]]:
        busy = {job.slot: job for job in self._scheduler.active if job.lease is not None}
        out = []
        for slot in range(self.info.n_slots):
            job = busy.get(slot)
            out.append(
                {
                    "id": slot,
                    "n_ctx": self.info.n_ctx,
                    "is_processing": job is not None,
                    "n_tokens": job.position if job else self._backend.position(slot),
                    "phase": str(job.phase) if job else "idle",
                    "n_prompt_tokens": job.n_prompt if job else 0,
                    "n_decoded": len(job.generated) if job else 0,
                }
            )
        return out

    # -- disk tier -------------------------------------------------------------------------------
    def _open_disk(self) -> DiskTier | None:
        """Open the folder; when it cannot be used, say why once and serve without it."""
        options = self.options
        assert options.cache_disk is not None
        try:
            store = DiskStore.open(str(options.cache_disk), options.cache_disk_bytes)
            tier = DiskTier(
                store,
                self._manager.durable,
                self._backend,
                self._pool,
                {"model": self.model_id, "arch": self.info.arch, "memory": self.info.memory},
                self._owner.post,
                spacing=options.cache_disk_spacing,
                staging_bytes=options.cache_disk_staging_bytes,
                queue_bytes=max(self.ram_bytes // 2, 64 << 20),
            )
            n = tier.load()
        except StoreError as error:
            log.warning("serving without the disk cache: %s", error)
            return None
        log.info("disk cache %s: %d checkpoints", options.cache_disk, n)
        tier.writer = DiskWriter(tier.queue, self._quiet, tier.deliver)
        tier.writer.start()
        self._executor.disk = tier
        return tier

    def _queue_newest(self) -> None:
        assert self._disk is not None
        self._executor.keep_ends()
        while self._executor.prepare_write(1 << 20) or self._disk.holds_back:
            self._disk.want_newest()

    # -- parts -----------------------------------------------------------------------------------
    def _ram_budget(self, shape: StateShape) -> int:
        options = self.options
        if options.cache_ram_bytes is None:
            return automatic_ram_bytes(self.info.model_bytes)
        if options.cache_ram_bytes == 0 and options.cache_disk is not None:
            least = one_checkpoint_bytes(shape, self.info.n_ctx)
            log.info("the disk cache is written from RAM: %.0f MB, in spite of --cache-ram-bytes 0", least / 1e6)
            return least
        return options.cache_ram_bytes

    def _text_for(self, request: GenerateRequest) -> Detokenizer:
        preserved = frozenset(
            t
            for text in request.sampling.preserved_tokens
            for t in self.vocab.tokenize(text, add_special=False, parse_special=True)
        )
        vocab = self.vocab
        return Detokenizer(lambda t: vocab.piece(t) if t in preserved else vocab.text_piece(t), request.stop)

    def _sinks(self, path: Path | None) -> tuple[Callable[[Any], None], ...]:
        if path is None:
            return ()
        try:
            file = self._log_file = _open_log(path)
        except OSError as error:
            raise ConfigError(f"--cache-log {path}: {error.strerror}; choose a writable file") from error

        def write(event: Any) -> None:
            file.write(encode(event) + "\n")

        return (write,)


def _open_log(path: Path) -> IO[str]:
    """For appending, on a line of its own: a line that a crash cut must not swallow the next one."""
    file = path.open("a", encoding="utf-8", buffering=1)
    if file.tell():
        with path.open("rb") as old:
            old.seek(-1, 2)
            if old.read(1) != b"\n":
                file.write("\n")
    return file
