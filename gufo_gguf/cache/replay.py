"""From a log back to the cache: what was retained when, and why a boundary was or was not there.

Only admissions, touches and removals change the retained set, and each says by how many bytes; so
the set at any sequence number is a fold over the log, and every event's ``total_bytes`` is a check.

A log knows no conversations.  They are found again by links between checkpoints:

    parent      the deepest retained checkpoint a new one extended
    request     checkpoints of one request extend each other, and the one it restored

and the *lineage* of a checkpoint is all it extends and all that extends it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from gufo_gguf.cache.events import CacheEvent, EventKind
from gufo_gguf.cache.types import Origin


@dataclass(frozen=True, slots=True)
class Retained:
    """One checkpoint in the rebuilt set."""

    checkpoint: int
    boundary: int
    origin: Origin | None
    parent: int | None
    n_bytes: int
    admitted_seq: int
    last_use_seq: int
    uses: int


class Status(StrEnum):
    PRESENT = "present"
    REMOVED = "removed"
    REFUSED = "refused"
    UNREACHED = "unreached"
    """Planned, but the request never left a checkpoint there: it ended before."""
    UNPLANNED = "unplanned"
    """A request computed past it without planning a capture."""
    UNKNOWN = "unknown"
    """The log says nothing about it."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a boundary was, or was not, a restore point at a moment."""

    boundary: int
    seq: int
    status: Status
    decisive: CacheEvent | None
    """The event that decided."""
    newcomer: CacheEvent | None
    """What a removed checkpoint made room for."""
    nearest: int | None
    """The deepest restore point of the lineage below the boundary, at that moment."""
    events: tuple[CacheEvent, ...]
    """Everything the log says about this boundary, oldest first."""

    def __str__(self) -> str:
        event, at = self.decisive, f"At {self.seq}, boundary {self.boundary:,}"
        why = f" ({event.reason})" if event is not None and event.reason else ""
        match self.status:
            case Status.PRESENT if event is not None:
                text = f"{at} was there: checkpoint {event.checkpoint}, admitted by event {event.seq}."
            case Status.REMOVED if event is not None:
                text = f"{at} was gone: event {event.seq} removed checkpoint {event.checkpoint}{why}"
                text += f", {event.n_bytes:,} bytes."
                if self.newcomer is not None:
                    text += f" It made room for {self.newcomer.boundary:,} (event {self.newcomer.seq})."
            case Status.REFUSED if event is not None:
                text = f"{at} was not there: event {event.seq} refused it{why}; it needed {event.n_bytes:,} bytes."
            case Status.UNREACHED if event is not None:
                text = (
                    f"{at} was not there: event {event.seq} planned it, but the request ended before it was captured."
                )
            case Status.UNPLANNED if event is not None:
                points = ", ".join(f"{p:,}" for p in event.points) or "nothing"
                text = f"{at} was not there: event {event.seq} computed past it and planned {points}."
            case _:
                text = f"{at}: the log says nothing about it."
        if self.status is not Status.PRESENT and self.nearest is not None:
            text += f" The deepest restore point below was {self.nearest:,}."
        return text


class Replay:
    """A log, folded.  ``faults`` lists where it contradicts itself; empty for a sound log.

    A log whose first number is not 1 (a ring that wrapped, a file that was cut) lacks what was
    admitted before: removals and touches of unknown checkpoints are then no faults, and byte sums
    are checked from the first event on.
    """

    def __init__(self, events: Iterable[CacheEvent]) -> None:
        self.events = tuple(events)
        self.faults: list[str] = []
        self.whole = not self.events or self.events[0].seq == 1
        self.latched = any(e.kind is EventKind.LATCH for e in self.events)
        self._up: dict[int, set[int]] = {}
        self._requests: dict[str, set[int]] = {}
        self._verify()
        self._link()

    @property
    def last_seq(self) -> int:
        return self.events[-1].seq if self.events else 0

    # -- the retained set ------------------------------------------------------------------------
    def retained(self, seq: int | None = None) -> dict[int, Retained]:
        """Checkpoints that were retained right after event ``seq`` (the last by default), by id."""
        found: dict[int, Retained] = {}
        for event in self.events:
            if seq is not None and event.seq > seq:
                break
            _apply(found, event)
        return found

    def total_bytes(self, seq: int | None = None) -> int:
        """Unique bytes of the retained set right after event ``seq``, as the log states them."""
        total = 0
        for event in self.events:
            if seq is not None and event.seq > seq:
                break
            if event.kind is not EventKind.LATCH:
                total = event.total_bytes
        return total

    def _verify(self) -> None:
        found: dict[int, Retained] = {}
        previous: CacheEvent | None = None
        total = 0
        for event in self.events:
            where = f"event {event.seq}"
            if previous is not None and event.seq != previous.seq + 1:
                self.faults.append(f"{where} follows {previous.seq}")
            known = event.checkpoint in found
            if event.kind is EventKind.ADMIT and known:
                self.faults.append(f"{where} admits checkpoint {event.checkpoint} twice")
            if event.kind in (EventKind.REMOVE, EventKind.TOUCH) and not known and self.whole:
                self.faults.append(f"{where}: {event.kind} of checkpoint {event.checkpoint}, which is not there")
            change = {EventKind.ADMIT: event.n_bytes, EventKind.REMOVE: -event.n_bytes}.get(event.kind, 0)
            if event.kind is not EventKind.LATCH:
                if (previous is not None or self.whole) and event.total_bytes != total + change:
                    self.faults.append(f"{where}: {event.total_bytes} bytes in all, {total + change} by the sum")
                total = event.total_bytes
            _apply(found, event)
            previous = event

    # -- conversations ---------------------------------------------------------------------------
    def _link(self) -> None:
        newest: dict[str, CacheEvent] = {}
        depth: dict[int, int] = {}
        for event in self.events:
            if event.checkpoint is None:
                continue
            if event.kind is EventKind.ADMIT:
                depth[event.checkpoint] = event.boundary
                above = self._up.setdefault(event.checkpoint, set())
                if event.parent is not None:
                    above.add(event.parent)
            if not event.request:
                continue
            mine = self._requests.setdefault(event.request, set())
            before = newest.get(event.request)
            if event.kind is EventKind.ADMIT:
                mine.add(event.checkpoint)
                if before is not None and before.checkpoint is not None and before.boundary < event.boundary:
                    self._up[event.checkpoint].add(before.checkpoint)
            # A rows-only state that was cut for the request is nothing the request extends.
            whole = depth.get(event.checkpoint) == event.boundary
            if event.kind in (EventKind.ADMIT, EventKind.RESTORE, EventKind.LOOKUP) and whole:
                newest[event.request] = event

    def lineage(self, checkpoint: int) -> frozenset[int]:
        """The checkpoint, all it extends and all that extends it, retained or not."""
        down: dict[int, set[int]] = {}
        for child, above in self._up.items():
            for parent in above:
                down.setdefault(parent, set()).add(child)
        return frozenset(_closure(checkpoint, self._up) | _closure(checkpoint, down))

    # -- why -------------------------------------------------------------------------------------
    def explain(self, boundary: int, *, checkpoint: int | None = None, seq: int | None = None) -> Explanation:
        """Why a restore point at ``boundary`` was (not) there right after event ``seq``.

        ``checkpoint`` names the conversation: any checkpoint of it.  Without it the newest decision
        about this boundary in any conversation answers.
        """
        at = self.last_seq if seq is None else seq
        line = None if checkpoint is None else self.lineage(checkpoint)
        requests = None if line is None else {r for r, ids in self._requests.items() if ids & line}

        def concerns(event: CacheEvent) -> bool:
            if line is None or event.checkpoint in line:
                return True
            return event.checkpoint is None and requests is not None and event.request in requests

        past = [e for e in self.events if e.seq <= at and concerns(e)]
        about = [e for e in past if _is_about(e, boundary)]
        status, decisive = _decide(past, about, boundary)
        here = self.retained(at)
        below = [r.boundary for r in here.values() if r.boundary < boundary and (line is None or r.checkpoint in line)]
        newcomer = None
        if status is Status.REMOVED and decisive is not None:
            later = (e for e in self.events if e.seq > decisive.seq)
            newcomer = next((e for e in later if e.kind is not EventKind.REMOVE), None)
            if newcomer is not None and newcomer.kind is not EventKind.ADMIT:
                newcomer = None
        return Explanation(boundary, at, status, decisive, newcomer, max(below, default=None), tuple(about))


def _apply(found: dict[int, Retained], event: CacheEvent) -> None:
    number = event.checkpoint
    if number is None:
        return
    if event.kind is EventKind.ADMIT:
        found[number] = Retained(
            number, event.boundary, event.origin, event.parent, event.n_bytes, event.seq, event.seq, 0
        )
    elif event.kind is EventKind.TOUCH and number in found:
        found[number] = replace(found[number], last_use_seq=event.seq, uses=found[number].uses + 1)
    elif event.kind is EventKind.REMOVE:
        found.pop(number, None)


def _closure(start: int, links: dict[int, set[int]]) -> set[int]:
    seen, pending = {start}, [start]
    while pending:
        for number in links.get(pending.pop(), ()):
            if number not in seen:
                seen.add(number)
                pending.append(number)
    return seen


_DECISIONS = (EventKind.ADMIT, EventKind.TOUCH, EventKind.REMOVE, EventKind.REFUSE)


def _is_about(event: CacheEvent, boundary: int) -> bool:
    if event.kind is EventKind.PLAN:
        return boundary in event.points
    return event.boundary == boundary and event.kind in (*_DECISIONS, EventKind.RESTORE)


def _decide(past: list[CacheEvent], about: list[CacheEvent], boundary: int) -> tuple[Status, CacheEvent | None]:
    """The newest decision; one that is still retained beats everything else."""
    present: dict[int | None, CacheEvent] = {}
    for event in about:
        if event.kind is EventKind.ADMIT:
            present[event.checkpoint] = event
        elif event.kind is EventKind.REMOVE:
            present.pop(event.checkpoint, None)
    if present:
        return Status.PRESENT, max(present.values(), key=lambda e: e.seq)
    for event in reversed(about):
        if event.kind is EventKind.REMOVE:
            return Status.REMOVED, event
        if event.kind is EventKind.REFUSE:
            return Status.REFUSED, event
        if event.kind is EventKind.PLAN:
            return Status.UNREACHED, event
    for event in reversed(past):
        if event.kind is EventKind.PLAN and event.boundary < boundary <= max(event.points, default=0):
            return Status.UNPLANNED, event
    return Status.UNKNOWN, None
