"""Restored and continued equals never stopped, byte for byte: a pairwise selection of the matrix.

Each test id names the whole case; ``make qualify`` runs all combinations.
"""

from __future__ import annotations

import itertools

import pytest

from tests.qualification import cases
from tests.qualification.cases import Case
from tests.qualification.qualify import run_case

SELECTION = cases.pairwise()


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("case", SELECTION, ids=str)
def test_continues_as_if_never_stopped(case: Case) -> None:
    differences = run_case(case)
    assert {name: n for name, n in differences.items() if n} == {}


def test_the_selection_holds_every_pair_of_settings() -> None:
    def settings(case: Case) -> tuple[object, ...]:
        return (case.variant, case.path, case.kv, case.position, case.joint, case.weights)

    held = {pair for case in SELECTION for pair in itertools.combinations(enumerate(settings(case)), 2)}
    everything = list(cases.full(cases.WEIGHTS))
    wanted = {pair for case in everything for pair in itertools.combinations(enumerate(settings(case)), 2)}
    assert wanted - held == set()
    assert len(SELECTION) < len(everything) / 10
    assert len(set(map(str, SELECTION))) == len(SELECTION)
