"""Cold against cold: what a slot did before must not show in what it does next.

No cache is involved.  A report about llama.cpp's HIP build says that the fused Gated-DeltaNet op
leaks state between requests on a reused slot (gfx1151); on a machine where that is so, these tests
fail, and neither our cache nor llama-server can be right there.  `gufo doctor` names this file.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path as File

import numpy as np
import pytest

from gufo_gguf.core import env
from gufo_gguf.models import qwen4exp
from gufo_gguf.models.shape import shape_geometry, write_shape
from gufo_gguf.models.tokenizer import N_TOKENS
from tests.qualification import harness
from tests.qualification.cases import VARIANTS, Case, Path
from tests.qualification.harness import Model
from tests.qualification.qualify import model_of

pytestmark = [pytest.mark.native, pytest.mark.slow]

REAL_HEADS = "flash-next heads"
"""Four layers with the heads of the real Flash-Next: the size of a head decides which kernel runs."""
MODELS = (*(variant.name for variant in VARIANTS), REAL_HEADS)
RECURRENT = tuple(v.name for v in VARIANTS if v.memory in ("hybrid", "hybrid_idx", "recurrent"))

TURNS = ((777, False), (1, False), (harness.N_UBATCH, True), (300, True), (40, False))
"""(tokens before the middle, beside a neighbour) of the conversations that use one slot in turn."""


def _model(name: str) -> Model:
    if name == REAL_HEADS:
        return Model(_real_heads())
    return model_of(Case(name, Path.SAME, "f16", 300, False, "f16"))


@cache
def _real_heads() -> File:
    path = env.cache_dir() / "models" / "flash-next-heads-4-layers.gguf"
    geometry = shape_geometry("flash-next", 4, n_layer=4, n_embd=320, n_vocab=N_TOKENS)
    assert (geometry.delta_v_heads, geometry.delta_dim) == (qwen4exp.FLASH_NEXT.delta_v_heads, 128)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_shape("flash-next", geometry, path, ftype="q8_0")
    return path


@pytest.mark.parametrize("name", MODELS)
def test_two_cold_runs_give_the_same_bytes(name: str) -> None:
    """The control that comes first: where this fails, no comparison of bytes means anything."""
    model = _model(name)
    with model.open() as backend:
        n_vocab = backend.info.n_vocab
    for n_tokens, joint in ((300, False), (300, True)):
        plan = harness.make_plan(name, n_tokens, joint, n_vocab)
        found = harness.compare(harness.uninterrupted(model, plan), harness.uninterrupted(model, plan))
        assert {what: n for what, n in found.items() if n} == {}


@pytest.mark.parametrize("name", MODELS)
def test_conversations_in_turn_on_one_slot_run_as_in_a_fresh_context(name: str) -> None:
    model, differences = _model(name), {}
    with model.open() as backend:
        for turn, (n_tokens, joint) in enumerate(TURNS):
            plan = harness.make_plan(f"turn {turn}", n_tokens, joint, backend.info.n_vocab)
            for who in plan.who:
                backend.truncate(who, 0)
            harness.execute(backend, 0, plan, plan.before)
            outcome = harness.proceed(backend, 0, plan)
            found = harness.compare(harness.uninterrupted(model, plan), outcome)
            differences[turn] = {what: n for what, n in found.items() if n}
    assert {turn: found for turn, found in differences.items() if found} == {}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_state_left_behind_would_show(name: str) -> None:
    """The control of the test above: with another conversation's recurrent state, every logit is others."""
    model = _model(name)
    with model.open() as backend:
        mine, other = (harness.make_plan(who, 300, False, backend.info.n_vocab) for who in ("mine", "other"))
        reference = harness.uninterrupted(model, mine)
        (left,) = harness.take(backend, 0, other)
        (checkpoint,) = harness.take(backend, 1, mine)
        leaked = dict(harness.private_parts(left.private, backend))
        for component, state in harness.private_parts(checkpoint.private, backend):
            if component == "position":
                continue
            kept = state.copy()
            assert harness.n_different(kept, leaked[component]) > 0
            state[:] = leaked[component]
            backend.truncate(2, 0)
            harness.restore(backend, 2, checkpoint)
            state[:] = kept
            logits = harness.execute(backend, 2, mine, mine.after)
            assert np.any(logits != reference.logits), component
