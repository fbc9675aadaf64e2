"""An engine on a real model that remembers how every state came about.

A *lineage* is the list of passes that led to a slot's state:

    run(tokens), run(tokens), cut(n), run(tokens) ...

It travels with checkpoints: what a restore puts into a slot has the lineage of the run that was
captured.  Replaying a lineage in an untouched context is the uninterrupted run with the same pass
ends; logits, rows, private state and cell bookkeeping must then agree byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gufo_gguf.backend.base import Span
from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions
from gufo_gguf.cache.events import EventLog
from gufo_gguf.cache.manager import CacheManager
from gufo_gguf.cache.types import (
    Admission,
    CacheLimits,
    CaptureTicket,
    CheckpointId,
    PromptView,
    RequestReport,
    StateShape,
    Tokens,
)
from gufo_gguf.engine.executor import Executor
from gufo_gguf.engine.job import Job, Phase
from gufo_gguf.engine.pool import BufferPool
from gufo_gguf.engine.scheduler import Scheduler
from gufo_gguf.engine.types import Finished, GenerateRequest, TextDelta, as_tokens
from tests.engine.simulation import GreedySampler, PlainText

Step = Tokens | int
"""Tokens of one pass, or the number of tokens kept by a cut."""


class Recorder:
    """A LlamaBackend whose slots carry their lineage; everything else passes through."""

    def __init__(self, backend: LlamaBackend) -> None:
        self._backend = backend
        self.lineage: list[list[Step]] = [[] for _ in range(backend.info.n_slots)]

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def decode(self, spans: Sequence[Span]) -> None:
        assert len(spans) == 1, "a neighbour in the pass would change the bytes"
        self._backend.decode(spans)
        self.lineage[spans[0].slot].append(spans[0].tokens.copy())

    def truncate(self, slot: int, n_tokens: int) -> None:
        self._backend.truncate(slot, n_tokens)
        self.lineage[slot] = self.lineage[slot] + [n_tokens] if n_tokens else []

    def abort_restore(self, slot: int) -> None:
        self._backend.abort_restore(slot)
        self.lineage[slot] = []


class TracingExecutor(Executor):
    def __init__(self, recorder: Recorder, manager: CacheManager, pool: BufferPool) -> None:
        super().__init__(recorder, manager, pool, clock=lambda: 0.0)  # type: ignore[arg-type]
        self.recorder = recorder
        self.of_checkpoint: dict[CheckpointId, list[Step]] = {}
        self.depth: dict[CheckpointId, int] = {}
        self.sources: list[str] = []

    def _fill(self, ticket: CaptureTicket) -> bool:
        kept = super()._fill(ticket)
        if kept:
            self.of_checkpoint[ticket.checkpoint] = list(self.recorder.lineage[ticket.lease.slot])
            self.depth[ticket.checkpoint] = ticket.point.boundary
        return kept

    def admit(self, admission: Admission, tokens: Tokens, report: RequestReport) -> int:
        n = super().admit(admission, tokens, report)
        if admission.restore is not None and n:
            source = admission.restore.checkpoint
            steps = list(self.of_checkpoint[source])
            self.recorder.lineage[admission.lease.slot] = [*steps, n] if n < self.depth[source] else steps
        self.sources.append(str(admission.source))
        return n


@dataclass
class Answer:
    tokens: list[int]
    finished: Finished


class TracedEngine:
    """One model, small chunks, and after every request the comparison with its replayed lineage."""

    def __init__(
        self, path: Path, *, n_slots: int = 1, ram_bytes: int = 1 << 30, max_checkpoints: int = 128, **options: object
    ) -> None:
        def open_backend(slots: int) -> LlamaBackend:
            return LlamaBackend(
                path, LlamaOptions(n_ctx=2048, n_slots=slots, n_threads=1, n_ubatch=64, n_batch=256, **options)
            )  # type: ignore[arg-type]

        self.backend = open_backend(n_slots)
        self.control = open_backend(1)
        info = self.backend.info
        assert info.inventory is not None, info.uncacheable
        self.recorder = Recorder(self.backend)
        shape = StateShape(info.inventory.row_bytes, info.inventory.private_bytes, 4 * info.n_vocab, 64)
        limits = CacheLimits(
            ram_bytes=ram_bytes,
            max_checkpoints=max_checkpoints,
            chunk_rows=64,
            grid_step=128,
            grid_end_margin=16,
            learned_min=64,
            learned_merge=8,
        )
        self.shape = shape
        self.manager = CacheManager(shape, limits, n_slots, info.n_ctx, EventLog())
        self.pool = BufferPool(self.backend.alloc, 2 * ram_bytes)
        self.executor = TracingExecutor(self.recorder, self.manager, self.pool)
        self.scheduler = Scheduler(
            self.recorder,  # type: ignore[arg-type]
            self.manager,
            self.executor,
            lambda request: GreedySampler(self.recorder),  # type: ignore[arg-type]
            lambda request: PlainText(),
            lambda token: False,
            prefill_chunk=128,
            clock=lambda: 0.0,
        )

    def ask(
        self, tokens: Sequence[int], n: int = 4, stable: tuple[int, ...] = (), cancel_after: int | None = None
    ) -> Answer:
        """One greedy request, run to its end and compared with its replay."""
        out: list[int] = []
        end: list[Finished] = []

        def emit(event: object) -> None:
            if isinstance(event, TextDelta):
                out.extend(event.tokens)
            elif isinstance(event, Finished):
                end.append(event)

        ids = as_tokens(tokens)
        job = Job(GenerateRequest(ids, max_tokens=n, stable=stable), PromptView("m", ids, stable), emit)
        self.scheduler.add(job)
        steps = 0
        while job.phase is not Phase.DONE:
            self.scheduler.step()
            steps += 1
            if cancel_after is not None and steps == cancel_after:
                job.cancelled = True
        assert job.lease is not None
        self.compare(job.lease.slot)
        assert self.manager.check() == []
        assert self.manager.off is None, self.manager.off
        return Answer(out, end[0])

    def spill(self) -> None:
        while self.executor.spill(64):
            pass

    def compare(self, slot: int) -> None:
        """The slot against its lineage replayed from nothing: state bytes, then what comes next."""
        control = self.control
        control.truncate(0, 0)
        for step in self.recorder.lineage[slot]:
            if isinstance(step, int):
                control.truncate(0, step)
            else:
                control.decode([Span(0, step, True)])
        n = self.backend.position(slot)
        assert control.position(0) == n
        if n == 0:
            return
        for mine, theirs in zip(self._state(self.backend, slot, n), self._state(control, 0, n), strict=True):
            assert np.array_equal(mine, theirs), (
                f"{int((mine != theirs).sum())} of {mine.size} bytes differ at {n} tokens"
            )

    def _state(self, backend: LlamaBackend, slot: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        rows = np.zeros(n * self.shape.row_bytes, np.uint8)
        private = np.zeros(self.shape.private_bytes, np.uint8)
        if rows.size:
            backend.rows_out(slot, 0, n, rows)
        if private.size:
            backend.private_out(slot, private)
        return rows, private

    def close(self) -> None:
        self.backend.close()
        self.control.close()
