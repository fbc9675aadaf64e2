"""The oracles: exact on traces small enough to try every plan, and never above what a plan can do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.agent.bound import State, least_prefilled
from benchmarks.agent.oracle import Played, common_prefix, lcp

scipy = pytest.importorskip("scipy")

Prefix = tuple[int, ...]


def played(prompt: str, answer: str = "") -> Played:
    def tokens(text: str) -> np.ndarray:
        return np.array([ord(c) for c in text], np.int32)

    return Played(tokens(prompt), tokens(answer))


def cheapest(trace: list[Played], state: State, budget: int, n_keep_max: int) -> int:
    """The fewest prefilled tokens over all plans with one slot: a search over everything that can be kept."""
    plans: dict[frozenset[Prefix], int] = {frozenset(): 0}
    live: Prefix = ()
    for request in trace:
        prompt, sequence = tuple(request.prompt.tolist()), tuple(request.sequence.tolist())
        after: dict[frozenset[Prefix], int] = {}
        for kept, cost in plans.items():
            starts = [p for p in (*kept, live) if prompt[: len(p)] == p]
            cost += len(prompt) - max((len(p) for p in starts), default=0)
            passed = {sequence[:n] for n in range(1, len(sequence) + 1)} | kept
            for choice in choices(passed, state, budget, n_keep_max):
                after[choice] = min(cost, after.get(choice, cost))
        plans, live = after, sequence
    return min(plans.values())


def choices(passed: set[Prefix], state: State, budget: int, n_keep_max: int) -> Iterator[frozenset[Prefix]]:
    for n in range(n_keep_max + 1):
        for some in itertools.combinations(sorted(passed), n):
            rows = {p[:i] for p in some for i in range(1, len(p) + 1)}
            if n * state.private_bytes + len(rows) * state.row_bytes <= budget:
                yield frozenset(some)


def test_common_prefix_counts_what_no_history_covers() -> None:
    trace = [played("abcd", "xy"), played("abcdxyz"), played("abq"), played("abcd")]
    assert lcp(trace[0].sequence, trace[1].prompt) == 6
    assert common_prefix(trace) == [4, 1, 1, 0]  # a prompt that was seen whole costs nothing


def test_without_a_binding_budget_the_bound_is_the_common_prefix() -> None:
    trace = [played("abcdef"), played("abcxyz"), played("abcdefgh")]
    assert least_prefilled(trace, State(1, 1), 10**6, 1) == sum(common_prefix(trace)) == 6 + 3 + 2


def test_without_memory_only_the_live_state_helps() -> None:
    trace = [played("abcd", "e"), played("abcdefg"), played("abcdx")]
    assert least_prefilled(trace, State(1, 1), 0, 1) == pytest.approx(4 + 2 + 5)


def test_a_second_slot_keeps_a_second_history() -> None:
    trace = [played("aaaa"), played("bbbb"), played("aaaac"), played("bbbbc")]
    assert least_prefilled(trace, State(1, 1), 0, 1) == pytest.approx(4 + 4 + 5 + 5)
    assert least_prefilled(trace, State(1, 1), 0, 2) == pytest.approx(4 + 4 + 1 + 1)


def test_rows_alone_can_be_cut_where_a_whole_state_cannot() -> None:
    trace = [played("abcdef"), played("abcx")]
    assert least_prefilled(trace, State(1, 1), 0, 1) == pytest.approx(6 + 4)
    assert least_prefilled(trace, State(1, 0), 0, 1, rows_only=True) == pytest.approx(6 + 1)


def random_trace(rng: random.Random) -> list[Played]:
    """Histories of two letters that grow, fork and come back."""
    histories = ["".join(rng.choices("ab", k=3))]
    trace = []
    for _ in range(4):
        base = rng.choice(histories)
        prompt = base[: rng.randint(1, len(base))] + "".join(rng.choices("ab", k=rng.randint(1, 2)))
        answer = rng.choice(["", "a", "b"])
        trace.append(played(prompt, answer))
        histories.append(prompt + answer)
    return trace


def test_the_bound_is_never_above_the_best_plan() -> None:
    reached = 0
    for seed in range(40):
        rng = random.Random(seed)
        trace = random_trace(rng)
        state = State(1, rng.choice([1, 2, 4]))
        budget = rng.choice([2, 4, 6, 9])
        best = cheapest(trace, state, budget, n_keep_max=2 if state.private_bytes > 1 else 3)
        bound = least_prefilled(trace, state, budget, 1)
        assert sum(common_prefix(trace)) - 1e-6 <= bound <= best + 1e-6, (seed, bound, best)
        reached += bound > best - 1e-6
    assert reached >= 12  # and it is no idle bound: often it is the optimum itself
