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
from enum import Enum

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


class _Seen(Enum):
    """What comes first below a place, in one of two views: all lasting checkpoints, or anchors only."""

    NOTHING = 0
    CHECKPOINT = 1
    PARTING = 2


@dataclass(frozen=True, slots=True)
class _Below:
    """Everything below a place that matters to what lies above it."""

    any: bool
    """Some lasting checkpoint lies below."""
    first: _Seen
    first_anchor: _Seen


_EMPTY = _Below(False, _Seen.NOTHING, _Seen.NOTHING)
_PARTED = _Below(True, _Seen.PARTING, _Seen.PARTING)


def relations(tree: TokenTree, tier: Tier) -> dict[Key, Relation]:
    """All checkpoints of a tier, lasting or not: one walk up and one down over tracks that hold any."""
    tracks = [tree.root] if tree.root.n_below(tier) else []
    for track in tracks:
        tracks += [kid for kid in track.kids.values() if kid.n_below(tier)]
    below: dict[Track, _Below] = {}
    standing: dict[Key, _Seen] = {}
    groups = [_groups(track, tier) for track in tracks]
    for track, group in zip(reversed(tracks), reversed(groups), strict=True):
        below[track] = _look_up(group, below, standing)
    found: dict[Key, Relation] = {}
    above: dict[Track, Key | None] = dict.fromkeys(tracks)
    for track, group in zip(tracks, groups, strict=True):
        _look_down(group, above[track], above, standing, found)
    return found


_Group = tuple[list[Entry], list[Track]]
"""Entries at one depth of a track, and tracks that leave there: the entries come first."""


def _groups(track: Track, tier: Tier) -> list[_Group]:
    """Everything on a track by depth, ascending."""
    if not track.forks and len(track.items) == 1:
        return [([track.items[0].entry], [])]
    at: dict[int, _Group] = {}
    for item in track.items:
        if item.entry.key[0] is tier:
            at.setdefault(item.entry.n_tokens, ([], []))[0].append(item.entry)
    for key, kid in track.kids.items():
        if kid.n_below(tier):
            at.setdefault(key[0], ([], []))[1].append(kid)
    return [at[depth] for depth in sorted(at)]


def _look_up(groups: list[_Group], below: dict[Track, _Below], standing: dict[Key, _Seen]) -> _Below:
    """Note what comes first below each entry; returns what comes first below the track's start."""
    now = _EMPTY
    for entries, kids in reversed(groups):
        for kid in kids:
            way = below[kid]
            if way.any:
                now = _PARTED if now.any else way
        for entry in entries:
            standing[entry.key] = now.first_anchor if entry.anchor else now.first
        lasting = [entry for entry in entries if entry.lasting]
        if lasting:
            anchor = _Seen.CHECKPOINT if any(entry.anchor for entry in lasting) else now.first_anchor
            now = _Below(True, _Seen.CHECKPOINT, anchor)
    return now


def _look_down(
    groups: list[_Group],
    parent: Key | None,
    above: dict[Track, Key | None],
    standing: dict[Key, _Seen],
    found: dict[Key, Relation],
) -> None:
    """Give each entry its parent and family; note the parent of what leaves the track."""
    for entries, kids in groups:
        nearest = parent
        for entry in entries:
            family: Hashable = entry.key
            if parent is not None and not found[parent].branch_point:
                family = found[parent].family
            seen = standing[entry.key]
            found[entry.key] = Relation(seen is _Seen.CHECKPOINT, seen is _Seen.PARTING, parent, family)
            if entry.lasting:
                nearest = entry.key
        parent = nearest
        for kid in kids:
            above[kid] = parent


def relation_of(track: Track, entry: Entry, found: dict[Key, Relation]) -> Relation:
    """One checkpoint that changed nobody else's standing, given the relations of the others."""
    parent = parent_of(track, entry)
    family: Hashable = entry.key if parent is None or found[parent].branch_point else found[parent].family
    covered, branch = standing(track, entry)
    return Relation(covered, branch, parent, family)


def parent_of(track: Track | None, entry: Entry) -> Key | None:
    """The deepest lasting checkpoint strictly above, of the entry's tier."""
    above = deepest_upto(track, entry.n_tokens - 1, entry.key[0])
    return None if above is None else above[1].key


def deepest_upto(track: Track | None, depth: int, tier: Tier) -> tuple[Track, Entry] | None:
    """The deepest lasting entry of a tier at most at ``depth`` on the way down to this track."""
    while track is not None:
        for item in reversed(track.items[: track.n_upto(depth)]):
            if _counts(item, tier):
                return track, item.entry
        depth = track.start
        track = track.parent
    return None


def standing(track: Track, entry: Entry) -> tuple[bool, bool]:
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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint that is to be made would stand."""

    family: Hashable = None
    """The family it would join; None: it would start one."""
    covers: Key | None = None
    """The checkpoint that would be covered by it and is covered by nothing yet."""


def place_of(tree: TokenTree, found: dict[Key, Relation], tokens: Tokens, tier: Tier, *, anchor: bool) -> Place:
    """The place of a newcomer with these tokens.  ``found``: ``relations(tree, tier)``."""
    track, depth = tree.match(tokens)[-1]
    above = deepest_upto(track, depth, tier)
    if above is None:
        return Place()
    home, entry = above
    if found[entry.key].branch_point:
        return Place()
    below = _first_below(home, entry.n_tokens, tier)
    if below is not None and depth < len(tokens):
        return Place()
    covers = below is None and entry.n_tokens < len(tokens) and (anchor or not entry.anchor)
    return Place(found[entry.key].family, entry.key if covers else None)
