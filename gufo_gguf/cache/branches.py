"""How retained checkpoints relate: which cover, where continuations part, which belong together.

Questions of retention, asked of the token tree; nothing here writes.  Only checkpoints of one tier
count, and of those only the lasting ones (``Entry.lasting``): a live frontier may be overwritten any
moment, and a retry copy is the first to go.

Walking down from a checkpoint, three things can come first:

    another checkpoint      it is covered       0 ----- X ----- Y
    two ways with some      a branch point      0 ----- X ---<
    nothing                 a leaf              0 ----- X

An anchor (the boundary that outlasts a turn) is covered by a deeper anchor only; checkpoints of the
same turn beyond it may all be useless once a template drops that turn's reasoning.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from gufo_gguf.cache.tokentree import Entry, Item, Key, TokenTree, Track
from gufo_gguf.cache.types import Tier, Tokens


@dataclass(frozen=True, slots=True)
class Relation:
    """One checkpoint among the others of its tier, at this moment."""

    covered: bool
    """A deeper checkpoint lies on the same branch, and no second branch starts between."""
    branch_point: bool
    """Not covered, and at least two retained histories extend it and differ after it."""
    parent: Key | None
    """The deepest lasting checkpoint it extends."""
    family: Hashable
    """The topmost checkpoint reached upwards without passing a branch point."""


def relations(tree: TokenTree, tier: Tier) -> dict[Key, Relation]:
    """All checkpoints of a tier, lasting or not."""
    found: dict[Key, Relation] = {}
    own = [(track, entry) for track, entry in tree.home.values() if entry.key[0] is tier]
    for track, entry in sorted(own, key=lambda te: (te[1].n_tokens, te[1].lasting is False, te[1].key)):
        parent = parent_of(track, entry)
        family: Hashable = entry.key
        if parent is not None and not found[parent].branch_point:
            family = found[parent].family
        covered, branch = _standing(track, entry)
        found[entry.key] = Relation(covered, branch, parent, family)
    return found


def parent_of(track: Track | None, entry: Entry) -> Key | None:
    """The deepest lasting checkpoint strictly above, of the entry's tier."""
    above = _deepest_above(track, entry.n_tokens - 1, entry.key[0])
    return None if above is None else above[1].key


def _deepest_above(track: Track | None, depth: int, tier: Tier) -> tuple[Track, Entry] | None:
    """The deepest lasting entry of a tier at most at ``depth`` on the way down to this track."""
    while track is not None:
        for item in reversed(track.items[: track.n_upto(depth)]):
            if _counts(item, tier):
                return track, item.entry
        depth = track.start
        track = track.parent
    return None


def _standing(track: Track, entry: Entry) -> tuple[bool, bool]:
    """(covered, branch point)."""
    tier, depth = entry.key[0], entry.n_tokens
    while True:
        below = _first_below(track, depth, tier)
        if below is None:
            return False, False
        track, depth, item = below
        if item is None:
            return False, True
        if item.entry.anchor or not entry.anchor:
            return True, False


def _first_below(track: Track, depth: int, tier: Tier) -> tuple[Track, int, Item | None] | None:
    """The first lasting checkpoint strictly below (track, depth), or (…, None) where ways part first."""
    while True:
        own = next((i for i in track.items[track.n_upto(depth) :] if _counts(i, tier)), None)
        fork = next((k.start for k in track.forks_from(depth) if k.n_lasting(tier)), None)
        if own is not None and (fork is None or fork >= own.entry.n_tokens):
            return track, own.entry.n_tokens, own
        if fork is None:
            return None
        kids = [k for k in track.forks_from(fork) if k.n_lasting(tier)]
        here = [k for k in kids if k.start == fork]
        if len(here) + (own is not None or len(kids) > len(here)) >= 2:
            return track, fork, None
        track, depth = here[0], fork


def _counts(item: Item, tier: Tier) -> bool:
    return item.entry.lasting and item.entry.key[0] is tier


def family_of_newcomer(tree: TokenTree, found: dict[Key, Relation], tokens: Tokens, tier: Tier) -> Hashable:
    """The family that a checkpoint of these tokens would join, None when it would start one.

    ``found``: ``relations(tree, tier)``.
    """
    track, depth = tree.match(tokens)[-1]
    above = _deepest_above(track, depth, tier)
    if above is None:
        return None
    home, entry = above
    if found[entry.key].branch_point:
        return None
    below = _first_below(home, entry.n_tokens, tier)
    if below is None or depth == len(tokens):
        return found[entry.key].family
    return None
