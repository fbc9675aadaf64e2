"""Eviction: the whole order as one list, against a slow model, and what it means for conversations."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gufo_gguf.cache.index import Entry, PrefixIndex
from gufo_gguf.cache.retention import Rank, RetentionRecord, Thrash, Victim, rank_victims, victims_order
from gufo_gguf.cache.types import CacheLimits, CheckpointId, Origin, Tier

ROW = 27_460
PRIVATE = 133_000_000
BUDGET = 9 << 30


def record(number: int, n_tokens: int = 50_000, **more: Any) -> RetentionRecord:
    values: dict[str, Any] = {
        "id": CheckpointId(number),
        "origin": Origin.PROMPT,
        "n_tokens": n_tokens,
        "private_bytes": PRIVATE,
        "row_bytes": n_tokens * ROW,
        "last_use_seq": number,
        "admitted_bytes_at_last_use": 0,
        "reuses": 0,
        "covered": False,
        "branch_point": False,
        "family": number,
    }
    return RetentionRecord(**{**values, **more})


def order(records: list[RetentionRecord], **more: Any) -> list[int]:
    arguments: dict[str, Any] = {"admitted_bytes": 0, "budget": BUDGET, "optional": False, "newcomer_family": None}
    arguments.update(more)
    return [int(v) for v in victims_order(records, **arguments)]


# -- the article's figure --------------------------------------------------------------------------
def test_figure_11_eviction_order_as_one_list() -> None:
    """Retry copies, then cheap ones, then idle conversations (LRU), then reused ones."""
    old = {"admitted_bytes_at_last_use": 0}
    new = {"admitted_bytes_at_last_use": BUDGET}
    records = [
        record(1, last_use_seq=90, reuses=3, **new),
        record(2, last_use_seq=20, **old),
        record(3, n_tokens=605, last_use_seq=80, **new),
        record(4, origin=Origin.RETRY, last_use_seq=99, **new),
        record(5, last_use_seq=10, reuses=9, **old),
        record(6, origin=Origin.RETRY, last_use_seq=50, **old),
        record(7, last_use_seq=95, reuses=1, **new),
    ]
    assert order(records, admitted_bytes=BUDGET) == [6, 4, 3, 2, 5, 1, 7]
    ranks = [v.rank for v in rank_victims(records, BUDGET, BUDGET, optional=False, newcomer_family=None)]
    assert ranks == [Rank.RETRY, Rank.RETRY, Rank.CHEAP, Rank.IDLE, Rank.IDLE, Rank.REUSED, Rank.REUSED]
    assert Victim(CheckpointId(3), Rank.NEAR_DUPLICATE).reason == "near_duplicate"


def test_figure_11_making_room() -> None:
    """Five units are needed and one is free: both retry copies (2 units) and a cheap one (3) go, no more."""
    records = [
        record(1, reuses=1, admitted_bytes_at_last_use=BUDGET),
        record(2, admitted_bytes_at_last_use=0),
        record(3, n_tokens=300),
        record(4, origin=Origin.RETRY),
        record(5, origin=Origin.RETRY),
    ]
    units = {1: 6, 2: 6, 3: 3, 4: 1, 5: 1}
    free, gone = 1, []
    for victim in order(records, admitted_bytes=BUDGET):
        if free >= 5:
            break
        free += units[victim]
        gone.append(victim)
    assert (gone, free) == ([4, 5, 3], 6)


# -- single rules ----------------------------------------------------------------------------------
def test_cheap_is_more_than_eight_times_the_rows() -> None:
    at = PRIVATE // (8 * ROW)  # 605 tokens
    assert order([record(1, at), record(2, at + 1, last_use_seq=0)]) == [1, 2]
    # A recurrent-only model has no rows to compare with.
    assert order([record(1, 10, row_bytes=0, last_use_seq=5), record(2, 50_000, last_use_seq=0)]) == [2, 1]


def test_idle_is_one_turnover_of_the_budget() -> None:
    one = [record(1, last_use_seq=9, admitted_bytes_at_last_use=100), record(2, admitted_bytes_at_last_use=101)]
    assert order(one, admitted_bytes=100 + BUDGET) == [1, 2]
    assert order(one, admitted_bytes=100 + BUDGET - 1) == [2, 1]


def test_use_of_a_checkpoint_counts_for_what_it_extends() -> None:
    chain = [
        record(1, 20_000, covered=True, last_use_seq=1, origin=Origin.GRID),
        record(2, 40_000, parent=CheckpointId(1), last_use_seq=90, reuses=2, admitted_bytes_at_last_use=BUDGET),
    ]
    other = record(3, 30_000, last_use_seq=50)
    # Conversation 3 is idle; the covered grid point of the active one is not.
    assert order([*chain, other], admitted_bytes=BUDGET) == [3, 1, 2]


def test_superseded_turns_go_before_other_conversations_last_copies() -> None:
    """Superseded turns go in any case, grid points of an active conversation only where they are close."""
    turns = [record(1, 10_000, covered=True, last_use_seq=50, admitted_bytes_at_last_use=BUDGET, origin=Origin.GRID)]
    for number, n_tokens in ((2, 10_700), (3, 11_900)):
        turns.append(
            record(
                number,
                n_tokens,
                covered=number == 2,
                parent=CheckpointId(number - 1),
                last_use_seq=60 + number,
                admitted_bytes_at_last_use=BUDGET,
            )
        )
    idle_last_copy = record(9, 8_000, last_use_seq=1)
    assert order([*turns, idle_last_copy], admitted_bytes=BUDGET) == [2, 9, 1, 3]


def test_a_leaf_close_above_another_checkpoint_is_a_near_duplicate() -> None:
    base = record(1, 10_000, branch_point=True, last_use_seq=1)
    near = record(2, 10_511, parent=CheckpointId(1), last_use_seq=80)
    far = record(3, 10_512, parent=CheckpointId(1), last_use_seq=70)
    assert order([base, near, far]) == [2, 3, 1]


def test_a_branch_point_outlives_the_leaves_of_both_branches() -> None:
    leaves = [
        record(2, 30_000, parent=CheckpointId(1), last_use_seq=70),
        record(3, 40_000, parent=CheckpointId(1), last_use_seq=90, admitted_bytes_at_last_use=BUDGET, reuses=1),
    ]
    # Even where it would be cheap on its own, or was itself never used.
    for n_tokens in (500, 20_000):
        branch = record(1, n_tokens, branch_point=True, last_use_seq=1, admitted_bytes_at_last_use=1)
        assert order([branch, *leaves], admitted_bytes=BUDGET) == [2, 3, 1]
        # Nothing came back to it during a turnover: it still outlives idle leaves, not those in use.
        assert order([replace(branch, admitted_bytes_at_last_use=0), *leaves], admitted_bytes=BUDGET) == [2, 1, 3]


def test_what_a_slot_holds_makes_room_before_other_last_copies() -> None:
    turn = record(2, 30_000, parent=CheckpointId(1), covered=True, last_use_seq=90)
    held = record(3, 50_000, held=True, last_use_seq=80, reuses=2)
    idle = record(4, 40_000, last_use_seq=2)
    for thrashing in (False, True):
        assert order([record(1, branch_point=True), turn, held, idle], thrashing=thrashing)[:3] == [2, 3, 4]
    # A branch point is not held: others need it too.
    trunk = record(5, 9_000, branch_point=True, held=True, last_use_seq=99)
    assert order([trunk, idle]) == [4, 5]


def test_the_end_of_an_answer_beyond_a_stable_boundary_has_to_prove_itself() -> None:
    stable = record(1, 10_000, last_use_seq=1)
    answer = record(2, 14_000, parent=CheckpointId(1), origin=Origin.PARTING, after_anchor=True, last_use_seq=9)
    for reuses, rank in ((0, Rank.NEAR_DUPLICATE), (1, Rank.REUSED)):
        known = [stable, replace(answer, reuses=reuses)]
        first = rank_victims(known, 0, BUDGET, optional=False, newcomer_family=None)[0]
        assert first == Victim(CheckpointId(2), rank)


def test_pinned_checkpoints_are_no_victims() -> None:
    assert order([record(1, pinned=True, origin=Origin.RETRY), record(2)]) == [2]


def test_optional_captures_spare_the_last_useful_copy_of_other_families() -> None:
    records = [
        record(1, 20_000, family="a", covered=True, origin=Origin.GRID),
        record(2, 40_000, family="a", parent=CheckpointId(1)),
        record(3, 30_000, family="b"),
        record(4, 30_000, family="c"),
        record(5, 300, family="d"),
        record(6, family="e", origin=Origin.RETRY),
    ]
    assert order(records, optional=True, newcomer_family="c") == [6, 5, 1, 4]
    assert order(records, optional=True, newcomer_family=None) == [6, 5, 1]
    assert order(records, optional=False, newcomer_family="c") == [6, 5, 1, 2, 3, 4]


# -- any forest ------------------------------------------------------------------------------------
@st.composite
def forests(draw: st.DrawFn) -> list[RetentionRecord]:
    """Records with parents among the shallower ones; covered or branch point, never both."""
    out: list[RetentionRecord] = []
    for number in range(draw(st.integers(1, 9))):
        parent = draw(st.sampled_from([None, *out])) if out else None
        n_tokens = (parent.n_tokens if parent else 0) + draw(st.sampled_from([1, 300, 511, 512, 2047, 2048, 9000]))
        standing = draw(st.sampled_from(["leaf", "covered", "branch"]))
        out.append(
            record(
                number,
                n_tokens,
                origin=draw(st.sampled_from([Origin.PROMPT, Origin.RETRY, Origin.GRID, Origin.LEARNED])),
                private_bytes=draw(st.sampled_from([0, ROW * 1000, ROW * 100_000])),
                last_use_seq=draw(st.integers(0, 6)),
                admitted_bytes_at_last_use=draw(st.sampled_from([0, 50, 100])),
                reuses=draw(st.integers(0, 2)),
                covered=standing == "covered",
                branch_point=standing == "branch",
                parent=parent.id if parent else None,
                family=draw(st.sampled_from("abc")),
                pinned=draw(st.integers(0, 5)) == 0,
            )
        )
    return out


def slow_order(records: list[RetentionRecord], admitted: int, budget: int) -> list[tuple[int, Rank]]:
    """The rules of the module docstring, word for word, on descendants found by walking up."""
    by_id = {r.id: r for r in records}

    def branch(r: RetentionRecord) -> list[RetentionRecord]:
        def extends(other: RetentionRecord) -> bool:
            at: RetentionRecord | None = other
            while at is not None and at.id != r.id:
                at = by_id[at.parent] if at.parent is not None else None
            return at is not None

        return [o for o in records if extends(o)]

    def own_rank(r: RetentionRecord) -> Rank:
        if r.origin is Origin.RETRY:
            return Rank.RETRY
        if r.row_bytes and r.private_bytes > 8 * r.row_bytes:
            return Rank.CHEAP
        if r.parent is not None and not r.branch_point:
            gain = r.n_tokens - by_id[r.parent].n_tokens
            if gain < (2048 if r.covered else 512):
                return Rank.NEAR_DUPLICATE
        if r.covered and r.origin is Origin.PROMPT:
            return Rank.NEAR_DUPLICATE
        used = max(o.admitted_bytes_at_last_use for o in branch(r))
        return Rank.IDLE if admitted - used >= budget else Rank.REUSED

    def rank(r: RetentionRecord) -> Rank:
        if not r.branch_point:
            return own_rank(r)
        highest = max([own_rank(r), *(rank(o) for o in branch(r) if o is not r)])
        unused = admitted - r.admitted_bytes_at_last_use >= budget
        return Rank.IDLE if unused and highest is Rank.REUSED else highest

    def key(r: RetentionRecord) -> Any:
        b = branch(r)
        return (
            rank(r),
            not r.covered,
            any(o.reuses for o in b),
            max(o.last_use_seq for o in b),
            -r.n_tokens,
            r.id,
        )

    return [(int(r.id), rank(r)) for r in sorted(records, key=key)]


@settings(max_examples=80, deadline=None)
@given(records=forests(), admitted=st.integers(100, 300), optional=st.booleans(), family=st.sampled_from("abcd"))
def test_order_of_any_forest(records: list[RetentionRecord], admitted: int, optional: bool, family: str) -> None:
    slow = slow_order(records, admitted, 100)
    got = rank_victims(records, admitted, 100, optional=optional, newcomer_family=family)
    free = [(int(v.id), v.rank) for v in got]
    by_id = {int(r.id): r for r in records}

    spared = set()
    if optional:
        for other in {r.family for r in records} - {family}:
            useful = [n for n, rank in slow if by_id[n].family == other and rank > Rank.NEAR_DUPLICATE]
            spared |= set(useful[-1:])
    assert free == [(n, rank) for n, rank in slow if not by_id[n].pinned and n not in spared]

    # A total order: the records' order does not matter.
    shuffled = records.copy()
    random.Random(7).shuffle(shuffled)
    assert rank_victims(shuffled, admitted, 100, optional=optional, newcomer_family=family) == got
    # Classes ascend, and a branch point in use comes after everything that extends it.
    assert [rank for _, rank in free] == sorted(rank for _, rank in free)
    position = {n: i for i, (n, _) in enumerate(slow)}
    for r in records:
        above = by_id[int(r.parent)] if r.parent is not None else None
        while above is not None:
            if above.branch_point and admitted - above.admitted_bytes_at_last_use < 100:
                assert position[int(r.id)] < position[int(above.id)]
            above = by_id[int(above.parent)] if above.parent is not None else None


# -- what the newcomer covers, and thrashing -------------------------------------------------------
def test_what_the_newcomer_covers_goes_before_another_conversations_last_copy() -> None:
    """The last turn of its own conversation, but behind what has been superseded for longer."""
    other = record(1, last_use_seq=1, family="other")
    older = record(2, n_tokens=40_000, last_use_seq=5, family="own", covered=True)
    turn = record(3, n_tokens=50_000, last_use_seq=6, family="own", parent=CheckpointId(2))
    assert order([other, older, turn], newcomer_family="own") == [2, 1, 3]
    assert order([other, older, turn], newcomer_family="own", covers=CheckpointId(3)) == [2, 3, 1]


def test_what_the_newcomer_covers_is_kept_while_two_branches_part_there() -> None:
    trunk = record(1, n_tokens=9_000, branch_point=True, family="trunk")
    branch = record(2, n_tokens=30_000, family="a", parent=CheckpointId(1))
    assert order([trunk, branch], covers=CheckpointId(1)) == [2, 1]


def test_while_thrashing_the_latest_of_the_reused_goes_first_and_branch_points_last() -> None:
    new = {"admitted_bytes_at_last_use": BUDGET, "reuses": 1}
    old = {"admitted_bytes_at_last_use": 0, "reuses": 1}
    trunk = record(1, n_tokens=9_000, branch_point=True, last_use_seq=50, **new)
    leaves = [record(n, last_use_seq=n, parent=CheckpointId(1), **(old if n < 4 else new)) for n in range(2, 6)]
    once = record(6, last_use_seq=60, admitted_bytes_at_last_use=BUDGET)
    retry = record(7, origin=Origin.RETRY, last_use_seq=70)
    calm = order([trunk, *leaves, once, retry], admitted_bytes=BUDGET)
    assert calm == [7, 2, 3, 6, 4, 5, 1]
    thrashing = order([trunk, *leaves, once, retry], admitted_bytes=BUDGET, thrashing=True)
    assert thrashing == [7, 6, 5, 4, 3, 2, 1], "one that never came back before all that did"
    ranked = rank_victims([*leaves], BUDGET, BUDGET, optional=False, newcomer_family=None, thrashing=True)
    assert {v.reason for v in ranked} == {"cycled"}


def test_a_sign_of_thrashing_lasts_for_a_window_of_requests() -> None:
    thrash = Thrash()
    assert not thrash.on
    thrash.note(lost=True)
    for _ in range(Thrash.WINDOW - 1):
        assert thrash.on
        thrash.note(lost=False)
    assert thrash.on
    thrash.note(lost=False)
    assert not thrash.on


# -- with the index --------------------------------------------------------------------------------
class Shelf:
    """Checkpoints by count under the real index and the real order: the loop the manager runs."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.index = PrefixIndex(rows_only=False)
        self.kept: dict[int, RetentionRecord] = {}
        self.seq = 0

    def records(self) -> list[RetentionRecord]:
        out = []
        for number, kept in self.kept.items():
            key = (Tier.RAM, number)
            parent = self.index.parent(key)
            out.append(
                replace(
                    kept,
                    covered=self.index.covered(key),
                    branch_point=self.index.is_branch_point(key),
                    family=self.index.family(key),
                    parent=None if parent is None else CheckpointId(parent[1]),
                )
            )
        return out

    def put(self, tokens: Any, origin: Origin = Origin.PROMPT) -> int:
        self.seq += 1
        history = np.asarray(tokens, dtype=np.int32)
        while len(self.kept) >= self.room:
            family = self.index.place_of("m", history).family
            victim = victims_order(
                self.records(), self.seq, self.room, optional=False, newcomer_family=family, limits=CacheLimits(1)
            )[0]
            self.index.remove((Tier.RAM, victim))
            del self.kept[victim]
        self.index.insert(
            "m", history, Entry((Tier.RAM, self.seq), len(history), anchor=True, covers=origin is not Origin.RETRY)
        )
        self.kept[self.seq] = record(
            self.seq, len(history), origin=origin, last_use_seq=self.seq, admitted_bytes_at_last_use=self.seq
        )
        assert self.index.check() == []
        return self.seq


def test_conversations_taking_turns_keep_their_last_copies() -> None:
    """N conversations of ten turns over one system prompt, room for N + 2: none loses its newest turn."""
    for n in range(2, 9):
        shelf = Shelf(n + 2)
        system = list(range(6000))
        shelf.put(system, Origin.LEARNED)
        histories = [system.copy() for _ in range(n)]
        for turn in range(10):
            newest = {}
            for c, history in enumerate(histories):
                history += [100_000 * (c + 1) + 2000 * turn + i for i in range(900)]
                newest[c] = shelf.put(history)
                shelf.put([*history, 7], Origin.RETRY)
            # All but the one whose retry copy came last are complete; that one is, too.
            assert set(newest.values()) <= shelf.kept.keys(), (n, turn)
            assert 1 in shelf.kept, "the shared system prompt outlives its branches"


def test_an_undone_edit_finds_the_old_branch() -> None:
    """Edit message 2 of 8, go on for three turns, then undo: the old branch is still there."""
    shelf = Shelf(8)
    turns = [[1000 * (k + 1) + i for i in range(700)] for k in range(8)]
    history: list[int] = []
    for turn in turns:
        history = history + turn
        newest = shelf.put(history)
    edited = turns[0] + [500_000 + i for i in range(700)]
    for k in range(3):
        edited = edited + [600_000 + 1000 * k + i for i in range(700)]
        shelf.put(edited)
    assert newest in shelf.kept
