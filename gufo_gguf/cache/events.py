"""What the cache decided, as values: one event per decision, "no" included.

An event carries numbers and reasons, never prompt text or tokens: a log may be attached to a bug
report.  Which fields are set depends on the kind:

    lookup    boundary = tokens reused, common_prefix, tier; reason = miss reason ("" on a hit)
    plan      boundary = first token to compute, points = planned boundaries
    admit     checkpoint, boundary, origin, parent, n_bytes = newly charged unique bytes
    refuse    boundary, origin, n_bytes = bytes needed, reason
    touch     checkpoint, boundary; reason = what used it
    remove    checkpoint, boundary, n_bytes = freed unique bytes; reason = rank or fault
    restore   checkpoint or None (live), slot, boundary, tier; reason = "" or why it failed
    preserve  slot, n_bytes copied; reason = "spill", "overwrite", ...
    slot      slot, boundary = tokens in it; reason = what happened to it
    latch     reason = the broken invariant; the cache is off from here on

``total_bytes`` is the ledger's unique bytes after the event, so a replay can verify its sums.

Rejected: one class per kind (ten classes for one line of JSON each; a reader of the log meets one
shape anyway) and callbacks from policy into a logger.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from gufo_gguf.cache.types import Origin, Tier

FORMAT = 1
"""Version of the JSON form; a reader refuses a newer one."""

_logger = logging.getLogger(__name__)


class EventKind(StrEnum):
    LOOKUP = "lookup"
    PLAN = "plan"
    ADMIT = "admit"
    REFUSE = "refuse"
    TOUCH = "touch"
    REMOVE = "remove"
    RESTORE = "restore"
    PRESERVE = "preserve"
    SLOT = "slot"
    LATCH = "latch"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One decision; see the module docstring for what each kind fills in."""

    seq: int
    kind: EventKind
    reason: str = ""
    boundary: int = 0
    n_bytes: int = 0
    total_bytes: int = 0
    checkpoint: int | None = None
    parent: int | None = None
    """The deepest retained checkpoint this one extends: links the checkpoints of one conversation."""
    origin: Origin | None = None
    tier: Tier | None = None
    slot: int | None = None
    common_prefix: int = 0
    points: tuple[int, ...] = ()
    request: str = ""
    """The request's id, when the engine gave one."""


Sink = Callable[[CacheEvent], None]


class EventLog:
    """The newest events, and sinks that see every one.  Owner thread only.

    A sink that raises is dropped and logged once: a full disk under ``--cache-log`` must not fail
    a request.
    """

    def __init__(self, capacity: int = 4096, sinks: Iterable[Sink] = ()) -> None:
        self._ring: deque[CacheEvent] = deque(maxlen=capacity)
        self._sinks = list(sinks)
        self._seq = 0
        self.request = ""
        """Stamped on every event that names no request of its own."""

    @property
    def seq(self) -> int:
        """Sequence number of the newest event, 0 before the first."""
        return self._seq

    def emit(self, kind: EventKind, **values: Any) -> CacheEvent:
        """Append one event with the next sequence number; ``values`` are fields of CacheEvent."""
        self._seq += 1
        values.setdefault("request", self.request)
        event = CacheEvent(seq=self._seq, kind=kind, **values)
        self._ring.append(event)
        for sink in tuple(self._sinks):
            try:
                sink(event)
            except Exception:
                self._sinks.remove(sink)
                _logger.exception("a sink of cache events failed and was dropped; the in-memory log goes on")
        return event

    def newest(self, n: int | None = None) -> tuple[CacheEvent, ...]:
        """The newest n events (all that are kept by default), oldest first."""
        events = tuple(self._ring)
        return events if n is None else events[max(0, len(events) - n) :]

    def since(self, seq: int) -> tuple[CacheEvent, ...]:
        """Kept events with a number above ``seq``, oldest first."""
        return tuple(e for e in self._ring if e.seq > seq)


_DEFAULTS = {f.name: f.default for f in fields(CacheEvent)}


def encode(event: CacheEvent) -> str:
    """One line of JSON without a newline; fields at their default are left out."""
    values = {k: v for k, v in asdict(event).items() if v != _DEFAULTS[k]}
    return json.dumps({"v": FORMAT, **values}, separators=(",", ":"))


def decode(line: str | bytes) -> CacheEvent:
    """The event of one line.  ValueError names what is wrong; unknown fields are refused."""
    try:
        values = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a line of JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("an event is a JSON object")
    version = values.pop("v", None)
    if version != FORMAT:
        raise ValueError(f"event format {version!r} is not the {FORMAT} this version reads")
    unknown = values.keys() - _DEFAULTS.keys()
    if unknown:
        raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
    return _checked(values)


def decode_lines(lines: Iterable[str]) -> Iterator[CacheEvent]:
    """Events of a log file, line by line.

    A last line that was cut off by a crash is dropped; a bad line anywhere else is a ValueError
    with its number.
    """
    failed: tuple[int, ValueError] | None = None
    for number, line in enumerate(lines, 1):
        if failed is not None:
            break
        if not line.strip():
            continue
        try:
            event = decode(line)
        except ValueError as error:
            failed = (number, error)
            if line.endswith("\n"):
                break
            continue
        yield event
    else:
        return
    if failed is not None:
        raise ValueError(f"line {failed[0]}: {failed[1]}")


def _checked(values: dict[str, Any]) -> CacheEvent:
    """Types of untrusted values checked field by field."""
    converted = dict(values)
    for name, value in values.items():
        if name in ("kind", "origin", "tier"):
            converted[name] = {"kind": EventKind, "origin": Origin, "tier": Tier}[name](value)
        elif name in ("reason", "request"):
            if not isinstance(value, str):
                raise ValueError(f"{name} is not a string")
        elif name == "points":
            if not isinstance(value, list) or not all(type(p) is int for p in value):
                raise ValueError("points is not a list of integers")
            converted[name] = tuple(value)
        elif type(value) is not int:
            raise ValueError(f"{name} is not an integer")
    missing = {"seq", "kind"} - converted.keys()
    if missing:
        raise ValueError(f"missing fields: {', '.join(sorted(missing))}")
    return CacheEvent(**converted)
