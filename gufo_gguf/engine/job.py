"""One request on its way through the engine, and what it needs from outside.

WAITING ──admitted──► PREFILL ──prompt done──► DECODE ──► DONE
   └───────────── cancelled / failed at any point ─────────►┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from gufo_gguf.backend.base import Logits
from gufo_gguf.cache.types import CapturePoint, Lease, PromptView, RequestReport
from gufo_gguf.engine.types import Event, Finished, FinishReason, GenerateRequest, TokenLogprob


class Phase(StrEnum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


class TokenSampler(Protocol):
    """Sampler state belongs to the request: rebuilt from its tokens, never restored."""

    def sample(self, slot: int) -> int:
        """Choose from the logits of the slot's last decode."""
        ...

    def sample_logits(self, logits: Logits) -> int:
        """Choose from stored logits; the same choice as from the context."""
        ...

    def accept(self, token: int) -> None: ...

    def logprobs(self, logits: Logits, token: int, n_top: int) -> TokenLogprob: ...


class TextSink(Protocol):
    """Turns tokens into text that is safe to send."""

    stop_text: str | None
    """The stop string that was found, once one was."""

    def feed(self, token: int) -> str:
        """Text that became certain with this token; complete UTF-8, no part of a stop string."""
        ...

    def flush(self) -> str:
        """What was held back, at the end of the generation."""
        ...


@dataclass(eq=False, slots=True)
class Job:
    """Mutable; owner thread only, but for ``cancelled`` (a flag any thread may set)."""

    request: GenerateRequest
    prompt: PromptView
    emit: Callable[[Event], None]
    id: str = ""
    """Stands in the cache's decision log."""
    phase: Phase = Phase.WAITING
    cancelled: bool = False
    sampler: TokenSampler | None = None
    text: TextSink | None = None
    lease: Lease | None = None
    position: int = 0
    """Tokens of this request that are in the slot."""
    n_reused: int = 0
    captures: deque[CapturePoint] = field(default_factory=deque)
    generated: list[int] = field(default_factory=list)
    pending: int | None = None
    """A sampled token that is not evaluated yet."""
    report: RequestReport = field(default_factory=RequestReport)
    held: list[tuple[int, TokenLogprob | None]] = field(default_factory=list)
    """Tokens whose text is still held back."""
    leader: Job | None = None
    """Computes a prefix this job waits for, up to ``shared_boundary``."""
    shared_boundary: int = 0
    led: bool = False
    """Has waited once: it does not wait for another leader."""
    submitted_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def n_prompt(self) -> int:
        return len(self.prompt.tokens)

    @property
    def slot(self) -> int:
        assert self.lease is not None
        return self.lease.slot


def finished(
    job: Job, reason: FinishReason, timings_of: Callable[[Job], object], error: Exception | None = None
) -> Finished:
    """The closing event of a job."""
    return Finished(
        reason=reason,
        stop_text=job.text.stop_text if job.text else None,
        n_prompt=job.n_prompt,
        n_generated=len(job.generated),
        timings=timings_of(job),  # type: ignore[arg-type]
        report=job.report,
        error=error,
    )
