"""The contract between the engine and whatever computes: llama.cpp, or the fake.

A backend owns ``n_slots`` independent sequences ("slots").  Row ``j`` of a slot is the state of
token ``j``; rows are append-only.  All calls come from one thread, the owner thread.

A chunk of rows [first, first + n) is *packed*: component after component in inventory order, each
with its n rows contiguous.  Loading may take the first n rows of a larger packed buffer:

    buffer of B rows:   [ comp 0: B rows ][ comp 1: B rows ] ...
    load n <= B rows:   [ n ]             [ n ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gufo_gguf.cache.types import Inventory, Tokens

Bytes = npt.NDArray[np.uint8]
"""A contiguous 1-D buffer of bytes."""
Logits = npt.NDArray[np.float32]
"""(n_vocab,) next-token logits."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens to evaluate next in one slot, at its current position."""

    slot: int
    tokens: Tokens
    want_logits: bool
    """Ask for the logits after the last token."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What a backend is; everything that decides whether two states may be mixed is in ``identity``."""

    identity: str
    """Digest over weights, tokenizer, template, KV types, rope settings, layout, build and device
    kind, ubatch size; not over context size, slot count, port or alias."""
    model_name: str
    arch: str
    device: str
    n_ctx: int
    """Tokens per slot."""
    n_ctx_train: int
    n_slots: int
    n_batch: int
    n_ubatch: int
    n_vocab: int
    memory: str
    inventory: Inventory | None
    """None: this memory kind cannot be saved exactly; ``uncacheable`` says why."""
    uncacheable: str | None
    n_params: int
    model_bytes: int


class Backend(Protocol):
    info: BackendInfo

    # -- running ---------------------------------------------------------------------------------
    def decode(self, spans: Sequence[Span]) -> None:
        """Evaluate all spans in one pass (sum of tokens <= n_batch, one span per slot, slots ascending).

        Raises ContextFull (nothing was changed) and SlotNotReady (a slot is being restored).
        """
        ...

    def logits(self, slot: int) -> Logits:
        """Logits after the slot's last token of the last decode, a copy; BackendError if not asked for."""
        ...

    def position(self, slot: int) -> int:
        """Number of tokens in the slot, by the backend's own count (every component agrees)."""
        ...

    def truncate(self, slot: int, n_tokens: int) -> None:
        """Keep the first n tokens.  n = 0 always works; n > 0 only for rows-only memories."""
        ...

    # -- state out -------------------------------------------------------------------------------
    def rows_out(self, slot: int, first: int, n: int, out: Bytes) -> None:
        """Copy rows packed into out; len(out) >= n * row_bytes."""
        ...

    def pieces_out(self, slot: int, pieces: Sequence[tuple[int, int, Bytes]]) -> None:
        """``rows_out`` of many (first, n, out) at once; after an error any of them may be half written."""
        ...

    def private_out(self, slot: int, out: Bytes) -> None:
        """Copy the private state at the current position into out."""
        ...

    # -- state in --------------------------------------------------------------------------------
    def begin_restore(self, slot: int, tokens: Tokens, keep_rows: int = 0, *, trusted: bool = False) -> None:
        """Make the slot non-executable and announce its state after ``tokens``.

        The first keep_rows rows stay as they are (they must be the rows of these tokens by
        inheritance); all others go.  ``trusted``: the payloads are what this backend gave out and
        were guarded since; otherwise they are searched for NaN.
        """
        ...

    def load_rows(self, slot: int, first: int, n: int, buffer: Bytes, buffer_rows: int) -> None:
        """Put the first n rows of a packed buffer of buffer_rows rows at [first, first + n)."""
        ...

    def load_pieces(self, slot: int, pieces: Sequence[tuple[int, int, Bytes, int]]) -> None:
        """Many (first, n, buffer, buffer_rows), ascending.

        The copies may only be queued: the buffers stay as they are until finish or abort.
        """
        ...

    def load_private(self, slot: int, buffer: Bytes) -> None: ...

    def load_row_bytes(self, slot: int, first: int, n: int, buffer_rows: int, offset: int, data: Bytes) -> None:
        """Bytes [offset, offset + len(data)) of a packed piece, ascending without gaps; copied on return.

        For reading through a small buffer before a checksum is known: abort_restore zeroes them.
        """
        ...

    def load_private_bytes(self, slot: int, offset: int, data: Bytes) -> None:
        """The same for the private state."""
        ...

    def finish_restore(self, slot: int) -> None:
        """Check that every component is complete and at the same boundary; then the slot may run.

        Raises StateRejected; the slot is then empty and usable.
        """
        ...

    def abort_restore(self, slot: int) -> None:
        """Give up a restore (or anything else in doubt): the slot is empty and usable."""
        ...

    # -- memory ----------------------------------------------------------------------------------
    def alloc(self, n_bytes: int) -> Bytes:
        """Host memory fit for transfers (pinned where the device has such); freed with its last view."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...
