"""The real cache and scheduler over the fake backend: token counts in seconds, no model and no clock.

The fake's state has the proportions of a real model (``SHAPES``: rows of a few bytes, private state in
proportion), so budgets bind where they would.  It refuses a wrong reuse, which makes every run of it
a check as well.  Restarts are not simulated: there are no files here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.agent.bound import State
from benchmarks.agent.oracle import Played
from benchmarks.agent.play import Run
from benchmarks.agent.servers import Sample
from benchmarks.agent.trace import HIGH_ID, LOW_ID, Ask, Restart, Sizes, Tokens, Workload, deepest
from gufo_gguf.backend.base import Bytes, Logits
from gufo_gguf.backend.fake import FakeBackend
from gufo_gguf.cache.events import EventLog
from gufo_gguf.cache.manager import CacheManager
from gufo_gguf.cache.types import CacheLimits, PromptView, StateShape
from gufo_gguf.engine.ablation import Ablation
from gufo_gguf.engine.executor import Executor
from gufo_gguf.engine.job import Job, Phase
from gufo_gguf.engine.pool import BufferPool
from gufo_gguf.engine.scheduler import Scheduler
from gufo_gguf.engine.types import Event, Finished, GenerateRequest, TextDelta, TokenLogprob, as_tokens

SHAPES = {
    # private state in rows: Flash-Next 118 MB / 27,648 B, the tiny qwen4exp 126 kB / 688 B
    "flash-next": State(row_bytes=24, private_bytes=24 * 4_272),
    "tiny": State(row_bytes=24, private_bytes=24 * 184),
}
_N_VOCAB = HIGH_ID
WHOLE = Ablation()


@dataclass(frozen=True, slots=True)
class Options:
    """What a simulated run is told."""

    state: State = SHAPES["flash-next"]
    n_ubatch: int = 512
    copies: float | None = None
    """Budget in whole copies of the deepest state; None = the workload's."""
    ablation: Ablation = WHOLE


class _Greedy:
    """Answers that depend on the state, from text ids alone."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend

    def sample(self, slot: int) -> int:
        return self.sample_logits(self._backend.logits(slot))

    def sample_logits(self, logits: Logits) -> int:
        return LOW_ID + int(np.argmax(logits[LOW_ID:HIGH_ID]))

    def accept(self, token: int) -> None: ...

    def logprobs(self, logits: Logits, token: int, n_top: int) -> TokenLogprob:
        raise NotImplementedError("no log-probabilities are asked for here")


class _NoText:
    stop_text: str | None = None

    def feed(self, token: int) -> str:
        return " "

    def flush(self) -> str:
        return ""


class _CountingBackend(FakeBackend):
    """Counts bytes of rows copied out."""

    copied_bytes = 0

    def rows_out(self, slot: int, first: int, n: int, out: Bytes) -> None:
        super().rows_out(slot, first, n, out)
        self.copied_bytes += n * self._row_bytes


class Simulation:
    """One server's life without a server."""

    def __init__(self, workload: Workload, sizes: Sizes, options: Options) -> None:
        state = options.state
        n_ctx = deepest(workload, sizes) + 256
        self.state = state
        self.budget_bytes = int((options.copies or workload.copies) * state.whole(n_ctx))
        self.n_slots = workload.n_slots
        self.copied_bytes = 0
        """Row bytes copied while requests ran; idle copies not counted."""
        self.backend = _CountingBackend(
            row_bytes=state.row_bytes,
            private_bytes=state.private_bytes,
            n_slots=workload.n_slots,
            n_ctx=n_ctx,
            n_vocab=_N_VOCAB,
            n_batch=2048,
            n_ubatch=options.n_ubatch,
        )
        shape = StateShape(state.row_bytes, state.private_bytes, 4 * _N_VOCAB, 256)
        limits = options.ablation.limits(CacheLimits(ram_bytes=self.budget_bytes))
        self.manager = CacheManager(shape, limits, workload.n_slots, n_ctx, EventLog(), enabled=True, ram=True)
        pool = BufferPool(self.backend.alloc, 2 * self.budget_bytes)
        self.executor = Executor(self.backend, self.manager, pool, clock=lambda: 0.0)
        self.executor.eager_copies = options.ablation.eager_copies
        self.scheduler = Scheduler(
            self.backend,
            self.manager,
            self.executor,
            lambda request: _Greedy(self.backend),
            lambda request: _NoText(),
            lambda token: False,
            shared_prefix_min=options.ablation.shared_prefix_min(512),
            clock=lambda: 0.0,
        )

    def run(self, asks: tuple[Ask, ...]) -> list[tuple[Job, list[int]]]:
        """Requests that come at the same moment, until all are answered; then idle time."""
        jobs: list[tuple[Job, list[int]]] = []
        for ask in asks:
            assert ask.tokens is not None
            answer: list[int] = []
            tokens = as_tokens(ask.tokens)
            request = GenerateRequest(tokens, max_tokens=ask.n_answer)
            job = Job(request, PromptView("bench", tokens), _listener(answer))
            jobs.append((job, answer))
            self.scheduler.add(job)
        while any(job.phase is not Phase.DONE for job, _ in jobs):
            self.scheduler.step()
        self.copied_bytes += self.backend.copied_bytes
        while self.executor.spill(1024):
            pass
        self.backend.copied_bytes = 0
        return jobs


def _listener(answer: list[int]) -> Any:
    def emit(event: Event) -> None:
        if isinstance(event, TextDelta):
            answer.extend(event.tokens)
        elif isinstance(event, Finished) and event.error is not None:
            raise event.error

    return emit


def simulate(workload: Workload, sizes: Sizes, options: Options = Options()) -> tuple[Run, Simulation]:
    """Play a workload of token prompts."""
    world = Simulation(workload, sizes, options)
    run = Run(workload.name, "simulated")
    script = workload.script(sizes)
    step = next(script)
    while True:
        if isinstance(step, Restart):
            raise ValueError("restarts cannot be simulated: there are no files")
        answers: list[Tokens] = []
        for ask, (job, answer) in zip(step, world.run(step), strict=True):
            n = job.n_prompt
            sample = Sample(workload.name, "simulated", len(run.samples), ask.conversation, ask.kind)
            sample.n_prompt, sample.n_cached, sample.n_prefilled = n, job.n_reused, n - job.n_reused
            sample.answer = answer
            sample.reported = {
                "captured": list(job.report.captured),
                "common_prefix": job.report.common_prefix_tokens,
                "source": str(job.report.reuse_source),
            }
            run.samples.append(sample)
            answers.append(np.array(answer, np.int32))
            assert ask.tokens is not None
            run.trace.append(Played(ask.tokens, answers[-1]))
        status = world.manager.stats()
        run.memory.append({"retained": status.unique_bytes, "whole_copies": status.whole_bytes})
        try:
            step = script.send(answers)
        except StopIteration:
            break
    problems = world.manager.check()
    if problems or world.manager.off is not None:
        raise RuntimeError(f"the cache's books are wrong after {workload.name}: {problems or world.manager.off}")
    return run, world
