"""A restore changes the cells a slot holds; what it held before must not matter.

    held    [ 0 ... m )      wanted   [ 0 ......... n )

Long enough that each cache's cells are set by a thread of their own, on the kinds with two row caches.
"""

from __future__ import annotations

import pytest

from tests.qualification import harness
from tests.qualification.cases import Case, Path
from tests.qualification.harness import Plan
from tests.qualification.qualify import model_of

pytestmark = [pytest.mark.native, pytest.mark.slow]

AT = 4_200
"""Above native/src/memory.cpp's threads_from."""
N_CTX = 4_608
HELD = (0, 1, 300, AT, AT + 200)


@pytest.mark.parametrize("variant", ["qwen4exp", "gemma3-full"])
def test_cells_over_what_a_slot_held_before(variant: str) -> None:
    model = model_of(Case(variant, Path.SAME, "f16", 300, False, "f16"))
    with model.open(N_CTX, 2) as backend:
        plan = harness.make_plan(variant, AT, False, backend.info.n_vocab)
        (checkpoint,) = harness.take(backend, 0, plan)
        found: dict[object, dict[str, int]] = {}
        for held in HELD:
            tokens = harness.random_tokens(f"held/{held}", held, backend.info.n_vocab)
            backend.truncate(1, 0)
            dirt = Plan((tokens,), tuple(harness.prefill(0, 0, held)), (), (held,))
            harness.execute(backend, 1, dirt, dirt.before)
            harness.restore(backend, 1, checkpoint, how=harness.Loading.BLOCKS)
            found[held] = harness.compare_states(checkpoint, harness.capture(backend, 1, checkpoint.tokens))
        outcome = harness.proceed(backend, 1, plan)
    found["continued"] = harness.compare(harness.uninterrupted(model, plan, N_CTX, 2), outcome)
    assert {held: differences for held, differences in found.items() if any(differences.values())} == {}
