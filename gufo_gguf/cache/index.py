"""The prefix index: which retained states can start this prompt, and if none, why.

Live frontiers, RAM checkpoints and disk checkpoints of one scope share one token tree, so one walk
finds every usable state, the longest common prefix with any history and the reason of a miss.

    prompt   0 ============ 4,096 ============ 8,192 ----- new message ----- end
                            RAM                LIVE, DISK
    best first: LIVE@8,192, DISK@8,192, RAM@4,096

* States with private parts are usable at their exact boundary only.  Rows-only states may be cut at
  the common prefix: every row is a restore point.
* One token must be left to evaluate, unless the state carries the next-token logits.
* A non-text input takes part in matching: its digest stands in the tree in place of the first
  placeholder token, so two prompts with different images part there.
* Reads do not write: a lookup neither cuts a track nor touches nor counts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator

from gufo_gguf.cache.branches import (
    Place,
    Relation,
    deepest_upto,
    parent_of,
    place_of,
    relation_of,
    relations,
    standing,
)
from gufo_gguf.cache.cuts import cuts
from gufo_gguf.cache.ghosts import Ghosts
from gufo_gguf.cache.inputs import InputIds, blanked, is_input
from gufo_gguf.cache.tokentree import TIER_ORDER, Entry, Item, Key, TokenTree, Track
from gufo_gguf.cache.types import Candidate, CheckpointId, InputMark, Lookup, MissReason, PromptView, Tier, Tokens

__all__ = ["Entry", "Key", "PrefixIndex", "Relation", "join_scope"]

SCOPE_SEPARATOR = "/"
USEFUL_PREFIX = 64
"""Tokens.  Prompts of one template share their first few tokens; fewer than this (or than half of a
shorter prompt) in common means "nothing like it is known", not "the prefix changed"."""


def join_scope(identity: str, isolation: str = "") -> str:
    """The scope of a state identity and an isolation key (for example the digest of an API key).

    A miss reports ``identity`` only for histories with the same isolation key, or the reason would
    tell one user what another has asked.
    """
    return identity + SCOPE_SEPARATOR + isolation if isolation else identity


class PrefixIndex:
    """Entries of all tiers.  Owner thread only.

    ``rows_only``: the memory has no private state.  ``max_ghosts``: removed checkpoints to remember.
    """

    def __init__(self, *, rows_only: bool, max_ghosts: int = 4096) -> None:
        self._rows_only = rows_only
        self._trees: dict[str, TokenTree] = {}
        self._scopes: dict[Key, str] = {}
        self._live: set[Key] = set()
        self._ghosts = Ghosts(max_ghosts)
        self._inputs = InputIds()
        self._relations: dict[tuple[str, Tier], dict[Key, Relation]] = {}

    def __len__(self) -> int:
        return len(self._scopes)

    def __contains__(self, key: Key) -> bool:
        return key in self._scopes

    # -- writing ---------------------------------------------------------------------------------
    def insert(self, scope: str, tokens: Tokens, entry: Entry) -> None:
        """Make a state findable; replaces an entry with the same key.

        ``tokens``: its history, at least ``n_tokens`` long; copied as far as not known yet.
        """
        n = entry.n_tokens
        if not 0 < n <= len(tokens):
            raise ValueError(f"entry {entry.key} covers {n} of {len(tokens)} tokens")
        self.remove(entry.key)
        self._ghosts.discard(scope, blanked(tokens[:n], entry.inputs), entry.inputs)
        tree = self._trees.setdefault(scope, TokenTree())
        tree.insert(self._inputs.stored(tokens[:n], entry.inputs), Item(entry, _candidate(entry)))
        self._scopes[entry.key] = scope
        if entry.key[0] is Tier.LIVE:
            self._live.add(entry.key)
        self._update_relations(scope, entry, added=True)

    def remove(self, key: Key, *, ghost: MissReason | None = None) -> None:
        """Forget a state; unknown keys are fine.  ``ghost``: remember why it went."""
        scope = self._scopes.pop(key, None)
        if scope is None:
            return
        self._live.discard(key)
        tree = self._trees[scope]
        entry = tree.home[key][1]
        if ghost is not None:
            self._ghosts.add(scope, blanked(tree.history(key), entry.inputs), entry.inputs, ghost)
        tree.remove(key)
        self._inputs.release(entry)
        if not tree.home:
            del self._trees[scope]
        self._update_relations(scope, entry, added=False)

    def _update_relations(self, scope: str, entry: Entry, *, added: bool) -> None:
        """A lasting checkpoint may change any other's standing; one that does not last, only its own."""
        found = self._relations.get((scope, entry.key[0]))
        if found is None:
            return
        if entry.lasting or scope not in self._trees:
            del self._relations[scope, entry.key[0]]
        elif added:
            found[entry.key] = relation_of(*self._trees[scope].home[entry.key], found)
        else:
            del found[entry.key]

    # -- reading ---------------------------------------------------------------------------------
    def lookup(self, prompt: PromptView) -> Lookup:
        """Every usable state, best first, the longest common prefix, and the reason of a miss."""
        if not prompt.read:
            return Lookup((), 0, MissReason.DISABLED)
        tokens = self._inputs.sought(prompt.tokens, prompt.inputs)
        tree = self._trees.get(prompt.scope)
        path = tree.match(tokens) if tree is not None else []
        candidates = self._usable(tree, path, len(tokens))
        common = path[-1][1] if path else 0
        reason = None if candidates else self._why_not(prompt, tokens, path)
        return Lookup(tuple(candidates), common, reason)

    def _usable(self, tree: TokenTree | None, path: list[tuple[Track, int]], n_prompt: int) -> list[Candidate]:
        """Candidates along a path, best first.

        0 ......... last entry ......... common ....... n_prompt
        [ exact boundaries             )[ rows-only: cut here, of any history that goes on )
        """
        if tree is None:
            return []
        common = path[-1][1]
        deepest = min(common, n_prompt - 1)
        found = list(_complete(path[-1][0], n_prompt)) if common == n_prompt else []
        exact: list[Candidate] = []
        for track, depth in reversed(path):
            exact += track.candidates[: track.n_upto(min(depth, deepest))][::-1]
        if self._rows_only and deepest > 0:
            cut = cuts(tree, path, deepest)
            # Only the deep end has to be merged.  Stable: a state that ends at a depth goes first.
            n = bisect_right(exact, -cut[-1].n_tokens, key=lambda c: -c.n_tokens) if cut else 0
            exact[:n] = sorted(exact[:n] + cut, key=lambda c: (-c.n_tokens, -TIER_ORDER[c.tier]))
        return found + exact

    def _why_not(self, prompt: PromptView, tokens: Tokens, path: list[tuple[Track, int]]) -> MissReason:
        """The reason that explains the deepest restore point that might have been."""
        n, common = len(tokens), path[-1][1] if path else 0
        reasons: list[tuple[int, MissReason]] = []
        elsewhere = self._other_identity(prompt.scope, tokens)
        if elsewhere > 0:
            reasons.append((elsewhere, MissReason.IDENTITY))
        if common < n and path and is_input(int(tokens[common])) and _meets_input(*path[-1]):
            reasons.append((common, MissReason.INPUT_CHANGED))
        gone = self._ghosts.deepest(prompt.scope, blanked(prompt.tokens, prompt.inputs), prompt.inputs, n - 1)
        if gone is not None:
            reasons.append(gone)
        if reasons:
            return max(enumerate(reasons), key=lambda r: (r[1][0], r[0]))[1][1]
        if common == n or common < max(1, min(USEFUL_PREFIX, n // 2)):
            return MissReason.NO_CHECKPOINT
        return MissReason.PREFIX_CHANGED

    def _other_identity(self, scope: str, tokens: Tokens) -> int:
        """Tokens that could be reused if the state identity were another; 0 for none."""
        isolation = scope.partition(SCOPE_SEPARATOR)[2]
        best = 0
        for other, tree in self._trees.items():
            if other != scope and other.partition(SCOPE_SEPARATOR)[2] == isolation:
                usable = self._usable(tree, tree.match(tokens), len(tokens))
                best = max(best, usable[0].n_tokens if usable else 0)
        return best

    # -- relations of checkpoints, for retention -------------------------------------------------
    def relations(self, scope: str, tier: Tier = Tier.RAM) -> dict[Key, Relation]:
        """Covered, branch point, parent and family of every checkpoint of a tier; kept until a write."""
        if (scope, tier) not in self._relations:
            tree = self._trees.get(scope)
            self._relations[scope, tier] = relations(tree, tier) if tree is not None else {}
        return self._relations[scope, tier]

    def covered(self, key: Key) -> bool:
        """A deeper checkpoint of the same tier lies on the same branch, and no second branch starts between."""
        return self.relation(key).covered

    def covered_now(self, key: Key) -> bool:
        """The same by a walk of its own: for the one checkpoint whose neighbours have just changed."""
        return standing(*self._trees[self._scopes[key]].home[key])[0]

    def is_branch_point(self, key: Key) -> bool:
        """Not covered, and two retained histories extend it and differ after it."""
        return self.relation(key).branch_point

    def parent(self, key: Key) -> Key | None:
        """The deepest checkpoint of the same tier that this one extends."""
        return parent_of(*self._trees[self._scopes[key]].home[key])

    def family(self, key: Key) -> Hashable:
        """The unbranched run of checkpoints this one belongs to; equal for members of one run now."""
        return self.relation(key).family

    def relation(self, key: Key) -> Relation:
        """All of the above at once."""
        return self.relations(self._scopes[key], key[0])[key]

    def place_of(
        self, scope: str, tokens: Tokens, inputs: tuple[InputMark, ...] = (), *, anchor: bool = False
    ) -> Place:
        """Where a RAM checkpoint with these tokens would stand among the others."""
        tree = self._trees.get(scope)
        if tree is None:
            return Place()
        sought = self._inputs.sought(tokens, inputs)
        return place_of(tree, self.relations(scope, Tier.RAM), sought, Tier.RAM, anchor=anchor)

    def deepest(self, scope: str, tokens: Tokens, inputs: tuple[InputMark, ...], tier: Tier) -> int:
        """Tokens of the deepest lasting checkpoint of a tier that lies on this history, its end included; 0: none."""
        tree = self._trees.get(scope)
        if tree is None:
            return 0
        track, depth = tree.match(self._inputs.sought(tokens, inputs))[-1]
        found = deepest_upto(track, depth, tier)
        return 0 if found is None else found[1].n_tokens

    def held(self) -> set[Key]:
        """RAM checkpoints that a live frontier extends as the next after them; not those that outlast a turn."""
        found: set[Key] = set()
        for key in self._live:
            track, live = self._trees[self._scopes[key]].home[key]
            above = deepest_upto(track, live.n_tokens, Tier.RAM)
            if above is not None and not above[1].anchor:
                found.add(above[1].key)
        return found

    def lost(self, prompt: PromptView) -> int:
        """Tokens of the deepest state of this prompt that was evicted and has not come back; 0: none."""
        tokens = blanked(prompt.tokens, prompt.inputs)
        found = self._ghosts.deepest(prompt.scope, tokens, prompt.inputs, len(tokens))
        return found[0] if found is not None and found[1] is MissReason.EVICTED else 0

    def check(self) -> list[str]:
        """Recount everything; an empty list means consistent."""
        faults = self._ghosts.check()
        for scope, tree in self._trees.items():
            faults += [f"index {scope}: {fault}" for fault in tree.check()]
            if not tree.home:
                faults.append(f"index {scope}: an empty tree is kept")
        scopes = {key: scope for scope, tree in self._trees.items() for key in tree.home}
        if scopes != self._scopes:
            faults.append("index: entries by key and entries by scope differ")
        if self._live != {key for key in scopes if key[0] is Tier.LIVE}:
            faults.append("index: live entries and entries by key differ")
        entries = [entry for tree in self._trees.values() for _, entry in tree.home.values()]
        return faults + self._inputs.check(entries)


def _candidate(entry: Entry) -> Candidate:
    tier, number = entry.key
    if tier is Tier.LIVE:
        return Candidate(tier, entry.n_tokens, None, number, entry.has_logits)
    return Candidate(tier, entry.n_tokens, CheckpointId(number), None, entry.has_logits)


def _complete(track: Track, n_prompt: int) -> Iterator[Candidate]:
    """States after the whole prompt that carry their next-token logits."""
    first, last = track.n_upto(n_prompt - 1), track.n_upto(n_prompt)
    return (c for c in track.candidates[first:last][::-1] if c.has_logits)


def _meets_input(track: Track, depth: int) -> bool:
    """Some known history has an input as its next token after (track, depth)."""
    if depth < track.end and is_input(int(track.tokens[depth - track.start])):
        return True
    first = bisect_left(track.forks, (depth,))
    return any(d == depth and is_input(token) for d, token in track.forks[first : first + len(track.kids)])
