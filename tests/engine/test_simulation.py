"""Seeds of the simulation; see ``simulation.py``."""

import pytest

from tests.engine.simulation import World


@pytest.mark.parametrize("block", range(20))
def test_ten_seeds(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        World(seed).run(60)


def test_a_seed_repeats_exactly() -> None:
    logs = []
    for _ in range(2):
        world = World(7)
        world.run(80)
        logs.append(world.lines)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 50


def test_the_simulation_restores_at_all() -> None:
    world = World(3, budget_bytes=1 << 20, n_slots=1)
    world.run(200)
    assert world.backend.restores > 5
