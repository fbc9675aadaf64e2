"""Seeds of the simulation; see ``simulation.py``."""

import pytest

from gufo_gguf.backend.base import Logits
from gufo_gguf.cache.types import Lease
from gufo_gguf.engine.executor import Executor
from tests.engine.simulation import World


@pytest.mark.parametrize("block", range(20))
def test_ten_seeds(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        World(seed).run(50)


def test_seeds_that_failed_once() -> None:
    World(101_682, systems=False).run(100)  # a chunk bound to two files, both of which went


def test_a_seed_repeats_exactly() -> None:
    logs = []
    for _ in range(2):
        world = World(7)
        world.run(80)
        logs.append(world.lines)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 50


def test_the_simulation_restores_at_all() -> None:
    world = World(4, budget_bytes=1 << 20, n_slots=1, disk=False)
    world.run(200)
    assert world.restores > 5


def test_the_simulated_disk_is_written_damaged_and_read_after_restarts() -> None:
    restarts = written = restored = damaged = 0
    for seed in range(4):
        world = World(seed, disk=True)
        world.run(250)
        assert world.disk is not None
        world.disk.count()
        restarts += world.restarts
        written += world.disk.written
        restored += world.disk.restored
        damaged += world.disk.damaged
    assert min(restarts, written, restored, damaged) >= 3, (restarts, written, restored, damaged)


def test_logits_of_another_text_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle itself: a cache that keeps restored logits by slot and position is found out."""
    kept: dict[tuple[int, int], Logits] = {}
    right = Executor._logits

    def wrong(self: Executor, lease: Lease) -> Logits:
        place = (lease.slot, self._backend.position(lease.slot))
        return kept.setdefault(place, right(self, lease))

    monkeypatch.setattr(Executor, "_logits", wrong)
    with pytest.raises(AssertionError, match="another text's logits"):
        for seed in range(20):
            World(seed).run(100)
