"""The design's figures about lookups, with their own numbers."""

from __future__ import annotations

import numpy as np
import pytest

from gufo_gguf.cache.index import Entry, PrefixIndex
from gufo_gguf.cache.types import PromptView, Tier
from tests.cache.test_index import found, live, ram, run


def test_figure_3_an_edit_restores_the_deepest_checkpoint_before_it() -> None:
    index = PrefixIndex(rows_only=False)
    a = run(8192)
    for number, n in enumerate((2048, 4096, 6144, 8192)):
        index.insert("m", a, ram(number, n))
    edited = a.copy()
    edited[7000] = 99_999  # token 7,001
    result = index.lookup(PromptView("m", edited))
    best = result.best
    assert best is not None and best.n_tokens == 6144 and result.common_prefix == 7000
    assert result.common_prefix - best.n_tokens == 856
    assert len(edited) - result.common_prefix == 1192
    assert [c.n_tokens for c in result.candidates] == [6144, 4096, 2048]


@pytest.mark.parametrize(
    ("edit_at", "restored", "prefilled", "unchanged"),
    [(85_385, 69_632, 25_810, 15_752), (47_734, 47_104, 48_338, 629)],
)
def test_the_measured_conversation(edit_at: int, restored: int, prefilled: int, unchanged: int) -> None:
    """An edit of one word (token number ``edit_at``) in 95,439 tokens; the edited prompt has 3 more."""
    index = PrefixIndex(rows_only=False)
    a = run(95_439)
    for number, n in enumerate((22_528, 47_104, 69_632, 94_208, 95_434, 95_439)):
        index.insert("m", a, ram(number, n, has_logits=n == 95_439))
    edited = np.concatenate([a[: edit_at - 1], run(4, first=200_000), a[edit_at:]]).astype(np.int32)
    result = index.lookup(PromptView("m", edited))
    assert result.best is not None and result.best.n_tokens == restored
    assert len(edited) - restored == prefilled
    assert result.common_prefix - restored == unchanged


def test_figure_8_two_depths_of_one_lookup() -> None:
    index = PrefixIndex(rows_only=False)
    parent = run(10_000)
    index.insert("m", parent, ram(0, 4096))
    index.insert("m", parent, live(0, 10_000))
    subagent = np.concatenate([parent[:6000], run(2000, first=50_000)])
    result = index.lookup(PromptView("m", subagent))
    assert result.best is not None and (result.best.n_tokens, result.common_prefix) == (4096, 6000)
    # The first subagent leaves a checkpoint where it stopped matching; the second restores it.
    index.insert("m", subagent, ram(1, 6000))
    second = np.concatenate([parent[:6000], run(900, first=70_000)])
    best = index.lookup(PromptView("m", second)).best
    assert best is not None and best.n_tokens == 6000


def test_figure_15_one_lookup_three_tiers() -> None:
    index = PrefixIndex(rows_only=False)
    a, b = run(8192), np.concatenate([run(4096), run(2048, first=30_000)])
    index.insert("m", a, ram(7, 4096))
    index.insert("m", a, Entry((Tier.DISK, 3), 8192))
    index.insert("m", a, live(0, 8192))
    index.insert("m", b, Entry((Tier.DISK, 4), 6144))
    result = index.lookup(PromptView("m", np.concatenate([a, run(100, first=60_000)])))
    assert found(result) == [(8192, Tier.LIVE, 0, False), (8192, Tier.DISK, 3, False), (4096, Tier.RAM, 7, False)]
    index.insert("m", a, ram(8, 8192))
    result = index.lookup(PromptView("m", np.concatenate([a, run(100, first=60_000)])))
    assert [c.tier for c in result.candidates] == [Tier.LIVE, Tier.RAM, Tier.DISK, Tier.RAM]


# -- boundaries ------------------------------------------------------------------------------------
