"""The one checker: recount every reference and byte, and compare the tables with each other.

Used as the invariant of the state machines, at idle, in strict mode and by ``gufo cache check``.
It reads the tables' own records and trusts no sum that they keep.  An empty list means fine; each
finding is one sentence with both numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from gufo_gguf.cache.captures import OpenCapture
from gufo_gguf.cache.checkpoints import Parts
from gufo_gguf.cache.chunks import Residence
from gufo_gguf.cache.ledger import Account
from gufo_gguf.cache.slots import SlotState
from gufo_gguf.cache.tables import Tables
from gufo_gguf.cache.types import BufferId, CheckpointId, ChunkId

if TYPE_CHECKING:
    from gufo_gguf.cache.occupancy import Pending


def check_all(
    t: Tables, captures: Mapping[CheckpointId, OpenCapture], pending: Mapping[int, Pending], *, cheap: bool = False
) -> list[str]:
    """Every check; see the module docstring.  ``cheap``: leave out what grows with the tokens."""
    holders = [(f"checkpoint {c.id}", c.n_tokens, c.parts) for c in t.checkpoints.all()]
    holders += [(f"leaving checkpoint {c.id}", c.n_tokens, c.parts) for c in t.checkpoints.leaving.values()]
    holders += [(f"capture {c.ticket.checkpoint}", len(c.tokens), c.parts) for c in captures.values()]
    found: list[str] = []
    found += _chunks(t, holders, pending)
    found += _bytes(t, holders)
    found += _checkpoints(t, holders)
    found += _slots(t, pending)
    if not cheap:
        found += _paths(t)
        found += t.index.check()
    return found


def _chunks(t: Tables, holders: list[tuple[str, int, Parts]], pending: Mapping[int, Pending]) -> Iterator[str]:
    refs: Counter[ChunkId] = Counter()
    for _, _, parts in holders:
        refs.update(parts.chunks)
    for p in pending.values():
        refs.update(p.held)
    leaving = Counter(chunk for c in t.checkpoints.leaving.values() for chunk in c.parts.chunks)
    for chunk in t.chunks.all():
        if chunk.refs != refs[chunk.id]:
            yield f"chunk {chunk.id} counts {chunk.refs} references; {refs[chunk.id]} exist"
        homes = {s.index for s in t.slots if t.chunks.at(s.index, chunk.index) == chunk.id}
        if homes != chunk.homes:
            yield f"chunk {chunk.id} has homes {sorted(chunk.homes)}; it lies in slots {sorted(homes)}"
        needed = chunk.refs > leaving[chunk.id]
        if needed and (chunk.residence is Residence.LOST or (chunk.residence is Residence.BORROWED and not homes)):
            yield f"chunk {chunk.id} is {chunk.residence} and lies nowhere"
    for chunk_id in refs:
        if chunk_id not in t.chunks:
            yield f"chunk {chunk_id} is referenced and does not exist"


def _bytes(t: Tables, holders: list[tuple[str, int, Parts]]) -> Iterator[str]:
    buffers: Counter[BufferId] = Counter()
    sums = dict.fromkeys(Account, 0)
    expected: dict[BufferId, int] = {}
    for chunk in t.chunks.all():
        buffers[chunk.buffer] += 1
        expected[chunk.buffer] = t.shape.chunk_bytes
        sums[Account.CHUNKS] += t.shape.chunk_bytes
    for _, _, parts in holders:
        for account, buffer, n_bytes in (
            (Account.PRIVATE, parts.private, t.shape.private_bytes),
            (Account.TAIL, parts.tail, parts.tail_rows * t.shape.row_bytes),
            (Account.LOGITS, parts.logits, t.shape.logits_bytes),
        ):
            if buffer is not None:
                buffers[buffer] += 1
                expected[buffer] = n_bytes
                sums[account] += n_bytes
    for buffer, uses in buffers.items():
        if uses > 1:
            yield f"buffer {buffer} is used {uses} times"
    if expected != t.buffers.in_use():
        yield f"buffers in use differ from those of chunks and parts: {expected.items() ^ t.buffers.in_use().items()}"
    for account, n_bytes in sums.items():
        if t.ledger.held_on(account) != n_bytes:
            yield f"the ledger holds {t.ledger.held_on(account)} bytes of {account}; {n_bytes} exist"
    if t.ledger.open_reservations():
        yield f"{t.ledger.open_reservations()} reservations were left open"
    if t.ledger.used_bytes > t.ledger.budget_bytes:
        yield f"{t.ledger.used_bytes} bytes are used of a budget of {t.ledger.budget_bytes}"
    unique = {chunk for c in t.checkpoints.all() for chunk in c.parts.chunks}
    own = sum(t.buffers.size(b) for c in t.checkpoints.all() for b in _own(c.parts))
    total = own + len(unique) * t.shape.chunk_bytes
    if t.checkpoints.unique_bytes != total:
        yield f"the retained set counts {t.checkpoints.unique_bytes} bytes; it is {total}"


def _own(parts: Parts) -> list[BufferId]:
    return [b for b in (parts.private, parts.tail, parts.logits) if b is not None]


def _checkpoints(t: Tables, holders: list[tuple[str, int, Parts]]) -> Iterator[str]:
    n_counted = len(holders) - len(t.checkpoints.leaving)
    if n_counted > t.limits.max_checkpoints:
        yield f"{n_counted} checkpoints and captures; at most {t.limits.max_checkpoints} are allowed"
    for name, n_tokens, parts in holders:
        places = [t.chunks.get(c).index for c in parts.chunks if c in t.chunks]
        if places != list(range(t.full_chunks(n_tokens))):
            yield f"{name} at {n_tokens} has chunks of places {places}"
        if parts.tail_rows != t.tail_rows(n_tokens) or (parts.tail is None) != (parts.tail_rows == 0):
            yield f"{name} at {n_tokens} has a tail of {parts.tail_rows} rows in buffer {parts.tail}"
        if (parts.private is None) != (t.shape.private_bytes == 0):
            yield f"{name} has private state in buffer {parts.private}"


def _slots(t: Tables, pending: Mapping[int, Pending]) -> Iterator[str]:
    pins = Counter(source for p in pending.values() for source in p.sources)
    for slot in t.slots:
        if (slot.state is SlotState.PREPARING) != (slot.index in pending):
            yield f"slot {slot.index} is {slot.state}; admissions are open in {sorted(pending)}"
        if slot.pins != pins[slot.index]:
            yield f"slot {slot.index} counts {slot.pins} pins; {pins[slot.index]} exist"
        if slot.indexed and slot.state is not SlotState.IDLE:
            yield f"slot {slot.index} is {slot.state} and in the index"
        if slot.n_tokens > t.n_ctx:
            yield f"slot {slot.index} holds {slot.n_tokens} tokens of {t.n_ctx}"
        row_map = t.chunks.row_map(slot.index)
        if slot.state is not SlotState.PREPARING and len(row_map) > t.full_chunks(slot.n_tokens):
            yield f"slot {slot.index} maps {len(row_map)} chunks with {slot.n_tokens} tokens"
        for index, chunk_id in enumerate(row_map):
            if chunk_id is not None and t.chunks.get(chunk_id).index != index:
                yield f"slot {slot.index} has chunk {chunk_id} at place {index}"
    counts = Counter(p.checkpoint.id for p in pending.values() if p.checkpoint is not None)
    if t.durable is not None:
        counts.update(t.durable.pinned())
    for c in [*t.checkpoints.all(), *t.checkpoints.leaving.values()]:
        if c.pins != counts[c.id]:
            yield f"checkpoint {c.id} counts {c.pins} pins; {counts[c.id]} exist"


def _paths(t: Tables) -> Iterator[str]:
    for slot in t.slots:
        anchor = None if slot.anchor is None else t.checkpoints.get(slot.anchor)
        if anchor is None or slot.state is SlotState.PREPARING:
            continue
        same = np.array_equal(anchor.tokens, slot.history.view()[: anchor.n_tokens])
        if anchor.n_tokens != slot.anchor_tokens or not same:
            yield f"slot {slot.index} is not on the path of its checkpoint {slot.anchor}"
