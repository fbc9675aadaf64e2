"""A conversation's live state is captured when another conversation takes its slot.

A request leaves checkpoints within its prompt only; the answer, which is part of what the client sends
next, lies in the slot alone.  That costs nothing while the slot stays; the moment to keep it is when
it is about to be overwritten:

    slot   [ prompt )[ answer )            taken by another conversation
           kept ^             ^ captured here

It is wanted as far as it is worth.  Below ``learned_min`` tokens beyond what is retained of its history,
or where a stable boundary is known (a template may drop from the answer what lies in the slot), it may
only displace near-duplicates: mostly what it covers itself.  Where nothing else is left of its
conversation it takes the place of copies of conversations that other slots hold (``Rank.HELD``), so
that a slot counts as room for one conversation more; and, if somebody came back to it before, that of
any last copy.

A server that stops parts from all its slots at once (``reserve_end``).  What it keeps there is for the disk
and may displace nothing but near-duplicates; beside a stable boundary not even those, since what they hold
is then as likely to come back.

Rejected: capturing at the end of every answer (a private state per turn, of no use to a conversation
that goes on in its slot), and in idle time (the same).
"""

from __future__ import annotations

from gufo_gguf.cache.admission import Choice, Wait, choose
from gufo_gguf.cache.captures import Captures
from gufo_gguf.cache.checkpoints import marks_before
from gufo_gguf.cache.retention import Rank
from gufo_gguf.cache.slots import Slot
from gufo_gguf.cache.tables import Tables
from gufo_gguf.cache.types import CapturePoint, CaptureTicket, Lookup, Origin, PromptView, Tier


def reserve_parting(t: Tables, captures: Captures, prompt: PromptView, lookup: Lookup) -> CaptureTicket | None:
    """See ``CacheManager.reserve_parting``."""
    if not t.limits.parting:
        return None
    choice = choose(t, prompt, lookup)
    if isinstance(choice, Wait) or not overwrites(choice):
        return None
    slot = choice.slot
    at_most = worth(t, slot)
    if at_most is None:
        return None
    source = choice.checkpoint
    if source is not None:  # what the request will restore is no victim
        t.checkpoints.pin(source)
    ticket = captures.reserve(slot, CapturePoint(slot.n_tokens, Origin.PARTING, required=True), at_most)
    if source is not None:
        t.checkpoints.unpin(source)
    return ticket if isinstance(ticket, CaptureTicket) else None


def reserve_end(t: Tables, captures: Captures, index: int) -> CaptureTicket | None:
    """See ``CacheManager.reserve_end``."""
    slot = t.slots[index]
    if not t.limits.parting or not slot.indexed or worth(t, slot) is None:
        return None
    at_most = Rank.RETRY if slot.stable else Rank.NEAR_DUPLICATE
    ticket = captures.reserve(slot, CapturePoint(slot.n_tokens, Origin.FRONTIER, required=True), at_most)
    return ticket if isinstance(ticket, CaptureTicket) else None


def overwrites(choice: Choice) -> bool:
    """Does the choice end a live history that somebody may come back to?"""
    slot = choice.slot
    if not slot.indexed or choice.keep_rows >= slot.n_tokens:
        return False
    in_place = choice.keep_rows > 0 and choice.n_reused <= slot.n_tokens
    replaced = in_place and bool(slot.stable) and choice.n_reused >= slot.stable[0]
    return not replaced  # else the client has changed this very answer


def worth(t: Tables, slot: Slot) -> Rank | None:
    """The highest class that may be evicted for the slot's live state; None: it is not worth a copy."""
    n, shape = slot.n_tokens, t.shape
    row_bytes = n * shape.row_bytes
    if row_bytes > 0 and shape.private_bytes > t.limits.cheap_factor * row_bytes:
        return None
    kept = t.index.deepest(slot.scope, slot.history.view(), marks_before(slot.inputs, n), Tier.RAM)
    if n == kept:
        return None
    if slot.stable or n - kept < t.limits.learned_min:
        return Rank.NEAR_DUPLICATE
    return max(Rank) if slot.reuses else Rank.HELD
