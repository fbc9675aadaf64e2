"""Negative controls: a wrong state must show.  Each passes only when the comparison finds bytes.

Without these, 0 differing bytes could mean that nothing is being compared, or that the models do
not look at their state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from gufo_gguf.backend.llama import LlamaBackend
from gufo_gguf.cache.types import Tokens
from gufo_gguf.core.errors import StateRejected
from tests.qualification import harness
from tests.qualification.cases import BY_NAME, VARIANTS, Case, Path
from tests.qualification.harness import Checkpoint, Outcome, Plan
from tests.qualification.qualify import model_of

pytestmark = [pytest.mark.native, pytest.mark.slow]

AT = 600
"""Two chunks and a tail; more than the indexer's top-k and the ring of a sliding window."""
TARGET = 2


class Run:
    """One variant with its reference, a checkpoint, and a context to restore into."""

    def __init__(self, variant: str, at: int = AT) -> None:
        self.model = model_of(Case(variant, Path.SAME, "f16", at, False, "f16"))
        self.backend: LlamaBackend = self.model.open()
        self.plan: Plan = harness.make_plan(variant, at, False, self.backend.info.n_vocab)
        self.reference: Outcome = harness.uninterrupted(self.model, self.plan)
        (self.checkpoint,) = harness.take(self.backend, 0, self.plan)

    def differences(self, checkpoint: Checkpoint, announce: Tokens | None = None) -> dict[str, int]:
        """What the comparison finds after continuing from a checkpoint that was tampered with."""
        self.backend.truncate(TARGET, 0)
        harness.restore(self.backend, TARGET, checkpoint, announce=announce)
        return harness.compare(self.reference, harness.proceed(self.backend, TARGET, self.plan))


@pytest.fixture
def opened() -> Iterator[list[Run]]:
    """Runs made by a test, closed after it."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.backend.close()


def _start(opened: list[Run], variant: str) -> Run:
    opened.append(Run(variant))
    run = opened[-1]
    # the untouched checkpoint first: what is found below is then the tampering's doing
    assert {name: n for name, n in run.differences(run.checkpoint).items() if n} == {}
    return run


def _zeroed(run: Run, component: str) -> Checkpoint:
    private = run.checkpoint.private.copy()
    chunks = tuple(chunk.copy() for chunk in run.checkpoint.chunks)
    parts = dict(harness.private_parts(private, run.backend))
    if component in parts:
        assert parts[component].any(), f"{component} is all zero in the checkpoint: zeroing it proves nothing"
        parts[component][:] = 0
    for chunk in chunks:
        for name, rows in harness.row_parts(chunk, run.backend):
            if name == component:
                rows[:] = 0
    return dataclasses.replace(run.checkpoint, private=private, chunks=chunks)


@pytest.mark.parametrize("variant", [v.name for v in VARIANTS if v.name not in ("llama", "gemma3-full")])
def test_each_private_component_zeroed_shows_in_the_logits(opened: list[Run], variant: str) -> None:
    run = _start(opened, variant)
    names = [name for name, _ in harness.private_parts(run.checkpoint.private, run.backend)]
    assert names[0] == "position" and len(names) > 1
    unseen = []
    for name in names:
        try:
            if not run.differences(_zeroed(run, name))["logits"]:
                unseen.append(name)
        except StateRejected:
            # what cannot be a state at all is refused before it runs
            assert name in ("position", "window_cells")
    assert unseen == []


@pytest.mark.parametrize("variant", [v.name for v in VARIANTS if v.has_kv])
def test_each_row_component_zeroed_shows_in_the_logits(opened: list[Run], variant: str) -> None:
    """Indexer keys among them."""
    run = _start(opened, variant)
    names = [name for name, _ in harness.row_parts(run.checkpoint.chunks[0], run.backend)]
    assert any("idx" in name or "indexer" in name for name in names) == (BY_NAME[variant].memory == "hybrid_idx")
    unseen = [name for name in names if not run.differences(_zeroed(run, name))["logits"]]
    assert unseen == []


@pytest.mark.parametrize("variant", [v.name for v in VARIANTS if v.has_kv])
def test_a_chunk_of_the_same_tokens_from_other_pass_shapes_shows_in_the_logits(opened: list[Run], variant: str) -> None:
    """Equal tokens do not prove equal bytes: rows are shared by provenance, never by token hash."""
    run = _start(opened, variant)
    end = 2 * harness.CHUNK_ROWS
    other = run.model.open()
    with other:
        # the same tokens, in passes of other lengths
        shapes = [*harness.prefill(0, 0, 200, 50), *harness.prefill(0, 200, 300, 37), *harness.prefill(0, 300, end, 1)]
        harness.execute(other, 0, run.plan, shapes)
        foreign = harness.capture(other, 0, run.plan.conversations[0][:end])
    chunks = (run.checkpoint.chunks[0], foreign.chunks[1], *run.checkpoint.chunks[2:])
    assert harness.n_different(foreign.chunks[1], run.checkpoint.chunks[1]) > 0
    assert run.differences(dataclasses.replace(run.checkpoint, chunks=chunks))["logits"] > 0


@pytest.mark.parametrize("variant", ["qwen4exp"])
def test_cells_that_carry_other_tokens_show_in_the_logits(opened: list[Run], variant: str) -> None:
    """qwen4exp hashes the tokens of the cells before it (PLE n-grams): they are part of the state."""
    run = _start(opened, variant)
    lie = (run.checkpoint.tokens + 1) % run.backend.info.n_vocab
    found = run.differences(run.checkpoint, announce=lie.astype(np.int32))
    assert found["logits"] > 0
    assert found["cells"] > 0


def test_one_flipped_bit_of_a_row_is_found() -> None:
    """The comparison itself: any byte, any field."""
    a = np.arange(64, dtype=np.uint8)
    b = a.copy()
    b[17] ^= 1
    assert harness.n_different(a, b) == 1
    assert harness.n_different(a, a[:-1]) == 64
    assert harness.n_different(np.array([0.0], np.float32), np.array([-0.0], np.float32)) == 1
