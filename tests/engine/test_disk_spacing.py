"""What the disk tier asks before it writes: is the state there already, is one close before it?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gufo_gguf.cache.durable import Durable, Export
from gufo_gguf.cache.tokentree import Track
from gufo_gguf.cache.types import CheckpointId, InputMark, MissReason, Origin, Tokens
from gufo_gguf.engine import disk_tier
from gufo_gguf.engine.disk_tier import DiskTier
from tests.engine.simulation import World

CAT, DOG = (InputMark(5, "cat"),), (InputMark(5, "dog"),)


def tier_of(w: World) -> tuple[DiskTier, Durable]:
    assert w.disk is not None and w.disk.tier is not None
    return w.disk.tier, w.manager.durable


def parts(tokens: Tokens, inputs: tuple[InputMark, ...] = (), scope: str = "m") -> Export:
    return Export(scope, tokens, inputs, (), None, None, None)


def add(durable: Durable, tokens: Tokens, inputs: tuple[InputMark, ...] = (), scope: str = "m") -> int:
    return durable.add(scope, tokens, inputs, Origin.PROMPT, has_logits=False)


def test_the_deepest_state_of_exactly_this_history() -> None:
    tier, durable = tier_of(World(6, disk=True))
    tokens = np.arange(100, dtype=np.int32)
    assert tier._deepest(parts(tokens)) == 0
    other = tokens.copy()
    other[30] = 999
    add(durable, other[:90])
    add(durable, tokens[:20])
    number = add(durable, tokens[:60])
    add(durable, tokens[:80], scope="another model")
    for n, deepest in ((100, 60), (60, 60), (59, 20), (20, 20), (19, 0)):
        assert tier._deepest(parts(tokens[:n])) == deepest, n
    longer = np.concatenate([tokens, tokens])
    add(durable, longer)
    assert tier._deepest(parts(tokens)) == 60, "a deeper state is another one"
    durable.remove(number, MissReason.EVICTED)
    assert tier._deepest(parts(tokens)) == 20


def test_the_same_placeholders_with_another_image_are_another_history() -> None:
    tier, durable = tier_of(World(6, disk=True))
    tokens = np.zeros(40, dtype=np.int32)
    add(durable, tokens[:30], CAT)
    assert tier._deepest(parts(tokens, CAT)) == 30
    assert tier._deepest(parts(tokens, DOG)) == 0


def test_what_waits_counts_too() -> None:
    tier, durable = tier_of(World(6, disk=True))
    tokens = np.arange(100, dtype=np.int32)
    add(durable, tokens[:20])
    for where, n in ((tier._queued, 40), (tier._wanted, 50), (tier._wanted, 10)):
        where.append(disk_tier._Write(CheckpointId(n), "m", tokens[:n], Origin.PROMPT))
    assert tier._deepest(parts(tokens)) == 50
    assert tier._deepest(parts(tokens[:45])) == 40
    assert tier._deepest(parts(tokens[:45], scope="n")) == 0


@pytest.mark.parametrize("shared", [0, 500])
def test_the_question_costs_as_much_among_ten_thousand_as_among_ten(
    shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in comparisons of token arrays."""
    count = {"comparisons": 0}

    def counted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            count["comparisons"] += 1
            return function(*args)

        return call

    def cost(n: int) -> int:
        tier, durable = tier_of(World(6, disk=True))
        common = np.arange(shared, dtype=np.int32)
        for i in range(n):
            own = np.concatenate([common, np.array([1000 + i], dtype=np.int32), common])
            add(durable, own)
        asked = np.concatenate([common, np.array([1000 + n // 2], dtype=np.int32), common, common + 7])
        count["comparisons"] = 0
        with monkeypatch.context() as patch:
            patch.setattr(Track, "agree", counted(Track.agree))
            patch.setattr(disk_tier, "_begins", counted(disk_tier._begins))
            assert tier._deepest(parts(asked)) == 2 * shared + 1
        return count["comparisons"]

    assert 0 < cost(10_000) <= cost(10) <= 4
