"""Which slot a request takes, and what must happen before it may run: pure choices over the tables.

Candidates come best first.  Each is checked again against the tables, token by token: a lookup may
be older than the last change, and a wrong reuse is the one mistake that is not allowed.

    live       continue in place (rows-only memories may first cut to the common prefix)
    ram, disk  into the slot that ``slot_rank`` puts first
    cold       likewise

A restore reads each full chunk from backing memory, or from another slot that still holds its
rows, or finds it in place already:

    rows   [ keep_rows: in place )[ chunk: FromBuffer )[ chunk: FromSlot )[ tail: FromBuffer )

Rejected: letting a short common prefix claim a long live history (a new conversation with the same
system prompt would destroy the last one while other slots stand empty).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from gufo_gguf.cache.checkpoints import Checkpoint, marks_before
from gufo_gguf.cache.chunks import Chunk, Residence
from gufo_gguf.cache.slots import Slot, SlotOffer, SlotState, mostly_kept, slot_rank
from gufo_gguf.cache.tables import Tables
from gufo_gguf.cache.types import (
    Candidate,
    ChunkId,
    FromBuffer,
    FromSlot,
    InputMark,
    Lookup,
    Piece,
    PromptView,
    RestorePlan,
    Tier,
    Tokens,
)


@dataclass(frozen=True, slots=True)
class Choice:
    """A slot and a start: live (``live`` True), restore (``plan``; ``checkpoint`` too when it is in RAM), or cold."""

    slot: Slot
    n_reused: int
    live: bool
    checkpoint: Checkpoint | None
    plan: RestorePlan | None
    keep_rows: int
    """Rows of the slot that stay; everything after them goes."""
    endangered: tuple[Chunk, ...]
    """To preserve first, ascending."""
    sources: tuple[int, ...]
    """Other slots whose rows the restore reads."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can start now; ``why`` is for the log."""

    why: str


def choose(t: Tables, prompt: PromptView, lookup: Lookup) -> Choice | Wait:
    """The best start that can be carried out now."""
    takeable = t.slots.takeable()
    if not takeable and not any(c.tier is Tier.LIVE for c in lookup.candidates):
        return Wait("every slot is busy")
    if prompt.read:
        for number, candidate in enumerate(lookup.candidates):
            if candidate.tier is Tier.LIVE:
                choice = _live(t, prompt, candidate, lookup.candidates[number + 1 :], takeable)
            elif candidate.tier is Tier.RAM:
                restored = _restore(t, prompt, candidate, takeable)
                if isinstance(restored, Wait):
                    return restored
                choice = restored
            else:
                choice = _from_disk(t, prompt, candidate, takeable)
            if choice is not None:
                return choice
    if not takeable:
        return Wait("every slot is busy")
    slot = min(takeable, key=lambda s: slot_rank(_offer(t, s, 0, 0)))
    return Choice(slot, 0, False, None, None, 0, tuple(t.chunks.endangered(slot.index, 0)), ())


def _from_disk(t: Tables, prompt: PromptView, candidate: Candidate, takeable: list[Slot]) -> Choice | None:
    """A whole restore out of files: the reader knows the pieces, the plan only names the checkpoint."""
    known = None if t.durable is None or candidate.checkpoint is None else t.durable.get(int(candidate.checkpoint))
    n = candidate.n_tokens
    if known is None or not takeable or (n != len(known.tokens) and not t.shape.rows_only):
        return None
    has_logits = known.has_logits and n == len(known.tokens)
    if n > t.n_ctx or not fits(prompt, known.scope, known.tokens, known.inputs, n, has_logits):
        return None
    slot = min(takeable, key=lambda s: slot_rank(_offer(t, s, 0, 0)))
    assert candidate.checkpoint is not None
    plan = RestorePlan(candidate.checkpoint, Tier.DISK, n, 0, (), None)
    return Choice(slot, n, False, None, plan, 0, tuple(t.chunks.endangered(slot.index, 0)), ())


def fits(
    prompt: PromptView, scope: str, tokens: Tokens, inputs: tuple[InputMark, ...], n_tokens: int, has_logits: bool
) -> bool:
    """The first n tokens of a history are exactly those of the prompt, inputs included, and leave work to do."""
    n_prompt = len(prompt.tokens)
    return (
        scope == prompt.scope
        and 0 < n_tokens <= len(tokens)
        and (n_tokens < n_prompt or (n_tokens == n_prompt and has_logits))
        and marks_before(inputs, n_tokens) == marks_before(prompt.inputs, n_tokens)
        and np.array_equal(tokens[:n_tokens], prompt.tokens[:n_tokens])
    )


def _offer(t: Tables, slot: Slot, keep_rows: int, n_reused: int) -> SlotOffer:
    endangered_rows = len(t.chunks.endangered(slot.index, keep_rows)) * t.shape.chunk_rows
    in_place = keep_rows > 0 and keep_rows + t.shape.chunk_rows > n_reused
    superseded = in_place and bool(slot.stable) and n_reused >= slot.stable[0]
    return SlotOffer(slot.index, slot.n_tokens, keep_rows, endangered_rows, slot.last_use_seq, superseded)


def _live(
    t: Tables, prompt: PromptView, candidate: Candidate, rest: tuple[Candidate, ...], takeable: list[Slot]
) -> Choice | None:
    if candidate.slot is None or not 0 <= candidate.slot < len(t.slots):
        return None
    slot, n = t.slots[candidate.slot], candidate.n_tokens
    if slot.state is not SlotState.IDLE or not slot.indexed:
        return None
    if not fits(prompt, slot.scope, slot.history.view(), slot.inputs, n, has_logits=False):
        return None
    if n == slot.n_tokens:
        return Choice(slot, n, True, None, None, n, (), ())
    if not t.shape.rows_only or slot.pins:
        return None
    if not mostly_kept(n, slot.n_tokens):
        # The cut would cost this history more than it gives.  Prefer a copy into another slot.
        equal = any(c.tier is Tier.RAM and c.n_tokens == n for c in rest)
        spare = any(s.n_tokens == 0 for s in takeable)
        if spare or (equal and len(takeable) > 1):
            return None
    return Choice(slot, n, True, None, None, n, tuple(t.chunks.endangered(slot.index, n)), ())


def _restore(t: Tables, prompt: PromptView, candidate: Candidate, takeable: list[Slot]) -> Choice | Wait | None:
    source = None if candidate.checkpoint is None else t.checkpoints.get(candidate.checkpoint)
    n = candidate.n_tokens
    if source is None or (n != source.n_tokens and not t.shape.rows_only):
        return None
    has_logits = source.parts.logits is not None and n == source.n_tokens
    if n > t.n_ctx or not fits(prompt, source.scope, source.tokens, source.inputs, n, has_logits):
        return None
    if not takeable:
        return Wait("every slot is busy")
    keep = {slot.index: _keep_rows(t, slot, source, n) for slot in takeable}
    slot = min(takeable, key=lambda s: slot_rank(_offer(t, s, keep[s.index], n)))
    keep_rows = keep[slot.index]
    endangered = tuple(t.chunks.endangered(slot.index, keep_rows))
    plan = plan_restore(t, source, n, slot.index, keep_rows, {chunk.id for chunk in endangered})
    if plan is None:
        return Wait("rows of the checkpoint are being moved")
    sources = sorted({p.source.slot for p in plan.pieces if isinstance(p.source, FromSlot)})
    return Choice(slot, n, False, source, plan, keep_rows, endangered, tuple(sources))


def _keep_rows(t: Tables, slot: Slot, source: Checkpoint, n_tokens: int) -> int:
    """Rows of the first n of a checkpoint that lie in the slot by inheritance: whole chunks, or all n."""
    rows = t.chunks.shared_prefix(slot.index, source.parts.chunks) * t.shape.chunk_rows
    if rows >= n_tokens:
        return n_tokens
    return rows


def plan_restore(
    t: Tables, source: Checkpoint, n_tokens: int, target: int, keep_rows: int, preserved: Collection[ChunkId]
) -> RestorePlan | None:
    """How to bring the first n tokens of a checkpoint into a slot that already holds keep_rows of them.

    ``preserved``: chunks that will have been copied to backing memory before.  None when rows lie
    only in a slot that is itself being prepared.
    """
    chunk_rows, parts = t.shape.chunk_rows, source.parts
    pieces: list[Piece] = []
    first = keep_rows
    while t.shape.row_bytes and first < n_tokens:
        index = first // chunk_rows
        if index == len(parts.chunks):
            if parts.tail is None:
                raise ValueError(f"checkpoint {source.id} has no rows beyond {first}")
            pieces.append(Piece(first, n_tokens - first, FromBuffer(parts.tail, parts.tail_rows)))
            break
        chunk = t.chunks.get(parts.chunks[index])
        n_rows = min(chunk_rows, n_tokens - first)
        if chunk.residence is Residence.RESIDENT or chunk.id in preserved:
            pieces.append(Piece(first, n_rows, FromBuffer(chunk.buffer, chunk_rows)))
        else:
            homes = [h for h in sorted(chunk.homes) if h != target and t.slots[h].state is not SlotState.PREPARING]
            if not homes:
                return None
            pieces.append(Piece(first, n_rows, FromSlot(homes[0])))
        first += n_rows
    logits = parts.logits if n_tokens == source.n_tokens else None
    return RestorePlan(
        source.id, Tier.RAM, n_tokens, keep_rows, tuple(pieces), parts.private, private_key=None, logits=logits
    )
