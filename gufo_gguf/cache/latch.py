"""The latch: a cache whose tables contradict each other serves nothing and keeps nothing any more.

Every public method of the manager runs guarded.  An exception inside means a mistake in the cache
itself, never a refusal (those are values).  The first one turns the cache off for good; that call
and all later ones get the answers below, which only lease slots, so that requests go on cold.

A restore that was under way when the latch fell is not trusted: ``ready`` answers False.

Rejected: raising into the request (it would fail although a cold run is possible), and freeing the
retained memory (a plan that is being carried out may still name a buffer).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from gufo_gguf.cache.captures import Refusal
from gufo_gguf.cache.slots import SlotState
from gufo_gguf.cache.types import (
    Admission,
    CapturePoint,
    CaptureRefused,
    CaptureTicket,
    CheckpointId,
    Lease,
    Lookup,
    MissReason,
    PromptView,
    ReuseSource,
    RowCopy,
    Tokens,
)

if TYPE_CHECKING:
    from gufo_gguf.cache.manager import CacheManager

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Method = Callable[Concatenate["CacheManager", _P], _R]


def guarded(fallback: _Method[_P, _R]) -> Callable[[_Method[_P, _R]], _Method[_P, _R]]:
    """Run a method unless the cache is off; an exception in it latches.

    ``fallback`` answers with the same arguments then; it must not be able to fail.
    """

    def wrap(method: _Method[_P, _R]) -> _Method[_P, _R]:
        @functools.wraps(method)
        def run(self: CacheManager, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            if self.off is None:
                try:
                    return method(self, *args, **kwargs)
                except Exception as error:
                    self.latch(f"{method.__name__}: {error!r}")
            return fallback(self, *args, **kwargs)

        return run

    return wrap


# -- answers of a cache that is off: the manager's methods of the same names -----------------------
def lookup(self: CacheManager, prompt: PromptView) -> Lookup:
    return Lookup((), 0, MissReason.DISABLED)


def acquire(self: CacheManager, prompt: PromptView, lookup: Lookup) -> Admission | None:
    for slot in self.tables.slots:
        if slot.state is SlotState.IDLE:
            slot.generation += 1
            slot.state = SlotState.RUNNING
            return Admission(slot.lease, ReuseSource.NONE, 0, (), 0, None)
    return None


def preserved(self: CacheManager, lease: Lease, copies: tuple[RowCopy, ...]) -> None:
    return None


def ready(self: CacheManager, admission: Admission) -> bool:
    return admission.source is ReuseSource.NONE


def abandon(self: CacheManager, admission: Admission, reason: str, *, quarantine: bool = False) -> None:
    return None


def extend(self: CacheManager, lease: Lease, tokens: Tokens) -> None:
    return None


def plan_captures(
    self: CacheManager, lease: Lease, prompt: PromptView, common_prefix: int, n_ubatch: int
) -> tuple[CapturePoint, ...]:
    return ()


def reserve_capture(
    self: CacheManager, lease: Lease, point: CapturePoint, *, may_wait: bool = False
) -> CaptureTicket | CaptureRefused | None:
    return CaptureRefused(point, Refusal.DISABLED, 0, self.limits.ram_bytes)


def reserve_parting(self: CacheManager, prompt: PromptView, lookup: Lookup) -> CaptureTicket | None:
    return None


def reserve_end(self: CacheManager, slot: int) -> CaptureTicket | None:
    return None


def commit_capture(self: CacheManager, ticket: CaptureTicket) -> bool:
    return False


def abandon_capture(self: CacheManager, ticket: CaptureTicket, reason: str) -> None:
    return None


def release(self: CacheManager, lease: Lease) -> None:
    slot = self.tables.slots.leased(lease)
    if slot is not None:
        slot.state = SlotState.IDLE


def fail_slot(self: CacheManager, which: Lease | int, reason: str) -> tuple[CheckpointId, ...]:
    slot = self.tables.slots.find(which)
    if slot is not None:
        slot.state = SlotState.IDLE
    return ()


def plan_spill(self: CacheManager, max_rows: int) -> tuple[RowCopy, ...]:
    return ()


def preserve_done(self: CacheManager, copies: tuple[RowCopy, ...]) -> None:
    return None
