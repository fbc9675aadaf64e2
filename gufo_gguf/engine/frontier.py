"""A checkpoint of what lies in an idle slot now, generated tokens included, without computing anything.

A request's own captures lie within its prompt; the end of an answer is only kept by its slot, until
another conversation takes that.  Whoever wants to come back to exactly this state asks for it:

    slot   [ prompt )[ generated, evaluated )( last sampled token, never evaluated )
                                            ^ the frontier: captured here

Rejected: sending the same tokens as a request that generates nothing.  It would restore an earlier
checkpoint and evaluate the answer again in one pass: the same tokens, not the same bytes.
"""

from __future__ import annotations

import numpy as np

from gufo_gguf.backend.base import Backend
from gufo_gguf.cache.manager import CacheManager
from gufo_gguf.cache.types import (
    CapturePoint,
    Lookup,
    Origin,
    PromptView,
    RequestReport,
    ReuseSource,
    Tier,
    Tokens,
)
from gufo_gguf.engine.executor import Executor

_UNEVALUATED = 1
"""The last sampled token of an answer that a limit ended."""


def probe(scope: str, tokens: Tokens) -> PromptView:
    """A prompt for which all of ``tokens`` may be reused: one more token follows them."""
    return PromptView(scope, np.append(tokens, np.int32(0)).astype(np.int32, copy=False), write=True)


def keep_frontier(
    backend: Backend, manager: CacheManager, executor: Executor, scope: str, tokens: Tokens
) -> int | None:
    """Owner thread: make the state after ``tokens`` (or all but the last) a checkpoint.

    Returns its boundary; 0 when the cache refused it (the decision log says why); None when no idle
    slot ends there and no checkpoint lies there.
    """
    prompt = probe(scope, tokens)
    wanted = range(max(1, len(tokens) - _UNEVALUATED), len(tokens) + 1)
    candidates = [c for c in manager.lookup(prompt).candidates if c.n_tokens in wanted]
    live = next((c for c in candidates if c.tier is Tier.LIVE and _ends_there(backend, c.slot, c.n_tokens)), None)
    kept = next((c for c in candidates if c.tier is not Tier.LIVE), None)
    if live is None or (kept is not None and kept.n_tokens >= live.n_tokens):
        return None if kept is None else kept.n_tokens
    admission = manager.acquire(prompt, Lookup((live,), live.n_tokens, None))
    if admission is None:
        return None
    report = RequestReport()
    n_reused = executor.admit(admission, tokens, report)
    if admission.source is ReuseSource.LIVE and n_reused == live.n_tokens:
        executor.capture(admission.lease, CapturePoint(n_reused, Origin.FRONTIER, required=True), report)
    manager.release(admission.lease)
    found = manager.lookup(prompt).candidates
    return next((c.n_tokens for c in found if c.tier is not Tier.LIVE and c.n_tokens == live.n_tokens), 0)


def _ends_there(backend: Backend, slot: int | None, n_tokens: int) -> bool:
    """Cutting a longer live history would cost what it holds beyond."""
    return slot is not None and backend.position(slot) == n_tokens
