"""The words the cache, the backends and the engine share: components, requests, plans.

Everything here is a frozen value.  ``cache/`` returns plans built from these, the engine carries
them out against a backend, and tells the manager afterwards that a plan was done or abandoned.

Ranges are half-open row ranges of one slot: row ``j`` holds the state of token ``j``.

    0 ........ 256 ........ 512 ...... boundary
    [ chunk 0 )[  chunk 1  )[   tail   )            chunk_rows = 256; the tail has < 256 rows
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
"""A 1-D array of token ids; treated as read-only wherever it is handed over."""

BufferId = NewType("BufferId", int)
"""A piece of backing RAM.  The cache only names it; the engine's memory pool holds the bytes."""

ChunkId = NewType("ChunkId", int)
CheckpointId = NewType("CheckpointId", int)


class ComponentKind(StrEnum):
    ROWS = "rows"
    """Append-only: one row per token, never changed once written."""
    PRIVATE = "private"
    """A summary valid at exactly one position, copied whole."""


@dataclass(frozen=True, slots=True)
class Component:
    """One piece of model state, as the backend inventories it."""

    id: str
    kind: ComponentKind
    dtype: str
    n_bytes: int
    """Bytes per row for ROWS, bytes in all for PRIVATE."""
    layout: int
    """Version of the byte layout; a payload of another version is refused."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """All components of one context, in the order in which they are packed."""

    memory: str
    """The memory kind: kv, hybrid, hybrid_idx, recurrent, iswa."""
    components: tuple[Component, ...]

    @property
    def row_bytes(self) -> int:
        return sum(c.n_bytes for c in self.components if c.kind is ComponentKind.ROWS)

    @property
    def private_bytes(self) -> int:
        return sum(c.n_bytes for c in self.components if c.kind is ComponentKind.PRIVATE)

    @property
    def rows_only(self) -> bool:
        """Without private state every row is a restore point: histories may be cut anywhere."""
        return self.private_bytes == 0 and self.row_bytes > 0


@dataclass(frozen=True, slots=True)
class StateShape:
    """The sizes the cache counts with; all it knows of a model."""

    row_bytes: int
    private_bytes: int
    logits_bytes: int
    chunk_rows: int = 256

    @property
    def rows_only(self) -> bool:
        return self.private_bytes == 0 and self.row_bytes > 0

    @property
    def chunk_bytes(self) -> int:
        return self.row_bytes * self.chunk_rows

    @property
    def private_rows(self) -> int:
        """How many rows take as much as a private state; without rows more than any prompt has."""
        return -(-self.private_bytes // self.row_bytes) if self.row_bytes else 1 << 40


class Tier(StrEnum):
    LIVE = "live"
    RAM = "ram"
    DISK = "disk"


class Origin(StrEnum):
    """Why a checkpoint was captured."""

    PROMPT = "prompt"
    """The stable boundary, or the prompt end where no stable boundary exists."""
    RETRY = "retry"
    """The prompt end beyond a stable boundary, with its next-token logits."""
    REUSED_END = "reused_end"
    GRID = "grid"
    SYSTEM = "system"
    """The end of tools and system prompt, where a first turn parts from other conversations' first turns."""
    LEARNED = "learned"
    FRONTIER = "frontier"
    """The live frontier, because a caller (Python API) asks for it or the server stops."""
    PARTING = "parting"
    """The live frontier of a slot that another conversation takes over."""


BY_WORTH = (
    Origin.RETRY,
    Origin.GRID,
    Origin.PARTING,
    Origin.REUSED_END,
    Origin.FRONTIER,
    Origin.SYSTEM,
    Origin.LEARNED,
    Origin.PROMPT,
)
"""Ascending: where origins meet at one boundary the later one names the checkpoint, since it is kept longer."""


class MissReason(StrEnum):
    NO_CHECKPOINT = "no_checkpoint"
    PREFIX_CHANGED = "prefix_changed"
    INPUT_CHANGED = "input_changed"
    IDENTITY = "identity"
    EVICTED = "evicted"
    QUARANTINED = "quarantined"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class InputMark:
    """A non-text input (an image) whose placeholder tokens start at ``position``."""

    position: int
    digest: str


@dataclass(frozen=True, slots=True)
class PromptView:
    """One request as the cache sees it.

    ``scope`` is the state identity (model, weights, template, KV types, …) plus, where entries are
    isolated per API key, the key's digest: histories of different scopes never meet.
    ``stable`` holds the stable boundaries, ascending, each in (0, len(tokens)].  ``system_end``: how many
    leading tokens any conversation with the same tools and system prompt begins with; 0: not known.
    """

    scope: str
    tokens: Tokens
    stable: tuple[int, ...] = ()
    system_end: int = 0
    inputs: tuple[InputMark, ...] = ()
    read: bool = True
    """May reuse cached state."""
    write: bool = True
    """May leave checkpoints behind."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place to start from: the first ``n_tokens`` of the prompt need no evaluation."""

    tier: Tier
    n_tokens: int
    checkpoint: CheckpointId | None
    """None for a live frontier."""
    slot: int | None
    """The slot of a live frontier, else None."""
    has_logits: bool = False
    """True: usable at n_tokens == len(prompt), nothing left to evaluate."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Everything one walk of the index found; writing nothing."""

    candidates: tuple[Candidate, ...]
    """All usable, best first: deepest, then live > RAM > disk."""
    common_prefix: int
    """Longest common prefix of the prompt with any known history, in tokens."""
    reason: MissReason | None
    """Why there is no candidate; None when there is one."""

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to run in a slot.  A lease of an older generation is refused everywhere."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Preserve rows: copy [first_row, first_row + n_rows) of a slot into a backing buffer."""

    chunk: ChunkId
    slot: int
    first_row: int
    n_rows: int
    dst: BufferId


@dataclass(frozen=True, slots=True)
class FromBuffer:
    """Rows of a piece lie packed in ``buffer``; the buffer holds ``buffer_rows`` rows per component."""

    buffer: BufferId
    buffer_rows: int


@dataclass(frozen=True, slots=True)
class FromSlot:
    """Rows of a piece still lie in another slot, at the same row numbers."""

    slot: int


@dataclass(frozen=True, slots=True)
class FromDisk:
    """Rows of a piece lie in a published chunk file."""

    key: str
    buffer_rows: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Put rows [first_row, first_row + n_rows) in place; they are the first n_rows of the source."""

    first_row: int
    n_rows: int
    source: FromBuffer | FromSlot | FromDisk


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Bring a checkpoint into the leased slot.

    0 ......... keep_rows ......... n_tokens
    [ already in )[  pieces, in order  )
    """

    checkpoint: CheckpointId
    tier: Tier
    n_tokens: int
    keep_rows: int
    """Rows the slot already holds by inheritance: they stay, everything after them goes."""
    pieces: tuple[Piece, ...]
    private: BufferId | None
    private_key: str | None = None
    """Disk key of the private file when the state is not in RAM."""
    logits: BufferId | None = None


class ReuseSource(StrEnum):
    NONE = "none"
    LIVE = "live"
    RAM = "ram"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Admission:
    """A slot for a request and what must happen before it may run, in this order."""

    lease: Lease
    source: ReuseSource
    n_reused: int
    """Tokens of the prompt that are in place once preserve and restore are carried out."""
    preserve: tuple[RowCopy, ...]
    truncate_to: int | None
    """Rows to keep of what lies in the slot: None = untouched (continue in place), 0 = clear.
    Set together with ``restore`` only as ``restore.keep_rows``."""
    restore: RestorePlan | None


@dataclass(frozen=True, slots=True)
class CapturePoint:
    """A boundary at which the request should leave a checkpoint; origins that met here."""

    boundary: int
    origin: Origin
    required: bool
    """Required points are exact; optional ones (grid, learned) yield to other families' last copies."""
    want_logits: bool = False


@dataclass(frozen=True, slots=True)
class CaptureTicket:
    """A reserved capture: fill the buffers, then commit or abandon.

    The boundary is the slot's position now.  Full chunks are borrowed and need no copy;
    rows [tail_first, boundary) go into ``tail``.
    """

    checkpoint: CheckpointId
    lease: Lease
    point: CapturePoint
    private: BufferId | None
    tail: BufferId | None
    tail_first: int
    logits: BufferId | None
    new_bytes: int


@dataclass(frozen=True, slots=True)
class CaptureRefused:
    """No checkpoint, and why; the request goes on."""

    point: CapturePoint
    reason: str
    need_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Numbers of the cache; the defaults are the article's."""

    ram_bytes: int
    max_checkpoints: int = 128
    chunk_rows: int = 256
    grid_step: int = 2048
    grid_max: int = 4
    grid_end_margin: int = 128
    """No grid point this close to the prompt end; a grid point moves to a pass end this close."""
    learned_min: int = 512
    learned_merge: int = 64
    cheap_factor: int = 8
    plain_lru: bool = False
    """Evict by last use alone, without ranks: for measuring what they earn (``engine/ablation.py``)."""
    parting: bool = True
    """Capture a conversation's live end when its slot is taken; off for measuring only."""


@dataclass(slots=True)
class RequestReport:
    """What the cache did for one request; becomes ``usage.gufo``."""

    reuse_source: ReuseSource = ReuseSource.NONE
    restored_tokens: int = 0
    prefilled_tokens: int = 0
    common_prefix_tokens: int = 0
    miss_reason: MissReason | None = None
    restore_ms: float = 0.0
    capture_ms: float = 0.0
    shared_prefix_wait_ms: float = 0.0
    captured: list[tuple[int, str]] = field(default_factory=list)
    """(boundary, origin) of every checkpoint this request left."""
