"""Rows-only memories: a state that goes on beyond the prompt's path is usable up to where it leaves it.

Every row is a restore point there, so an edited prompt may start from any history that shares its
beginning.  Thousands may share a system prompt: a few per tier are named, all live frontiers are.
"""

from __future__ import annotations

from gufo_gguf.cache.tokentree import Item, TokenTree, Track
from gufo_gguf.cache.types import Candidate, Tier

MAX_CUTS_PER_TIER = 4
"""Rows-only: thousands of histories may share a system prompt; this many sources of a cut will do."""


def cuts(tree: TokenTree, path: list[tuple[Track, int]], deepest: int) -> list[Candidate]:
    """Rows-only: states of histories that leave the path, as if they ended where they leave it.

    Deepest first; all live frontiers, and at most ``MAX_CUTS_PER_TIER`` of tiers that can have many.
    """
    found = _live_cuts(tree, path, deepest) if tree.live else []
    for tier in (Tier.RAM, Tier.DISK):
        if tree.root.n_below(tier):
            found += _cuts_of(tier, path, deepest)
    found.sort(key=lambda c: -c.n_tokens)
    return found


def _live_cuts(tree: TokenTree, path: list[tuple[Track, int]], deepest: int) -> list[Candidate]:
    """Live frontiers are few: each is followed up to where it meets the path."""
    found: list[Candidate] = []
    left_at = dict(path)
    for slot in sorted(tree.live):
        track, entry = tree.home[Tier.LIVE, slot]
        depth = entry.n_tokens
        while track not in left_at:
            assert track.parent is not None, "the root is on every path"
            depth, track = track.start, track.parent
        depth = min(depth, left_at[track], deepest)
        if 0 < depth < entry.n_tokens:
            found.append(Candidate(Tier.LIVE, depth, None, slot))
    return found


def _cuts_of(tier: Tier, path: list[tuple[Track, int]], deepest: int) -> list[Candidate]:
    """States of a tier that go on beyond the path, cut at the depth to which they share it.

    track   start ------ fork ------------ last ------------ end
            prompt runs along .............^ and leaves (or is cut at ``deepest``) here
    """
    found: list[Candidate] = []
    below: Track | None = None
    for track, left_at in reversed(path):
        last = min(left_at, deepest)
        if last == 0:
            break
        _take(found, last, track.items[track.n_upto(last) :], tier)
        for key in reversed(track.forks):
            if len(found) >= MAX_CUTS_PER_TIER:
                return found
            kid, cut = track.kids[key], min(key[0], last)
            if cut > 0 and kid is not below and kid.n_below(tier):
                pending = [kid]
                while pending:
                    on = pending.pop()
                    _take(found, cut, on.items, tier)
                    if on.forks and len(found) < MAX_CUTS_PER_TIER:
                        pending += [k for k in on.kids.values() if k.n_below(tier)]
        below = track
    return found


def _take(found: list[Candidate], depth: int, items: list[Item], tier: Tier) -> None:
    """Cuts of some items at a depth, up to the limit."""
    for item in items:
        if len(found) >= MAX_CUTS_PER_TIER:
            return
        if item.entry.key[0] is tier:
            found.append(Candidate(tier, depth, item.candidate.checkpoint, None))
