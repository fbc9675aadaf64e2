"""The buffer pool: memory behind ids, recycled by size, never more than the budget in spare."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gufo_gguf.cache.types import BufferId
from gufo_gguf.engine.pool import BufferPool, rounded


class Source:
    """Counts what was allocated; every allocation is distinct memory."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, n_bytes: int) -> np.ndarray:
        self.sizes.append(n_bytes)
        return np.zeros(n_bytes, dtype=np.uint8)


def test_a_buffer_keeps_its_bytes_until_it_is_freed() -> None:
    pool = BufferPool(Source(), 1 << 20)
    pool.get(BufferId(1), 1000)[:] = 7
    pool.get(BufferId(2), 1000)[:] = 9
    assert (pool.get(BufferId(1), 1000) == 7).all()
    pool.free([BufferId(1)])
    assert pool.used() == {BufferId(2)}


def test_freed_memory_of_one_size_is_used_again() -> None:
    source = Source()
    pool = BufferPool(source, 1 << 20)
    for i in range(50):
        pool.get(BufferId(i), 5000 + i)  # one size class
        pool.free([BufferId(i)])
    assert len(source.sizes) == 1


def test_spare_memory_of_other_sizes_goes_before_the_budget_is_exceeded() -> None:
    pool = BufferPool(Source(), 10 * rounded(100_000))
    for i in range(10):
        pool.get(BufferId(i), 100_000)
    pool.free([BufferId(i) for i in range(10)])
    pool.get(BufferId(99), 300_000)
    assert pool.held_bytes <= 10 * rounded(100_000)


def test_prepared_memory_makes_the_next_use_free() -> None:
    source = Source()
    pool = BufferPool(source, 1 << 30)
    while pool.prepare({200_000: 3}, step_bytes=200_000):
        pass
    n = len(source.sizes)
    assert n == 3
    for i in range(3):
        pool.get(BufferId(i), 200_000)
    assert len(source.sizes) == n


def test_prepare_stops_at_the_budget() -> None:
    pool = BufferPool(Source(), rounded(200_000))
    assert pool.prepare({200_000: 5}, 1 << 30) == rounded(200_000)
    assert pool.prepare({200_000: 5}, 1 << 30) == 0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 60_000)), max_size=60))
def test_no_two_live_buffers_share_memory(steps: list[tuple[int, int]]) -> None:
    pool = BufferPool(Source(), 1 << 18)
    live: dict[int, int] = {}
    for ident, n_bytes in steps:
        if ident in live:
            assert (pool.get(BufferId(ident), live[ident]) == ident).all()
            pool.free([BufferId(ident)])
            del live[ident]
        else:
            pool.get(BufferId(ident), n_bytes)[:] = ident
            live[ident] = n_bytes
    for ident, n_bytes in live.items():
        assert (pool.get(BufferId(ident), n_bytes) == ident).all()
