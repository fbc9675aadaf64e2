"""Which tokens run next: continuous batching over the slots, one pass per step.

A step is one of, in this order:

    1. let go of cancelled jobs
    2. admit waiting jobs into free slots (lookup, preserve, restore)
    3. decode   one token of every job that generates, all in one pass
    4. prefill  one piece of one prompt, jobs taking turns
    5. nothing: the caller may spill or sleep

Decode and prefill are separate passes: llama.cpp splits a joint batch into equal parts per
sequence, which would move a prefill's pass ends with every neighbour that happens to decode.

A piece of a prompt ends at the next planned capture, and passes fall on absolute multiples of the
micro-batch, so that a restored prompt continues with the pass ends of an uninterrupted one:

    position ──► next multiple of n_ubatch ──► … ──► capture boundary ──► …
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from gufo_gguf.backend.base import Backend, Span
from gufo_gguf.cache.manager import CacheManager
from gufo_gguf.cache.types import Admission, CapturePoint, Lookup, Origin, ReuseSource, Tier, Tokens
from gufo_gguf.core.errors import BackendError, ContextFull, GufoError
from gufo_gguf.engine.executor import Executor
from gufo_gguf.engine.job import Job, Phase, TextSink, TokenSampler, finished
from gufo_gguf.engine.types import FinishReason, GenerateRequest, PrefillProgress, TextDelta, Timings

log = logging.getLogger("gufo.engine")

MakeSampler = Callable[[GenerateRequest], TokenSampler]
MakeText = Callable[[GenerateRequest], TextSink]

_RESTORE_TRIES = 3
SHARED_PREFIX_MIN = 512
"""Tokens that requests must share, beyond what they can restore, for one to wait for another."""


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix of two token arrays."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


class Scheduler:
    """Owner thread only, except ``Job.cancelled``.  No threads and no sleeping of its own."""

    def __init__(
        self,
        backend: Backend,
        manager: CacheManager,
        executor: Executor,
        make_sampler: MakeSampler,
        make_text: MakeText,
        is_eog: Callable[[int], bool],
        *,
        prefill_chunk: int = 512,
        shared_prefix_min: int = SHARED_PREFIX_MIN,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._backend = backend
        self._manager = manager
        self._executor = executor
        self._make_sampler = make_sampler
        self._make_text = make_text
        self._is_eog = is_eog
        self._clock = clock
        self._shared_prefix_min = shared_prefix_min
        n_ubatch = backend.info.n_ubatch
        # whole micro-batches, so that a piece never ends inside one
        self._chunk = max(n_ubatch, min(prefill_chunk, backend.info.n_batch) // n_ubatch * n_ubatch)
        self.waiting: deque[Job] = deque()
        self.active: list[Job] = []
        self.counters: dict[str, float] = {
            "requests_total": 0,
            "prompt_tokens_total": 0,
            "cached_tokens_total": 0,
            "prefill_tokens_total": 0,
            "generated_tokens_total": 0,
            "prefill_seconds_total": 0.0,
            "decode_seconds_total": 0.0,
            "passes_total": 0,
        }

    # -- what the engine calls -------------------------------------------------------------------
    def add(self, job: Job) -> None:
        job.submitted_s = self._clock()
        self.counters["requests_total"] += 1
        self.waiting.append(job)

    def idle(self) -> bool:
        return not self.waiting and not self.active

    def step(self) -> bool:
        """One unit of work; False when there was nothing to do."""
        self._drop_cancelled()
        self._admit_waiting()
        worked = any(j.phase is Phase.DONE for j in self.active)  # answered at once: others can have their slots
        if any(j.phase is Phase.DECODE for j in self.active):
            self._decode_pass()
            worked = True
        prefilling = next((j for j in self.active if j.phase is Phase.PREFILL), None)
        if prefilling is not None:
            self._prefill_piece(prefilling)
            worked = True
        if not worked and self.waiting and not self.active:
            self._unblock(self.waiting[0])
            worked = True
        self.active = [j for j in self.active if j.phase is not Phase.DONE]
        if prefilling in self.active:  # the next prompt's turn
            self.active.remove(prefilling)
            self.active.append(prefilling)
        return worked

    def fail_all(self, error: Exception) -> None:
        """End every job with an error (the owner thread is going down)."""
        for job in [*self.waiting, *self.active]:
            if job.phase is not Phase.DONE:
                self._finish(job, FinishReason.ERROR, error)
        self.waiting.clear()
        self.active.clear()

    # -- admission -------------------------------------------------------------------------------
    def _drop_cancelled(self) -> None:
        for job in [j for j in self.waiting if j.cancelled]:
            self.waiting.remove(job)
            self._finish(job, FinishReason.CANCELLED)
        for job in self.active:
            if job.cancelled and job.phase is not Phase.DONE:
                self._finish(job, FinishReason.CANCELLED)
        self.active = [j for j in self.active if j.phase is not Phase.DONE]

    def _admit_waiting(self) -> None:
        for job in list(self.waiting):
            if len(self.active) >= self._backend.info.n_slots:
                return
            if self._follows(job):
                continue  # those behind it may go ahead: it waits for work, not for a slot
            try:
                self._equip(job)
                if job.phase is not Phase.DONE and not self._admit(job):
                    return
            except GufoError as error:
                self._finish(job, FinishReason.ERROR, error)
            self.waiting.remove(job)

    def _equip(self, job: Job) -> None:
        """Make what the job samples and writes with.  No slot is held yet: a failure is that job's alone."""
        if job.sampler is None:
            try:
                job.sampler = self._make_sampler(job.request)
                job.text = self._make_text(job.request)
            except Exception as error:
                self._finish(job, FinishReason.ERROR, error)

    def _unblock(self, job: Job) -> None:
        """Every slot is idle and the job still gets none: start it cold, or say that it cannot start."""
        if job.prompt.read:
            log.error("request %s waited for a restore that cannot come; starting it cold", job.id)
            job.prompt = replace(job.prompt, read=False)
        else:
            self.waiting.remove(job)
            self._finish(job, FinishReason.ERROR, BackendError("no slot could be taken although all are idle"))

    def _follows(self, job: Job) -> bool:
        """Is another request computing a long prefix that this one can restore soon?

            job      [ restorable )[    shared, being computed    )[ own )
            leader   [    ... position                    boundary )[ own )

        The leader captures at the boundary; until it has passed it, or is gone, the job waits.
        """
        if job.leader is None:
            found = self._find_leader(job)
            if found is None:
                return False
            job.leader, job.shared_boundary = found
            self._insert_capture(job.leader, job.shared_boundary)
            return True
        if job.leader.phase is Phase.PREFILL and job.leader.position < job.shared_boundary:
            return True
        job.report.shared_prefix_wait_ms = 1e3 * (self._clock() - job.submitted_s)
        return False

    def _find_leader(self, job: Job) -> tuple[Job, int] | None:
        if job.led or not job.prompt.read or self._manager.off is not None:
            return None
        best = self._manager.lookup(job.prompt).best
        if best is not None and best.tier is Tier.LIVE:
            return None  # continues its own conversation
        have = best.n_tokens if best is not None else 0
        for other in self.active:
            if other.phase is not Phase.PREFILL or other.prompt.scope != job.prompt.scope or not other.prompt.write:
                continue
            if other.prompt.inputs or job.prompt.inputs:
                continue  # images: equal placeholder tokens need not be equal input
            shared = min(common_prefix(job.prompt.tokens, other.prompt.tokens), job.n_prompt - 1)
            if shared - have >= self._shared_prefix_min and other.position < shared:
                job.led = True
                return other, shared
        return None

    @staticmethod
    def _insert_capture(leader: Job, boundary: int) -> None:
        if any(p.boundary == boundary for p in leader.captures):
            return
        point = CapturePoint(boundary, Origin.LEARNED, required=True)
        leader.captures = deque(sorted([*leader.captures, point], key=lambda p: p.boundary))

    def _admit(self, job: Job) -> bool:
        """Give the job a slot with its reused state in place; False when no slot is free now."""
        self._manager.log.request = job.id
        job.started_s = self._clock()
        started = self._start(job)
        if started is None:
            return False
        lookup, admission, n_reused = started
        job.lease = admission.lease
        job.n_reused = job.position = n_reused
        job.report.common_prefix_tokens = lookup.common_prefix
        job.report.miss_reason = lookup.reason if admission.source is ReuseSource.NONE else None
        job.report.prefilled_tokens = job.n_prompt - n_reused
        self.counters["prompt_tokens_total"] += job.n_prompt
        self.counters["cached_tokens_total"] += n_reused
        job.captures.extend(
            self._manager.plan_captures(job.lease, job.prompt, lookup.common_prefix, self._backend.info.n_ubatch)
        )
        stored = self._executor.logits_of(admission.restore) if admission.restore is not None else None
        self._capture_here(job)
        job.phase = Phase.PREFILL
        self.active.append(job)
        if job.request.progress:
            self._progress(job)
        if n_reused == job.n_prompt and job.request.max_tokens == 0:
            self._finish(job, FinishReason.LENGTH)
        elif n_reused == job.n_prompt:
            assert stored is not None, "a whole prompt was reused without its next-token logits"
            assert job.sampler is not None
            job.phase = Phase.DECODE
            self._take(job, job.sampler.sample_logits(stored), stored)
        return True

    def _start(self, job: Job) -> tuple[Lookup, Admission, int] | None:
        """Lease a slot and put the best restorable state into it: (lookup, admission, tokens in place)."""
        prompt = job.prompt
        for attempt in range(_RESTORE_TRIES + 1):
            if attempt == _RESTORE_TRIES:  # nothing could be restored: start cold
                prompt = replace(prompt, read=False)
            lookup = self._manager.lookup(prompt)
            if self._executor.part(prompt, lookup):
                lookup = self._manager.lookup(prompt)
            admission = self._manager.acquire(prompt, lookup)
            if admission is None:
                return None
            n_reused = self._executor.admit(admission, prompt.tokens, job.report)
            if n_reused == admission.n_reused:
                return lookup, admission, n_reused
            self._manager.release(admission.lease)  # the plan failed; ask again without it
        raise BackendError("a slot could not even be started empty")

    # -- passes ----------------------------------------------------------------------------------
    def _prefill_piece(self, job: Job) -> None:
        end = self._piece_end(job)
        piece = job.prompt.tokens[job.position : end]
        last = end == job.n_prompt
        if not self._run([(job, piece, last)]):
            return
        self.counters["prefill_tokens_total"] += len(piece)
        self._capture_here(job)
        if job.request.progress:
            self._progress(job)
        if last and job.request.max_tokens == 0:  # asked only to have the prompt evaluated
            self._finish(job, FinishReason.LENGTH)
        elif last:
            job.phase = Phase.DECODE
            self._sample(job)

    def _piece_end(self, job: Job) -> int:
        n_ubatch = self._backend.info.n_ubatch
        beyond = job.position % n_ubatch  # nonzero: get back onto multiples first
        end = job.position - beyond + (n_ubatch if beyond else self._chunk)
        if job.captures:
            end = min(end, job.captures[0].boundary)
        return min(end, job.n_prompt)

    def _decode_pass(self) -> None:
        jobs = sorted((j for j in self.active if j.phase is Phase.DECODE), key=lambda j: j.slot)
        spans = []
        for job in jobs:
            assert job.pending is not None
            if job.position >= self._backend.info.n_ctx:
                self._finish(job, FinishReason.LENGTH)  # the context filled while generating
                continue
            spans.append((job, np.array([job.pending], dtype=np.int32), True))
        if spans and self._run(spans):
            for job, _, _ in spans:
                job.pending = None
                self._sample(job)

    def _run(self, spans: list[tuple[Job, np.ndarray, bool]]) -> bool:
        started = self._clock()
        try:
            self._backend.decode([Span(job.slot, tokens, want) for job, tokens, want in spans])
        except ContextFull:
            for job, _, _ in spans:
                self._finish(job, FinishReason.LENGTH)
            return False
        except BackendError as error:
            log.error("a pass over slots %s failed: %s", [j.slot for j, _, _ in spans], error)
            for job, _, _ in spans:
                self._fail(job, error)
            return False
        self.counters["passes_total"] += 1
        prefill = spans[0][0].phase is Phase.PREFILL
        self.counters["prefill_seconds_total" if prefill else "decode_seconds_total"] += self._clock() - started
        for job, tokens, _ in spans:
            job.position += len(tokens)
            assert job.lease is not None
            self._manager.extend(job.lease, tokens)
        return True

    def _capture_here(self, job: Job) -> None:
        while job.captures and job.captures[0].boundary <= job.position:
            point = job.captures.popleft()
            if point.boundary == job.position:
                assert job.lease is not None
                self._manager.log.request = job.id
                self._executor.capture(job.lease, point, job.report)

    # -- tokens ----------------------------------------------------------------------------------
    def _sample(self, job: Job) -> None:
        assert job.sampler is not None
        try:
            token = job.sampler.sample(job.slot)
        except (GufoError, ValueError) as error:
            self._finish(job, FinishReason.ERROR, error)
            return
        self._take(job, token, None)

    def _take(self, job: Job, token: int, stored: np.ndarray | None) -> None:
        """A token was chosen: count it, send what text is certain, decide whether to go on."""
        assert job.sampler is not None and job.text is not None
        if not job.generated:
            job.first_token_s = self._clock()
        logprob = None
        if job.request.n_logprobs > 0:
            logits = self._backend.logits(job.slot) if stored is None else stored
            logprob = job.sampler.logprobs(logits, token, job.request.n_logprobs)
        job.sampler.accept(token)
        job.generated.append(token)
        self.counters["generated_tokens_total"] += 1
        if self._is_eog(token):
            self._finish(job, FinishReason.STOP)
            return
        text = job.text.feed(token)
        job.held.append((token, logprob))
        if text:
            self._send(job, text)
        limit = job.request.max_tokens
        if job.text.stop_text is not None:
            self._finish(job, FinishReason.STOP)
        elif limit is not None and len(job.generated) >= limit:
            self._finish(job, FinishReason.LENGTH)
        else:
            job.pending = token

    def _send(self, job: Job, text: str) -> None:
        tokens = tuple(t for t, _ in job.held)
        logprobs = tuple(p for _, p in job.held if p is not None)
        job.held.clear()
        job.emit(TextDelta(text, tokens, logprobs))

    def _progress(self, job: Job) -> None:
        elapsed_ms = 1e3 * (self._clock() - job.started_s)
        job.emit(PrefillProgress(job.n_prompt, job.n_reused, job.position, elapsed_ms))

    # -- endings ---------------------------------------------------------------------------------
    def _finish(self, job: Job, reason: FinishReason, error: Exception | None = None) -> None:
        if job.phase is Phase.DONE:
            return
        job.phase = Phase.DONE
        if job.text is not None and reason is not FinishReason.ERROR:
            rest = job.text.flush()
            if rest or job.held:
                self._send(job, rest)
        if job.lease is not None:
            self._manager.log.request = job.id
            self._manager.release(job.lease)  # keeps what was really computed
        self._manager.log.request = ""
        job.emit(finished(job, reason, self._timings, error))

    def _fail(self, job: Job, error: Exception) -> None:
        """The slot's state is in doubt: empty it before anyone can reuse it."""
        assert job.lease is not None
        self._manager.fail_slot(job.lease, str(error))
        try:
            self._backend.abort_restore(job.slot)
        except BackendError as second:
            log.error("slot %d could not be emptied: %s", job.slot, second)
        self._finish(job, FinishReason.ERROR, error)

    def _timings(self, job: Job) -> Timings:
        now = self._clock()
        first = job.first_token_s or now
        started = job.started_s or now
        return Timings(
            cache_n=job.n_reused,
            prompt_n=job.n_prompt - job.n_reused if job.started_s else 0,
            prompt_ms=1e3 * (first - started),
            predicted_n=len(job.generated),
            predicted_ms=1e3 * (now - first) if job.generated else 0.0,
        )
