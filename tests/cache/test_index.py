"""The prefix index against a flat list of histories, in small worlds exhaustively, and by example."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test

from gufo_gguf.cache import tokentree
from gufo_gguf.cache.index import Entry, PrefixIndex, join_scope
from gufo_gguf.cache.types import InputMark, Lookup, MissReason, PromptView, Tier, Tokens
from tests.cache.flat_index import PREFERENCE, FlatIndex


def toks(*ids: int) -> Tokens:
    return np.array(ids, dtype=np.int32)


def run(n: int, first: int = 1) -> Tokens:
    return np.arange(first, first + n, dtype=np.int32)


def ram(number: int, n_tokens: int, **more: Any) -> Entry:
    return Entry((Tier.RAM, number), n_tokens, **more)


def live(slot: int, n_tokens: int, **more: Any) -> Entry:
    return Entry((Tier.LIVE, slot), n_tokens, **more)


def found(result: Lookup) -> list[tuple[int, Tier, int, bool]]:
    return [
        (c.n_tokens, c.tier, c.checkpoint if c.checkpoint is not None else (c.slot or 0), c.has_logits)
        for c in result.candidates
    ]


def assert_same_lookup(index: PrefixIndex, model: FlatIndex, prompt: PromptView) -> None:
    result = index.lookup(prompt)
    expected, common = model.lookup(prompt)
    got = found(result)
    assert result.common_prefix == common
    assert [(c[0], PREFERENCE.index(c[1])) for c in got] == sorted(
        ((c[0], PREFERENCE.index(c[1])) for c in expected), key=lambda c: (-c[0], c[1])
    )
    assert sorted(got) == sorted(expected)
    assert (result.reason is None) == bool(expected)


def assert_same_relations(index: PrefixIndex, model: FlatIndex) -> None:
    for key in model.known:
        if key[0] is Tier.LIVE:
            continue
        assert index.covered(key) == index.covered_now(key) == model.covered(key), key
        assert index.is_branch_point(key) == model.is_branch_point(key), key
        assert index.parent(key) == index.relation(key).parent == model.parent(key), key
        assert index.family(key) == model.family(key), key


# -- state machine ---------------------------------------------------------------------------------
digests = st.sampled_from(["cat", "dog", "owl"])
marks = st.dictionaries(st.integers(0, 11), digests, max_size=2).map(
    lambda d: tuple(InputMark(p, d[p]) for p in sorted(d))
)
strings = st.lists(st.integers(1, 3), min_size=1, max_size=12)
keys = st.tuples(st.sampled_from(PREFERENCE), st.integers(0, 3))


class IndexMachine(RuleBasedStateMachine):
    rows_only = False
    histories = Bundle("histories")

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(rows_only=self.rows_only, max_ghosts=5)
        self.model = FlatIndex(rows_only=self.rows_only)
        self.block, tokentree._BLOCK = tokentree._BLOCK, 2

    def teardown(self) -> None:
        tokentree._BLOCK = self.block

    @rule(target=histories, tokens=strings, inputs=marks)
    def start(self, tokens: list[int], inputs: tuple[InputMark, ...]) -> Any:
        return tokens, inputs

    @rule(target=histories, base=histories, keep=st.integers(0, 12), more=strings)
    def branch(self, base: Any, keep: int, more: list[int]) -> Any:
        tokens, inputs = base
        return multiple((tokens[:keep] + more, inputs), (tokens[:keep] + more, ()))

    @rule(
        history=histories,
        key=keys,
        cut=st.integers(0, 3),
        scope=st.sampled_from(["m", "m", "m", "n"]),
        has_logits=st.booleans(),
        anchor=st.booleans(),
        covers=st.booleans(),
    )
    def insert(
        self, history: Any, key: Any, cut: int, scope: str, has_logits: bool, anchor: bool, covers: bool
    ) -> None:
        tokens, inputs = history
        n = max(1, len(tokens) - cut)
        entry = Entry(key, n, has_logits, inputs, anchor, covers)
        self.index.insert(scope, toks(*tokens), entry)
        self.model.insert(scope, tokens, entry)

    @rule(key=keys, ghost=st.sampled_from([None, MissReason.EVICTED, MissReason.QUARANTINED]))
    def remove(self, key: Any, ghost: MissReason | None) -> None:
        self.index.remove(key, ghost=ghost)
        self.model.remove(key)

    @rule(history=histories, scope=st.sampled_from(["m", "m", "n", "o"]), more=st.lists(st.integers(1, 3), max_size=3))
    def look(self, history: Any, scope: str, more: list[int]) -> None:
        tokens, inputs = history[0] + more, history[1]
        assert_same_lookup(self.index, self.model, PromptView(scope, toks(*tokens), inputs=inputs))
        for tier in (Tier.RAM, Tier.DISK):
            asked = (scope, toks(*tokens), inputs, tier)
            assert self.index.deepest(*asked) == self.model.deepest(*asked)

    @invariant()
    def consistent(self) -> None:
        assert self.index.check() == []
        assert_same_relations(self.index, self.model)


class RowsOnlyIndexMachine(IndexMachine):
    rows_only = True


QUICK = settings(max_examples=25, stateful_step_count=40, deadline=None)
LONG = settings(max_examples=300, stateful_step_count=80, deadline=None)

TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = QUICK
TestRowsOnlyIndexMachine = RowsOnlyIndexMachine.TestCase
TestRowsOnlyIndexMachine.settings = QUICK


@pytest.mark.long
@pytest.mark.parametrize("machine", [IndexMachine, RowsOnlyIndexMachine])
def test_index_machine_for_longer(machine: type[IndexMachine]) -> None:
    run_state_machine_as_test(machine, settings=LONG)


# -- small worlds, all of them ---------------------------------------------------------------------
def all_strings(longest: int) -> list[tuple[int, ...]]:
    return [s for n in range(1, longest + 1) for s in itertools.product((1, 2), repeat=n)]


def worlds(n: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    return itertools.combinations(all_strings(3), n)


@pytest.mark.parametrize("rows_only", [False, True])
def test_every_small_world_in_every_order(rows_only: bool) -> None:
    """All sets of up to three histories over two tokens, built and taken apart in every order."""
    prompts = [PromptView("m", toks(*s)) for s in all_strings(3)]
    for world in itertools.chain(worlds(1), worlds(2), worlds(3)):
        for order in itertools.permutations(range(len(world))):
            index, model = PrefixIndex(rows_only=rows_only), FlatIndex(rows_only=rows_only)
            for i in order:
                index.insert("m", toks(*world[i]), ram(i, len(world[i])))
                model.insert("m", world[i], ram(i, len(world[i])))
            assert index.check() == []
            if order == tuple(sorted(order)):
                for prompt in prompts:
                    assert_same_lookup(index, model, prompt)
            index.remove((Tier.RAM, 0))
            model.remove((Tier.RAM, 0))
            assert index.check() == []
            if order == tuple(sorted(order)):
                assert_same_relations(index, model)
                for prompt in prompts:
                    assert_same_lookup(index, model, prompt)
            for i in range(1, len(world)):
                index.remove((Tier.RAM, i))
            assert len(index) == 0 and index.check() == [] and not index._trees


def test_every_small_world_of_four_chains() -> None:
    """Sets of four histories, relations only: nested covers and branch points."""
    for world in worlds(4):
        index, model = PrefixIndex(rows_only=False), FlatIndex(rows_only=False)
        for i, history in enumerate(world):
            entry = ram(i, len(history), anchor=i % 2 == 0)
            index.insert("m", toks(*history), entry)
            model.insert("m", history, entry)
        assert_same_relations(index, model)


# -- the article's figures -------------------------------------------------------------------------
def test_one_token_is_left_to_evaluate_unless_the_logits_are_there() -> None:
    index = PrefixIndex(rows_only=False)
    a = run(300)
    index.insert("m", a, ram(0, 300))
    assert index.lookup(PromptView("m", a)) == Lookup((), 300, MissReason.NO_CHECKPOINT)
    index.insert("m", a, ram(1, 299))
    assert found(index.lookup(PromptView("m", a))) == [(299, Tier.RAM, 1, False)]
    index.insert("m", a, ram(2, 300, has_logits=True))
    assert found(index.lookup(PromptView("m", a))) == [(300, Tier.RAM, 2, True), (299, Tier.RAM, 1, False)]


def test_rows_only_histories_are_cut_at_the_common_prefix() -> None:
    index = PrefixIndex(rows_only=True)
    a = run(300)
    index.insert("m", a, ram(0, 300))
    index.insert("m", a, live(1, 250))
    edited = a.copy()
    edited[100] = 7777
    assert found(index.lookup(PromptView("m", edited))) == [(100, Tier.LIVE, 1, False), (100, Tier.RAM, 0, False)]
    # An identical resend keeps all but the last token.
    assert found(index.lookup(PromptView("m", a)))[0] == (299, Tier.RAM, 0, False)


def test_rows_only_many_histories_give_few_cuts() -> None:
    index = PrefixIndex(rows_only=True)
    for number in range(100):
        index.insert("m", np.concatenate([run(50), toks(1000 + number)]), ram(number, 51))
    index.insert("m", np.concatenate([run(50), toks(2000)]), live(3, 51))
    result = index.lookup(PromptView("m", np.concatenate([run(50), run(9, first=5000)])))
    assert [c.n_tokens for c in result.candidates] == [50] * 5
    assert [c.tier for c in result.candidates] == [Tier.LIVE] + [Tier.RAM] * 4


def test_images_with_equal_placeholders_do_not_share_past_the_image() -> None:
    index = PrefixIndex(rows_only=False)
    a = run(40)
    cat, dog = (InputMark(10, "cat"),), (InputMark(10, "dog"),)
    index.insert("m", a, ram(0, 30, inputs=cat))
    assert found(index.lookup(PromptView("m", a, inputs=cat))) == [(30, Tier.RAM, 0, False)]
    missed = index.lookup(PromptView("m", a, inputs=dog))
    assert missed == Lookup((), 10, MissReason.INPUT_CHANGED)
    # Before the image everything is shared; a mark beyond a boundary does not matter to it.
    index.insert("m", a, ram(1, 10, inputs=cat))
    assert found(index.lookup(PromptView("m", a, inputs=dog))) == [(10, Tier.RAM, 1, False)]
    assert found(index.lookup(PromptView("m", a)))[0] == (10, Tier.RAM, 1, False)


def test_input_numbers_are_given_back() -> None:
    index = PrefixIndex(rows_only=False)
    for i in range(50):
        index.insert("m", run(20), ram(0, 20, inputs=(InputMark(5, f"image {i}"),)))
        assert index.check() == []
    assert list(index._inputs._ids) == ["image 49"]
    index.remove((Tier.RAM, 0))
    assert not index._inputs._ids and not index._inputs._uses


# -- reasons ---------------------------------------------------------------------------------------
def test_reasons_of_a_miss() -> None:
    index = PrefixIndex(rows_only=False)
    a = run(1000)

    def reason(tokens: Tokens, scope: str = "m", **more: Any) -> MissReason | None:
        return index.lookup(PromptView(scope, tokens, **more)).reason

    assert reason(a) is MissReason.NO_CHECKPOINT
    index.insert("m", a, ram(0, 900))
    assert reason(a) is None
    assert reason(a, read=False) is MissReason.DISABLED
    assert reason(np.concatenate([a[:500], run(500, first=9000)])) is MissReason.PREFIX_CHANGED
    # A few tokens of template in common are no prefix worth naming.
    assert reason(np.concatenate([a[:20], run(980, first=9000)])) is MissReason.NO_CHECKPOINT
    assert reason(a, scope="other weights") is MissReason.IDENTITY
    index.remove((Tier.RAM, 0), ghost=MissReason.EVICTED)
    assert reason(a) is MissReason.EVICTED
    assert reason(np.concatenate([a[:500], run(500, first=9000)])) is MissReason.NO_CHECKPOINT
    index.insert("m", a, ram(1, 950))
    index.remove((Tier.RAM, 1), ghost=MissReason.QUARANTINED)
    assert reason(a) is MissReason.QUARANTINED, "the deepest ghost explains"
    # Back again, then gone without a reason: the ghost does not speak any more.
    index.insert("m", a, ram(2, 950))
    index.remove((Tier.RAM, 2))
    assert reason(a) is MissReason.EVICTED
    index.insert("m", a, ram(3, 900))
    index.remove((Tier.RAM, 3))
    assert reason(a) is MissReason.NO_CHECKPOINT


def test_ghosts_are_bounded_and_tell_images_apart() -> None:
    index = PrefixIndex(rows_only=False, max_ghosts=3)
    for i in range(5):
        index.insert("m", run(100, first=1000 * i), ram(i, 80, inputs=(InputMark(3, "cat"),)))
        index.remove((Tier.RAM, i), ghost=MissReason.EVICTED)
        assert index.check() == []
    reasons = [
        index.lookup(PromptView("m", run(100, first=1000 * i), inputs=(InputMark(3, "cat"),))).reason for i in range(5)
    ]
    assert reasons == [MissReason.NO_CHECKPOINT] * 2 + [MissReason.EVICTED] * 3
    assert index.lookup(PromptView("m", run(100, first=4000))).reason is MissReason.NO_CHECKPOINT
    assert PrefixIndex(rows_only=False, max_ghosts=0).check() == []


def test_a_miss_says_nothing_about_other_users() -> None:
    index = PrefixIndex(rows_only=False)
    index.insert(join_scope("weights A", "alice"), run(500), ram(0, 400))
    assert index.lookup(PromptView(join_scope("weights A", "bob"), run(500))).reason is MissReason.NO_CHECKPOINT
    assert index.lookup(PromptView(join_scope("weights B", "bob"), run(500))).reason is MissReason.NO_CHECKPOINT
    assert index.lookup(PromptView(join_scope("weights B", "alice"), run(500))).reason is MissReason.IDENTITY


# -- relations -------------------------------------------------------------------------------------
def test_a_shared_system_prompt_makes_families() -> None:
    """Eight conversations over one learned boundary: nine families, the boundary a branch point."""
    index = PrefixIndex(rows_only=False)
    system = run(6000)
    index.insert("m", system, ram(0, 4096))
    index.insert("m", system, ram(1, 6000))
    for i in range(8):
        for turn in range(2):
            history = np.concatenate([system, run(1000 * (turn + 1), first=100_000 * (i + 1))])
            index.insert("m", history, ram(10 * (i + 1) + turn, len(history)))
    key = [(Tier.RAM, n) for n in (0, 1, 10, 11, 20, 21)]
    assert [index.covered(k) for k in key] == [True, False, True, False, True, False]
    assert [index.is_branch_point(k) for k in key] == [False, True, False, False, False, False]
    assert index.family(key[0]) == index.family(key[1])
    families = {index.family((Tier.RAM, 10 * (i + 1) + turn)) for i in range(8) for turn in range(2)}
    assert len(families) == 8 and index.family(key[1]) not in families
    # A newcomer that goes on where conversation 1 stands joins it; one that leaves the boundary is new.
    grown = np.concatenate([system, run(5000, first=100_000)])
    assert index.place_of("m", grown).family == index.family(key[2])
    assert index.place_of("m", np.concatenate([system, run(10, first=77)])).family is None
    assert index.place_of("m", np.concatenate([system[:5000], run(10, first=77)])).family is None
    assert index.place_of("m", system[:5000]).family == index.family(key[0])


def test_an_anchor_is_not_covered_by_its_own_turn() -> None:
    """A tool loop's steps extend the user message; a template may drop all of them later."""
    index = PrefixIndex(rows_only=False)
    index.insert("m", run(2100), ram(0, 1000, anchor=True))
    index.insert("m", run(2100), ram(1, 1500))
    index.insert("m", run(2100), ram(2, 2100))
    assert not index.covered((Tier.RAM, 0)) and index.covered((Tier.RAM, 1))
    index.insert("m", run(3000), ram(3, 3000, anchor=True))
    assert index.covered((Tier.RAM, 0))


def test_retry_copies_and_live_frontiers_neither_cover_nor_branch() -> None:
    index = PrefixIndex(rows_only=False)
    index.insert("m", run(995), ram(0, 995))
    index.insert("m", run(1000), ram(1, 1000, covers=False, has_logits=True))
    index.insert("m", run(1100), live(0, 1100))
    assert not index.covered((Tier.RAM, 0))
    index.insert("m", np.concatenate([run(995), run(300, first=7000)]), ram(2, 1295))
    assert index.covered((Tier.RAM, 0)) and not index.is_branch_point((Tier.RAM, 0))
    assert index.parent((Tier.RAM, 1)) == (Tier.RAM, 0)


# -- structure -------------------------------------------------------------------------------------
def test_a_lookup_writes_nothing() -> None:
    index = PrefixIndex(rows_only=False)
    index.insert("m", run(500), ram(0, 500, inputs=(InputMark(3, "cat"),)))
    index.insert("m", np.concatenate([run(200), run(50, first=900)]), ram(1, 250))
    index.insert("m", run(100, first=5000), ram(2, 100))
    index.remove((Tier.RAM, 2), ghost=MissReason.EVICTED)

    def picture() -> object:
        tree = index._trees["m"]
        tracks, pending = [], [tree.root]
        while pending:
            t = pending.pop()
            tracks.append((t.start, t._array.tobytes(), list(t.places), list(t.forks), list(t.counts)))
            pending += t.kids.values()
        return tracks, dict(index._ghosts._reasons), dict(index._inputs._ids), dict(index._scopes)

    before = picture()
    for tokens in (run(500), run(300), run(100, first=5000), np.concatenate([run(210), run(9, first=1)])):
        for inputs in ((), (InputMark(3, "cat"),), (InputMark(3, "new"),)):
            index.lookup(PromptView("m", tokens, inputs=inputs))
            index.lookup(PromptView("unknown", tokens, inputs=inputs))
    assert picture() == before


def test_handed_over_tokens_may_change_afterwards() -> None:
    index = PrefixIndex(rows_only=False)
    mine = run(100)
    index.insert("m", mine, ram(0, 100))
    mine[:] = 0
    assert found(index.lookup(PromptView("m", run(120)))) == [(100, Tier.RAM, 0, False)]


def test_a_growing_conversation_stays_one_array() -> None:
    """A hundred turns, each with a dead end (a retry copy), match in two comparisons."""
    index = PrefixIndex(rows_only=False)
    history = run(50)
    for turn in range(100):
        history = np.concatenate([history, run(40, first=1000 * turn + 100_000)])
        index.insert("m", history, ram(2 * turn, len(history)))
        opening = np.concatenate([history, toks(7, 7, 7)])
        index.insert("m", opening, ram(2 * turn + 1, len(opening), has_logits=True))
    assert index.check() == []
    path = index._trees["m"].match(np.concatenate([history, toks(8)]))
    assert len(path) == 1
    # Without its dead ends it is one array of its tokens, once.
    for turn in range(100):
        index.remove((Tier.RAM, 2 * turn + 1))
    assert index.check() == [] and not index._trees["m"].root.kids
    assert len(index._trees["m"].root.tokens) == len(history)


@pytest.mark.parametrize("differs_at", [0, 1, 4095, 4096, 4097, 20_000, 99_999, None])
def test_long_runs_agree_up_to_the_first_difference(differs_at: int | None) -> None:
    index = PrefixIndex(rows_only=False)
    a = run(100_000)
    index.insert("m", a, ram(0, 100_000))
    b = np.concatenate([a, toks(5)])
    if differs_at is not None:
        b[differs_at] = 0
    assert index.lookup(PromptView("m", b)).common_prefix == (100_000 if differs_at is None else differs_at)


def test_an_entry_must_be_within_its_history() -> None:
    index = PrefixIndex(rows_only=False)
    for n in (0, 11):
        with pytest.raises(ValueError, match="covers"):
            index.insert("m", run(10), ram(0, n))
    assert len(index) == 0
