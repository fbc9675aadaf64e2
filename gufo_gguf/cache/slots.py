"""Slots: whose history lies where, who may run there, and which slot a request takes.

    IDLE ──acquire──► PREPARING ──ready──► RUNNING ──release──► IDLE (live frontier usable)
      ▲                   │ abandon: empty, still leased          │
      └───────────────────┴──────────── fail_slot: empty ─────────┘

Every acquire starts a new *generation*; a lease of an older one is refused everywhere, so a late
result cannot touch what came after it.

Histories grow in place and are never rewritten: a checkpoint keeps a view of the first n tokens
of its slot's array instead of a copy.  A rewind moves the slot to a new array.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from gufo_gguf.cache.types import CheckpointId, InputMark, Lease, Tokens


class SlotState(StrEnum):
    IDLE = "idle"
    PREPARING = "preparing"
    RUNNING = "running"


class History:
    """Tokens of one computation, append-only.  Views handed out stay valid for ever."""

    __slots__ = ("_array", "_n")

    def __init__(self, tokens: Tokens | None = None) -> None:
        n = 0 if tokens is None else len(tokens)
        self._array = np.empty(max(64, n), dtype=np.int32)
        self._n = n
        if tokens is not None:
            self._array[:n] = tokens

    def __len__(self) -> int:
        return self._n

    def append(self, tokens: Tokens) -> None:
        n = self._n + len(tokens)
        if n > len(self._array):
            grown = np.empty(max(n, 2 * len(self._array)), dtype=np.int32)
            grown[: self._n] = self._array[: self._n]
            self._array = grown
        self._array[self._n : n] = tokens
        self._n = n

    def view(self, n: int | None = None) -> Tokens:
        """The first n tokens (all when None), read-only."""
        if n is not None and n > self._n:
            raise ValueError(f"{n} tokens of a history of {self._n}")
        view = self._array[: self._n if n is None else n]
        view.flags.writeable = False
        return view


@dataclass(slots=True)
class Slot:
    index: int
    generation: int = 0
    state: SlotState = SlotState.IDLE
    history: History = field(default_factory=History)
    scope: str = ""
    inputs: tuple[InputMark, ...] = ()
    stable: tuple[int, ...] = ()
    """Stable boundaries of the request that runs, or ran last."""
    required: tuple[int, ...] = ()
    """Boundaries at which the running request must leave a checkpoint, ascending."""
    write: bool = True
    """May leave state behind: checkpoints, and a live frontier on release."""
    indexed: bool = False
    """The live frontier is in the prefix index."""
    anchor: CheckpointId | None = None
    anchor_tokens: int = 0
    """The deepest checkpoint on this slot's own path (captured here, or restored): at its boundary
    the slot's state is that checkpoint's, byte for byte.  It may have been removed since."""
    last_use_seq: int = 0
    reuses: int = 0
    """How often requests came back to this conversation, as far as it is known."""
    pins: int = 0
    """Running restores that read rows of this slot: it must not be overwritten."""

    @property
    def n_tokens(self) -> int:
        return len(self.history)

    @property
    def lease(self) -> Lease:
        return Lease(self.index, self.generation)

    def at_checkpoint(self) -> CheckpointId | None:
        """The checkpoint whose state the slot holds exactly now."""
        return self.anchor if self.anchor is not None and self.anchor_tokens == self.n_tokens else None

    @property
    def at_anchor_boundary(self) -> bool:
        """Does the slot stand at the boundary that outlasts its request's turn?"""
        return bool(self.stable) and self.n_tokens == self.stable[0]

    def set_anchor(self, checkpoint: CheckpointId | None, n_tokens: int) -> None:
        self.anchor, self.anchor_tokens = checkpoint, n_tokens if checkpoint is not None else 0

    def empty(self) -> None:
        """Forget the content; rows and index are the caller's business."""
        self.history = History()
        self.scope, self.inputs, self.stable, self.required, self.write = "", (), (), (), True
        self.reuses = 0
        self.set_anchor(None, 0)


class SlotTable:
    def __init__(self, n_slots: int) -> None:
        self._slots = [Slot(i) for i in range(n_slots)]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __getitem__(self, slot: int) -> Slot:
        return self._slots[slot]

    def __len__(self) -> int:
        return len(self._slots)

    def leased(self, lease: Lease) -> Slot | None:
        """The slot of a valid lease; None for a stale one."""
        if not 0 <= lease.slot < len(self._slots):
            return None
        slot = self._slots[lease.slot]
        if slot.generation != lease.generation or slot.state is SlotState.IDLE:
            return None
        return slot

    def find(self, which: Lease | int) -> Slot | None:
        """The slot of a valid lease, or of a number; None for a stale lease or an unknown number."""
        if isinstance(which, Lease):
            return self.leased(which)
        return self._slots[which] if 0 <= which < len(self._slots) else None

    def takeable(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.state is SlotState.IDLE and not slot.pins]


@dataclass(frozen=True, slots=True)
class SlotOffer:
    """What taking a slot for a request would mean; ``slot_rank`` orders offers, smallest first."""

    slot: int
    n_tokens: int
    """Tokens of the history that would be overwritten from keep_rows on."""
    keep_rows: int
    """Rows of the wanted checkpoint that lie in place by inheritance."""
    endangered_rows: int
    """Rows to preserve before the slot may be overwritten."""
    last_use_seq: int
    superseded: bool = False
    """The request goes on from the slot's own last prompt, only its reply was changed: what would be
    overwritten is a reply that the client no longer sends."""


def mostly_kept(keep_rows: int, n_tokens: int) -> bool:
    """A history of n tokens loses little when cut to keep_rows: at most a quarter of what stays.

    True for an edit or a stripped reasoning near the end of the conversation that lies in the slot;
    false for a subagent that forks early off a long parent, which should live on.
    """
    return keep_rows > 0 and 4 * (n_tokens - keep_rows) <= keep_rows


def slot_rank(offer: SlotOffer) -> tuple[int, int, int]:
    """Order of slots for a request that does not simply continue one of them.

    0 the slot that this request supersedes, or that holds nearly nothing but the wanted rows; 1 an
    empty slot; 2 a slot whose rows are preserved; 3 one that needs preserving first.  Then least
    recently used, then by number.
    """
    if offer.superseded or mostly_kept(offer.keep_rows, offer.n_tokens):
        tier = 0
    elif offer.n_tokens == 0:
        tier = 1
    elif offer.endangered_rows == 0:
        tier = 2
    else:
        tier = 3
    return tier, offer.last_use_seq, offer.slot
