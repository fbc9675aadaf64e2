"""Memories without private state are cut anywhere: live slots and stored checkpoints, exactly.

    computed   [ ...... passes ...... )[ single decodes )
    cut                   n                    n            continue with other tokens

Where a pass ends at n, the reference is a run of the same passes that stopped there.  Inside a
pass there is no such run; there both ways of cutting must give the same bytes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gufo_gguf.core.errors import UnsupportedMemory
from tests.conftest import tiny_model_path
from tests.qualification import harness
from tests.qualification.cases import BY_NAME, VARIANTS, Case, Path
from tests.qualification.harness import Loading, Model, Outcome, Pass, Plan
from tests.qualification.qualify import model_of

pytestmark = [pytest.mark.native, pytest.mark.slow]

ROWS_ONLY = ("llama", "gemma3-full")
PREFILLED, COMPUTED = 512, 560
PASS_ENDS = (128, 256, 384, 512, 513, 537, 559)
INSIDE = (1, 100, 255, 257, 300, 511)


def _model(variant: str, kv: str) -> Model:
    return model_of(Case(variant, Path.SAME, kv, COMPUTED, False, "f16"))


def _passes(end: int) -> list[Pass]:
    """The passes of the computed part, up to ``end``."""
    prefilled = harness.prefill(0, 0, min(end, PREFILLED), harness.N_UBATCH)
    return prefilled + harness.prefill(0, PREFILLED, end, 1)


def _plans(n_cut: int, n_vocab: int) -> tuple[Plan, Plan]:
    """(the run that goes on to COMPUTED, the run that leaves it at n_cut with other tokens)."""
    first = harness.random_tokens("cut", COMPUTED, n_vocab)
    branch = harness.make_plan("branch", n_cut, False, n_vocab)
    tokens = branch.conversations[0].copy()
    tokens[:n_cut] = first[:n_cut]
    computed = Plan((first,), tuple(_passes(COMPUTED)), (), (COMPUTED,))
    return computed, dataclasses.replace(branch, conversations=(tokens,), before=tuple(_passes(n_cut)))


def _cut_live_and_stored(model: Model, n_cut: int, how: Loading) -> tuple[Plan, Outcome, Outcome, Outcome]:
    with model.open() as backend:
        computed, branch = _plans(n_cut, backend.info.n_vocab)
        (checkpoint,) = harness.take(backend, 0, computed)
        harness.restore(backend, 1, checkpoint, n_tokens=n_cut, how=how)
        stored = harness.proceed(backend, 1, branch)
        # restored whole and cut before anything was decoded
        harness.restore(backend, 2, checkpoint)
        backend.truncate(2, n_cut)
        both = harness.proceed(backend, 2, branch)
        backend.truncate(0, n_cut)
        live = harness.proceed(backend, 0, branch)
    return branch, live, stored, both


def _nothing(found: dict[str, int]) -> bool:
    return not any(found.values())


@pytest.mark.parametrize("n_cut", PASS_ENDS)
@pytest.mark.parametrize("variant", ROWS_ONLY)
@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_cut_at_the_end_of_a_pass_is_the_run_that_stopped_there(variant: str, kv: str, n_cut: int) -> None:
    model = _model(variant, kv)
    how = Loading.BLOCKS if kv == "f16" else Loading.PARTS
    branch, *outcomes = _cut_live_and_stored(model, n_cut, how)
    reference = harness.uninterrupted(model, branch)
    for outcome in outcomes:
        assert _nothing(harness.compare(reference, outcome))


@pytest.mark.parametrize("n_cut", INSIDE)
@pytest.mark.parametrize("variant", ROWS_ONLY)
def test_cut_inside_a_pass_is_the_same_live_and_stored(variant: str, n_cut: int) -> None:
    _, live, stored, both = _cut_live_and_stored(_model(variant, "f16"), n_cut, Loading.ONE_BY_ONE)
    assert _nothing(harness.compare(live, stored))
    assert _nothing(harness.compare(live, both))


@pytest.mark.parametrize("variant", [v.name for v in VARIANTS if v.name not in ROWS_ONLY])
def test_private_state_forbids_cutting_and_a_refusal_changes_nothing(variant: str) -> None:
    model = _model(variant, "f16")
    with model.open() as backend:
        plan = harness.make_plan(variant, 300, False, backend.info.n_vocab)
        (checkpoint,) = harness.take(backend, 0, plan)
        harness.restore(backend, 1, checkpoint)
        reference = harness.uninterrupted(model, plan)
        for slot in (0, 1):
            # right after a restore llama.cpp itself may allow this, and leave garbage
            for n_tokens in (299, 256, 1):
                with pytest.raises(UnsupportedMemory, match=BY_NAME[variant].memory):
                    backend.truncate(slot, n_tokens)
            assert _nothing(harness.compare(reference, harness.proceed(backend, slot, plan)))


def test_a_window_as_large_as_the_context_never_wraps_and_is_rows() -> None:
    model = Model(tiny_model_path("gemma3"))
    with model.open(n_ctx=harness.CHUNK_ROWS, n_slots=2) as backend:
        assert backend.info.inventory is not None and backend.info.inventory.rows_only
        tokens = harness.random_tokens("short", 200, backend.info.n_vocab)
        plan = Plan((tokens,), tuple(harness.prefill(0, 0, 150)), tuple(harness.prefill(0, 150, 200, 25)), (150,))
        (checkpoint,) = harness.take(backend, 0, plan)
        harness.restore(backend, 1, checkpoint)
        reference = harness.uninterrupted(model, plan, n_ctx=harness.CHUNK_ROWS, n_slots=2)
        assert _nothing(harness.compare(reference, harness.proceed(backend, 1, plan)))
        assert np.isfinite(reference.logits).all()
