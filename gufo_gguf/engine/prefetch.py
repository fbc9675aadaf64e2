"""Disk to RAM for a prompt that is about to come: a restore into an idle slot and a capture there.

    disk ──restore──► idle slot ──capture──► RAM
                      (live as well, until another request takes the slot)

Nothing is computed.  Rejected: reading files straight into RAM buffers, a second way of restoring whose
result no layout check would ever have seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from gufo_gguf.cache.manager import CacheManager
from gufo_gguf.cache.types import CapturePoint, MissReason, Origin, PromptView, RequestReport, ReuseSource, Tier
from gufo_gguf.engine.executor import Executor

_SOURCES = {Tier.LIVE: ReuseSource.LIVE, Tier.RAM: ReuseSource.RAM, Tier.DISK: ReuseSource.DISK}


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What a prompt can start from now, and what was done for it."""

    boundary: int
    """Tokens of the prompt that need no evaluation; 0 = none."""
    source: ReuseSource
    """Where they lay when the request came: DISK = they were loaded, none = there is nothing."""
    loaded_tokens: int
    """Tokens read from disk; 0 when they were in RAM or in a slot already."""
    loaded_bytes: int
    kept: bool
    """False: RAM had no room for the loaded state; it lies in its slot alone."""
    miss_reason: MissReason | None
    """Why there is nothing."""
    restore_ms: float


def prefetch(manager: CacheManager, executor: Executor, prompt: PromptView) -> Prefetched | None:
    """Owner thread: have the deepest state of a prompt's prefix in RAM.

    None when no slot is idle: a restore has to go through one.  A damaged checkpoint is dropped, and
    the next best one is tried.
    """
    shape = manager.shape
    report = RequestReport()
    while True:
        lookup = manager.lookup(prompt)
        best = lookup.best
        if best is None:
            return Prefetched(0, ReuseSource.NONE, 0, 0, False, lookup.reason, 0.0)
        if best.tier is not Tier.DISK:
            return Prefetched(best.n_tokens, _SOURCES[best.tier], 0, 0, True, None, 0.0)
        admission = manager.acquire(prompt, lookup)
        if admission is None:
            return None
        n = executor.admit(admission, prompt.tokens, report)
        if n and admission.source is ReuseSource.DISK:
            break
        manager.release(admission.lease)
        if n:  # what a slot or RAM holds was the better start
            return Prefetched(n, admission.source, 0, 0, True, None, report.restore_ms)
        if manager.lookup(prompt).best == best:  # nothing was dropped: trying again would end the same way
            return Prefetched(0, ReuseSource.NONE, 0, 0, False, MissReason.QUARANTINED, report.restore_ms)
    assert admission.restore is not None
    has_logits = executor.logits_of(admission.restore) is not None
    executor.capture(admission.lease, CapturePoint(n, Origin.REUSED_END, required=True, want_logits=has_logits), report)
    manager.release(admission.lease)
    kept = any(c.tier is Tier.RAM and c.n_tokens >= n for c in manager.lookup(prompt).candidates)
    n_bytes = n * shape.row_bytes + shape.private_bytes + (shape.logits_bytes if has_logits else 0)
    return Prefetched(n, ReuseSource.DISK, n, n_bytes, kept, None, report.restore_ms)
