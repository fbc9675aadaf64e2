"""Which checkpoints go first when RAM is short: a pure order over records, nothing else.

    retry -> cheap -> near-duplicate -> held -> idle -> reused        (first victim ... last victim)

* retry: kept only so that resending the same request is instant.
* cheap: its private state is more than ``cheap_factor`` times the rows it would restore, so it
  saves little prefill for what it costs.  Models without rows have no such checkpoints.
* near-duplicate: a superseded turn, that is one covered by a deeper checkpoint of its branch; and
  what is close to the checkpoint it extends (``gain`` tokens beyond it), so that losing it costs
  little: a covered grid, system or learned point below ``grid_step``, a leaf below ``learned_min``, the
  end of an answer beyond a stable boundary until somebody came back to it.
* held: an idle slot still holds this conversation, further on.  It makes room for a conversation that
  leaves its slot, and takes its place back when its own slot is taken (``parting.py``); for any other
  newcomer it counts like the rest.
* idle: nothing on its branch was used while one whole budget of bytes was admitted.
* reused: the rest.

Within a class: covered first, then never reused, then least recently used, then deepest, then
oldest id; so the order is total and equal inputs give equal lists.  Use of a checkpoint counts for
everything it extends.  A branch point takes the highest class found below it, so it outlives the
leaves of all its branches, because all may come back to it.  If nothing came back to it while one
whole budget of bytes was admitted, it is idle itself: it outlives idle leaves then, not those in use.

Thrashing turns the last rule round.  Conversations that take turns, one more of them than fit, lose
every one of their last copies under LRU, each just before it would have been used; giving up the most
recently used one again and again loses one of them and keeps the others.  So while requests keep
coming back to states that were evicted (``Thrash``), idle and reused are one class, *cycled*, whose
leaves go most recently used first.

The loop that evicts is the manager's: it takes the first victim and asks again if still short,
because one removal changes what is covered, a branch point or the last copy.

Rejected: one score in floating point (two runs of one log must agree, and a reader must be able to
say why), and idleness by wall clock (a machine that slept did not turn over its budget).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from gufo_gguf.cache.types import CacheLimits, CheckpointId, Origin


class Rank(IntEnum):
    """Classes of victims, first to go first; ``name.lower()`` is the reason of a removal."""

    RETRY = 0
    CHEAP = 1
    NEAR_DUPLICATE = 2
    HELD = 3
    IDLE = 4
    REUSED = 5
    CYCLED = 6
    """Idle and reused alike, while requests come back to what was evicted."""


class Thrash:
    """Did one of the last requests come back to a state that was evicted?"""

    WINDOW = 12

    def __init__(self) -> None:
        self._signs: deque[bool] = deque(maxlen=self.WINDOW)

    def note(self, *, lost: bool) -> None:
        """A request started; ``lost``: an evicted state would have served it much better."""
        self._signs.append(lost)

    @property
    def on(self) -> bool:
        return any(self._signs)


@dataclass(frozen=True, slots=True)
class RetentionRecord:
    """What retention knows of one retained checkpoint."""

    id: CheckpointId
    origin: Origin
    n_tokens: int
    private_bytes: int
    row_bytes: int
    """Bytes of all rows it would restore: n_tokens * bytes per row; 0 without rows."""
    last_use_seq: int
    """Sequence number of its admission or of its last touch."""
    admitted_bytes_at_last_use: int
    """The ledger's running total of admitted unique bytes at that time."""
    reuses: int
    covered: bool
    """``PrefixIndex.covered``."""
    branch_point: bool
    """``PrefixIndex.is_branch_point``."""
    family: Hashable
    """``PrefixIndex.family``."""
    parent: CheckpointId | None = None
    """``PrefixIndex.parent``: the deepest retained checkpoint it extends."""
    pinned: bool = False
    """Source of a running restore or write: never a victim."""
    after_anchor: bool = False
    """Its parent is a stable boundary."""
    held: bool = False
    """``PrefixIndex.held``: a slot holds what comes after it."""


@dataclass(frozen=True, slots=True)
class Victim:
    id: CheckpointId
    rank: Rank

    @property
    def reason(self) -> str:
        return self.rank.name.lower()


def victims_order(
    records: Iterable[RetentionRecord],
    admitted_bytes: int,
    budget: int,
    *,
    optional: bool,
    newcomer_family: Hashable,
    covers: CheckpointId | None = None,
    thrashing: bool = False,
    limits: CacheLimits | None = None,
) -> list[CheckpointId]:
    """All possible victims, first to go first; see ``rank_victims``."""
    ranked = rank_victims(
        records,
        admitted_bytes,
        budget,
        optional=optional,
        newcomer_family=newcomer_family,
        covers=covers,
        thrashing=thrashing,
        limits=limits,
    )
    return [v.id for v in ranked]


def rank_victims(
    records: Iterable[RetentionRecord],
    admitted_bytes: int,
    budget: int,
    *,
    optional: bool,
    newcomer_family: Hashable,
    covers: CheckpointId | None = None,
    thrashing: bool = False,
    limits: CacheLimits | None = None,
) -> list[Victim]:
    """All possible victims with the class that condemns them, first to go first.

    ``admitted_bytes``: running total of unique bytes ever admitted.  ``budget``: bytes that make a
    turnover.  ``optional``: room is wanted for a capture that is not required; the last useful copy
    of every family but ``newcomer_family`` is then left out.  Pinned records are always left out.
    ``covers``: what the newcomer will cover; it counts as covered already, and goes last of its class.
    """
    rules = limits or CacheLimits(ram_bytes=budget)
    known = [replace(r, covered=True) if r.id == covers else r for r in records]
    ordered = _order(known, admitted_bytes, budget, rules, covers, thrashing=thrashing)
    spared: set[CheckpointId] = set()
    if optional:
        last: dict[Hashable, CheckpointId] = {}
        for record, rank in ordered:
            if rank > Rank.NEAR_DUPLICATE and record.family != newcomer_family:
                last[record.family] = record.id
        spared = set(last.values())
    return [Victim(r.id, rank) for r, rank in ordered if not r.pinned and r.id not in spared]


@dataclass(slots=True)
class _Branch:
    """What is known of a checkpoint together with everything that extends it."""

    last_use_seq: int
    admitted_bytes_at_last_use: int
    reuses: int
    rank: Rank = Rank.RETRY


def _order(
    records: Sequence[RetentionRecord],
    admitted_bytes: int,
    budget: int,
    limits: CacheLimits,
    covers: CheckpointId | None,
    *,
    thrashing: bool,
) -> list[tuple[RetentionRecord, Rank]]:
    if limits.plain_lru:
        return [(r, Rank.IDLE) for r in sorted(records, key=lambda r: (r.last_use_seq, r.id))]
    by_id = {r.id: r for r in records}
    branches = {r.id: _Branch(r.last_use_seq, r.admitted_bytes_at_last_use, r.reuses) for r in records}
    deepest_first = sorted(records, key=lambda r: (-r.n_tokens, r.id))
    ranks: dict[CheckpointId, Rank] = {}
    for record in deepest_first:
        parent = by_id.get(record.parent) if record.parent is not None else None
        mine = branches[record.id]
        idle = admitted_bytes - mine.admitted_bytes_at_last_use >= budget
        gain = record.n_tokens - parent.n_tokens if parent is not None else None
        own = rank_of(record, idle=idle, gain=gain, limits=limits)
        if thrashing and own > Rank.HELD:
            own = Rank.CYCLED
        if record.branch_point:
            own = max(own, mine.rank)
            unused = admitted_bytes - record.admitted_bytes_at_last_use >= budget
            if unused and own is Rank.REUSED:
                own = Rank.IDLE
        ranks[record.id] = own
        if parent is not None:
            above = branches[parent.id]
            above.last_use_seq = max(above.last_use_seq, mine.last_use_seq)
            above.admitted_bytes_at_last_use = max(above.admitted_bytes_at_last_use, mine.admitted_bytes_at_last_use)
            above.reuses = max(above.reuses, mine.reuses)
            above.rank = max(above.rank, mine.rank, ranks[record.id])

    def key(record: RetentionRecord) -> tuple[Rank, bool, int, int, int, CheckpointId]:
        # covered only by what is not there yet: the last of its class, behind everything covered for long
        mine, rank = branches[record.id], ranks[record.id]
        last = record.branch_point or not record.covered or record.id == covers
        if rank is Rank.CYCLED and last:
            kept_by = 2 * record.branch_point + (mine.reuses > 0)
            return (rank, last, kept_by, -mine.last_use_seq, -record.n_tokens, record.id)
        return (rank, last, mine.reuses > 0, mine.last_use_seq, -record.n_tokens, record.id)

    return [(r, ranks[r.id]) for r in sorted(records, key=key)]


def rank_of(record: RetentionRecord, *, idle: bool, gain: int | None, limits: CacheLimits) -> Rank:
    """The class of one checkpoint on its own.

    ``gain``: tokens it restores beyond the checkpoint it extends; None when it extends none.
    """
    if record.origin is Origin.RETRY:
        return Rank.RETRY
    if record.row_bytes > 0 and record.private_bytes > limits.cheap_factor * record.row_bytes:
        return Rank.CHEAP
    for_edits = record.origin in (Origin.GRID, Origin.SYSTEM, Origin.LEARNED)
    near = limits.grid_step if record.covered else limits.learned_min
    close = gain is not None and gain < near and not record.branch_point
    unproven = record.origin is Origin.PARTING and record.after_anchor and record.reuses == 0
    if close or unproven or (record.covered and not for_edits):
        return Rank.NEAR_DUPLICATE
    if record.held and not record.branch_point:
        return Rank.HELD
    return Rank.IDLE if idle else Rank.REUSED
