"""What a large context takes, told from two small ones."""

from __future__ import annotations

import pytest

from gufo_gguf.backend.fit import CELL_BYTES, SMALL_CELLS, context_bytes


@pytest.mark.parametrize("n_slots", [1, 4])
def test_cells_cost_the_same_everywhere(n_slots: int) -> None:
    made: list[int] = []

    def host_bytes(n: int) -> int:
        made.append(n)
        return 5_000_000 + n * n_slots * 1000

    n = 1 << 20
    assert context_bytes(host_bytes, n, n_slots) == 5_000_000 + n * n_slots * 1000 + CELL_BYTES * n_slots * (
        n - SMALL_CELLS
    )
    assert max(made) <= 2 * SMALL_CELLS, "nothing large is made in order to know"


def test_a_state_of_fixed_size_still_pays_for_its_cells() -> None:
    assert context_bytes(lambda n: 7, 1 << 30, 1) > 60 << 30
