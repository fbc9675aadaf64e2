"""A compressed tree of token histories whose longest paths are contiguous arrays.

A *track* is a run of tokens; other tracks fork off it where histories differ:

    root  0 ======================================= 10,000     entries at 4,096 and 10,000
                        \\ 6,000 =========== 8,000              fork: first token differs at depth 6,000
                                  \\ 7,100 == 7,300

* Depth counts tokens from the start of the history.  An entry at depth d lies on the track with
  ``start < d <= end``; a fork at depth d begins with the token at index d.
* Entries do not cut a track, so a walk costs one numpy comparison per change of track, however many
  checkpoints lie on the path.
* The longest continuation stays on the track: no fork is longer than the track it leaves.  A
  conversation that grows by thousands of turns remains one array, dead ends hang off it.
* Tight: every track ends at an entry.  Removing the last entry of a run removes its tokens, and a
  fork whose track ends at it becomes part of that track.

Each token is stored once.  Rejected: nodes cut at every checkpoint (a path of 100 checkpoints costs
100 comparisons), and hashing blocks of the prompt (slower than comparing it, and not exact).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gufo_gguf.cache.types import Candidate, InputMark, Tier, Tokens

Key = tuple[Tier, int]
"""(LIVE, slot) | (RAM, checkpoint id) | (DISK, checkpoint id)"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One retained state: the first ``n_tokens`` of a history."""

    key: Key
    n_tokens: int
    has_logits: bool = False
    inputs: tuple[InputMark, ...] = ()
    anchor: bool = False
    """The boundary that outlasts the turn (the lowest of ``PromptView.stable``): only a deeper
    anchor covers it."""
    covers: bool = True
    """False for retry copies: they neither cover a checkpoint nor make one a branch point.  Live
    frontiers never do."""

    @property
    def lasting(self) -> bool:
        return self.covers and self.key[0] is not Tier.LIVE


@dataclass(frozen=True, slots=True)
class Item:
    """An entry with the candidate it makes, built once so that a lookup only copies references."""

    entry: Entry
    candidate: Candidate


TIER_ORDER = {Tier.DISK: 0, Tier.RAM: 1, Tier.LIVE: 2}
"""Ascending preference at equal depth."""

Place = tuple[int, int, int]
"""(depth, tier order, -number): ascending places read backwards are best first."""

_N_COUNTS = 5
_LASTING = {Tier.DISK: 3, Tier.RAM: 4}
_BLOCK = 4096


def place_of(entry: Entry) -> Place:
    return (entry.n_tokens, TIER_ORDER[entry.key[0]], -entry.key[1])


class Track:
    """A run of tokens [start, end), the entries on it and the forks that leave it."""

    __slots__ = ("_array", "candidates", "counts", "forks", "items", "kids", "n", "parent", "places", "start")

    def __init__(self, start: int, tokens: Tokens, parent: Track | None) -> None:
        self.start = start
        self.parent = parent
        self._array = np.array(tokens, dtype=np.int32)
        self.n = len(tokens)
        self.places: list[Place] = []
        self.items: list[Item] = []
        self.candidates: list[Candidate] = []
        self.forks: list[tuple[int, int]] = []
        """(depth, first token), ascending; the keys of ``kids``."""
        self.kids: dict[tuple[int, int], Track] = {}
        self.counts = [0] * _N_COUNTS
        """Entries on this track and all that leave it: per tier, then lasting ones per tier."""

    @property
    def end(self) -> int:
        return self.start + self.n

    @property
    def tokens(self) -> Tokens:
        return self._array[: self.n]

    @property
    def fork_key(self) -> tuple[int, int]:
        return (self.start, int(self._array[0]))

    def agree(self, tokens: Tokens) -> int:
        """Depth of the first token that differs, at most the shorter end; all before start agree."""
        stop = min(self.n, len(tokens) - self.start)
        theirs = tokens[self.start : self.start + stop]
        # Growing blocks: a difference near the start costs no comparison of the whole track.
        first, size = 0, _BLOCK
        while first < stop:
            last = min(first + size, stop)
            differs = self._array[first:last] != theirs[first:last]
            i = int(differs.argmax())
            if differs[i]:
                return self.start + first + i
            first, size = last, size * 4
        return self.start + stop

    def append(self, tokens: Tokens) -> None:
        """Tokens after the end; amortised cost is their number."""
        n = self.n + len(tokens)
        if n > len(self._array):
            grown = np.empty(max(n, 2 * len(self._array)) if self.n else n, dtype=np.int32)
            grown[: self.n] = self.tokens
            self._array = grown
        self._array[self.n : n] = tokens
        self.n = n

    def truncate(self, end: int) -> None:
        """Drop the tokens from depth ``end`` on; memory follows when most of it is unused."""
        self.n = end - self.start
        if 4 * self.n < len(self._array):
            self._array = self.tokens.copy()

    def put(self, item: Item) -> None:
        place = place_of(item.entry)
        i = bisect_left(self.places, place)
        self.places.insert(i, place)
        self.items.insert(i, item)
        self.candidates.insert(i, item.candidate)

    def take(self, entry: Entry) -> Item:
        i = bisect_left(self.places, place_of(entry))
        del self.places[i], self.candidates[i]
        return self.items.pop(i)

    def n_upto(self, depth: int) -> int:
        """How many entries lie at most this deep."""
        return bisect_right(self.places, (depth, len(TIER_ORDER), 0))

    def forks_from(self, depth: int) -> Iterator[Track]:
        """Tracks that leave at ``depth`` or deeper, ascending."""
        for key in self.forks[bisect_left(self.forks, (depth,)) :]:
            yield self.kids[key]

    def add_kid(self, kid: Track) -> None:
        kid.parent = self
        self.kids[kid.fork_key] = kid
        insort(self.forks, kid.fork_key)

    def drop_kid(self, kid: Track) -> None:
        del self.kids[kid.fork_key]
        del self.forks[bisect_left(self.forks, kid.fork_key)]

    def split_off(self, depth: int) -> Track:
        """Move tokens, entries and forks beyond ``depth`` to a new track that starts there.

        before  start ============ depth ============ end
        after   start ============ depth    returned: depth ============ end
        """
        rest = Track(depth, self.tokens[depth - self.start :], None)
        i = self.n_upto(depth)
        rest.places, self.places = self.places[i:], self.places[:i]
        rest.items, self.items = self.items[i:], self.items[:i]
        rest.candidates, self.candidates = self.candidates[i:], self.candidates[:i]
        j = bisect_left(self.forks, (depth + 1,))
        rest.forks, self.forks = self.forks[j:], self.forks[:j]
        for key in rest.forks:
            kid = rest.kids[key] = self.kids.pop(key)
            kid.parent = rest
        rest.counts = rest.recounted()
        self.truncate(depth)
        return rest

    def absorb(self, kid: Track) -> None:
        """Take over a track that starts at this one's end (its counts are already included here)."""
        self.append(kid.tokens)
        self.places += kid.places
        self.items += kid.items
        self.candidates += kid.candidates
        self.forks += kid.forks
        self.kids |= kid.kids
        for grandkid in kid.kids.values():
            grandkid.parent = self

    def recounted(self) -> list[int]:
        counts = [0] * _N_COUNTS
        for item in self.items:
            for i in counted(item.entry):
                counts[i] += 1
        for kid in self.kids.values():
            counts = [a + b for a, b in zip(counts, kid.counts, strict=True)]
        return counts

    def n_below(self, tier: Tier) -> int:
        return self.counts[TIER_ORDER[tier]]

    def n_lasting(self, tier: Tier) -> int:
        return self.counts[_LASTING[tier]]


def counted(entry: Entry) -> tuple[int, ...]:
    """Which of ``Track.counts`` an entry belongs to."""
    tier = entry.key[0]
    return (TIER_ORDER[tier], _LASTING[tier]) if entry.lasting else (TIER_ORDER[tier],)


class TokenTree:
    """All histories of one scope."""

    def __init__(self) -> None:
        self.root = Track(0, np.empty(0, dtype=np.int32), None)
        self.home: dict[Key, tuple[Track, Entry]] = {}
        self.live: set[int] = set()
        """Slots whose live frontier is in the tree."""

    def match(self, tokens: Tokens) -> list[tuple[Track, int]]:
        """The tracks that ``tokens`` runs along, from the root, each with the depth it agrees to.

        The last depth is the longest common prefix with any history.
        """
        path: list[tuple[Track, int]] = []
        track: Track | None = self.root
        while track is not None:
            depth = track.agree(tokens)
            path.append((track, depth))
            if depth in (len(tokens), track.end):
                break
            track = track.kids.get((depth, int(tokens[depth])))
        return path

    def history(self, key: Key) -> Tokens:
        """The tokens of an entry, a copy."""
        track, entry = self.home[key]
        parts: list[Tokens] = []
        end: int = entry.n_tokens
        above: Track | None = track
        while above is not None:
            parts.append(above.tokens[: end - above.start])
            end, above = above.start, above.parent
        return np.concatenate(parts[::-1])

    def insert(self, tokens: Tokens, item: Item) -> None:
        """Add an entry at depth len(tokens) = n_tokens >= 1; its key must be new."""
        track, depth = self.match(tokens)[-1]
        if depth == track.end:
            track.append(tokens[depth:])
        elif depth < len(tokens):
            fork = Track(depth, tokens[depth:], None)
            track.add_kid(fork)
            track = fork
        track.put(item)
        self.home[item.entry.key] = (track, item.entry)
        if item.entry.key[0] is Tier.LIVE:
            self.live.add(item.entry.key[1])
        self._count(track, item.entry, +1)
        while track.parent is not None and track.end > track.parent.end:
            track = self._promote(track)

    def remove(self, key: Key) -> None:
        """Drop an entry and the tokens that only it needed."""
        track, entry = self.home.pop(key)
        if key[0] is Tier.LIVE:
            self.live.remove(key[1])
        track.take(entry)
        self._count(track, entry, -1)
        self._tighten(track)

    @staticmethod
    def _count(track: Track | None, entry: Entry, change: int) -> None:
        while track is not None:
            for i in counted(entry):
                track.counts[i] += change
            track = track.parent

    def _promote(self, kid: Track) -> Track:
        """Let a fork be the continuation of its track; what continued before becomes a fork."""
        track, depth = kid.parent, kid.start
        assert track is not None
        track.drop_kid(kid)
        rest = track.split_off(depth) if depth < track.end else None
        track.absorb(kid)
        if rest is not None:
            track.add_kid(rest)
            self._rehome(rest, rest.items)
        self._rehome(track, kid.items)
        if rest is not None:
            self._straighten(rest)
        return track

    def _rehome(self, track: Track, items: list[Item]) -> None:
        for item in items:
            self.home[item.entry.key] = (track, item.entry)

    def _straighten(self, track: Track) -> None:
        """Restore "no fork is longer than its track" after the track got shorter."""
        longest = max(track.kids.values(), key=lambda kid: kid.end, default=None)
        if longest is not None and longest.end > track.end:
            self._promote(longest)

    def _tighten(self, track: Track) -> None:
        if not track.items and not track.forks:
            if track.parent is None:
                track.truncate(0)
            else:
                track.parent.drop_kid(track)
            return
        last_entry = track.places[-1][0] if track.places else track.start
        last_fork = track.forks[-1][0] if track.forks else track.start
        end = max(last_entry, last_fork)
        if end < track.end:
            track.truncate(end)
            self._straighten(track)

    def check(self) -> list[str]:
        """Every invariant of the module docstring, recounted; empty when all hold."""
        faults: list[str] = []
        seen: dict[Key, tuple[Track, Entry]] = {}
        pending = [self.root]
        while pending:
            track = pending.pop()
            where = f"track at {track.start}"
            for place, item, candidate in zip(track.places, track.items, track.candidates, strict=True):
                if place != place_of(item.entry) or candidate is not item.candidate:
                    faults.append(f"{where}: entry {item.entry.key} is misplaced")
                if not track.start < item.entry.n_tokens <= track.end:
                    faults.append(f"{where}: entry {item.entry.key} lies outside of [{track.start}, {track.end}]")
                seen[item.entry.key] = (track, item.entry)
            if track.places != sorted(track.places) or track.forks != sorted(track.kids):
                faults.append(f"{where}: unsorted")
            if track.n and (not track.places or track.places[-1][0] != track.end):
                faults.append(f"{where}: does not end at an entry")
            if track.counts != track.recounted():
                faults.append(f"{where}: counts {track.counts}, recounted {track.recounted()}")
            for key, kid in track.kids.items():
                if kid.parent is not track or kid.fork_key != key or kid.n == 0:
                    faults.append(f"{where}: fork {key} is not linked right")
                if not track.start <= kid.start < track.end or (kid.start == track.start and track.parent is not None):
                    faults.append(f"{where}: fork {key} leaves outside of the track")
                elif track.tokens[kid.start - track.start] == key[1]:
                    faults.append(f"{where}: fork {key} does not differ from its track")
                if kid.end > track.end:
                    faults.append(f"{where}: fork {key} is longer than its track")
                pending.append(kid)
        if seen.keys() != self.home.keys() or any(seen[k] != v for k, v in self.home.items()):
            faults.append("entries by key and entries in the tree differ")
        if self.live != {number for tier, number in seen if tier is Tier.LIVE}:
            faults.append("live frontiers and entries in the tree differ")
        return faults
