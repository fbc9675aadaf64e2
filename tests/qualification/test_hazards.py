"""What is known to go wrong with state in llama.cpp, and that we do not step into it.

Payload checks have a file of their own (test_refusals), negative controls too (test_controls).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path as File

import numpy as np
import pytest

from gufo_gguf.backend.base import Span
from gufo_gguf.backend.llama import LlamaBackend
from gufo_gguf.core.errors import BackendError, ContextFull, SlotNotReady, StateRejected
from tests.qualification import harness
from tests.qualification.cases import VARIANTS, Case, Path
from tests.qualification.harness import Model, Plan
from tests.qualification.qualify import ROOT, model_of

KINDS = ("llama", "qwen4exp", "qwen35", "mamba2", "gemma3-ring", "gemma3-full")
"""One variant for each memory kind, and the window both ways."""
ALL = tuple(variant.name for variant in VARIANTS)


def _model(variant: str) -> Model:
    return model_of(Case(variant, Path.SAME, "f16", 300, False, "f16"))


def _plan(backend: LlamaBackend, name: str, n_tokens: int = 300) -> Plan:
    return harness.make_plan(name, n_tokens, False, backend.info.n_vocab)


def _same(found: dict[str, int]) -> bool:
    return not any(found.values())


# -- a slot between begin and finish -------------------------------------------------------------


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("variant", KINDS)
def test_a_slot_being_restored_neither_runs_nor_gives_state(variant: str) -> None:
    model = _model(variant)
    with model.open() as backend:
        inventory = backend.info.inventory
        assert inventory is not None
        plan = _plan(backend, variant)
        (checkpoint,) = harness.take(backend, 0, plan)
        one, out = checkpoint.tokens[:1], np.empty(1 << 20, np.uint8)
        backend.begin_restore(1, checkpoint.tokens)
        for action in (
            lambda: backend.decode([Span(1, one, True)]),
            lambda: backend.decode([Span(0, one, True), Span(1, one, True)]),
            lambda: backend.logits(1),
            lambda: backend.position(1),
            lambda: backend.truncate(1, 0),
            lambda: backend.rows_out(1, 0, 0, out),
            lambda: backend.private_out(1, out),
            lambda: backend.metadata(1),
            lambda: backend.begin_restore(1, checkpoint.tokens),
        ):
            with pytest.raises(SlotNotReady, match="slot 1 is being restored"):
                action()
        # the refused joint pass left the other slot where it was
        assert backend.position(0) == 300
        backend.abort_restore(1)
        assert backend.position(1) == 0
        harness.restore(backend, 1, checkpoint)
        reference = harness.uninterrupted(model, plan)
        assert _same(harness.compare(reference, harness.proceed(backend, 1, plan)))


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("variant", KINDS)
def test_other_slots_run_while_one_is_restored(variant: str) -> None:
    """A long restore is done in pieces between the passes of others; neither side may notice."""
    model = _model(variant)
    with model.open() as backend:
        inventory = backend.info.inventory
        assert inventory is not None
        plan, other = _plan(backend, variant), _plan(backend, "other", 150)
        (checkpoint,) = harness.take(backend, 1, plan)
        harness.execute(backend, 2, other, other.before)
        others = iter(other.after)
        logits = []

        def let_the_other_run(n_passes: int = 2) -> None:
            logits.append(harness.execute(backend, 2, other, [next(others) for _ in range(n_passes)]))

        backend.begin_restore(1, checkpoint.tokens)
        let_the_other_run()
        if inventory.private_bytes:
            backend.load_private(1, checkpoint.private)
            let_the_other_run()
        for i, chunk in enumerate(checkpoint.chunks):
            n_rows = chunk.nbytes // inventory.row_bytes
            backend.load_rows(1, i * harness.CHUNK_ROWS, n_rows, chunk, n_rows)
            let_the_other_run()
        backend.finish_restore(1)
        logits.append(harness.execute(backend, 2, other, others))
        restored = harness.proceed(backend, 1, plan)
    reference, undisturbed = harness.uninterrupted(model, plan), harness.uninterrupted(model, other)
    assert _same(harness.compare(reference, restored))
    assert harness.n_different(np.concatenate(logits), undisturbed.logits) == 0


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("ending", ["finished", "given up"])
@pytest.mark.parametrize("variant", ["qwen4exp", "qwen35", "lfm2", "mamba2", "gemma3-ring"])
def test_recurrent_cells_that_move_during_a_restore(variant: str, ending: str) -> None:
    """A slot's recurrent cell is not its number, and joint passes move cells to lie side by side.

    Cells in order of first use: slot 3, slot 1 (being restored), slot 2.  Passes of 2 and 3 together
    then need cells next to each other, and the restored slot's lies in between.
    """
    model = _model(variant)
    with model.open() as backend:
        inventory = backend.info.inventory
        assert inventory is not None
        plan = _plan(backend, variant)
        others = harness.make_plan("others", 60, True, backend.info.n_vocab)
        with model.open() as source:
            (checkpoint,) = harness.take(source, 0, plan)
        alone = sum(1 for one in others.before if len(one) == 1)

        backend.decode([Span(3, plan.conversations[0][:1], False)])  # the first cell; emptied, it keeps no claim
        backend.truncate(3, 0)
        neighbour = [one for one in others.before[:alone] if one[0][0] == 1]
        subject = [one for one in others.before[:alone] if one[0][0] == 0]
        harness.execute(backend, 2, others, neighbour)
        backend.begin_restore(1, checkpoint.tokens, trusted=True)
        half = checkpoint.private.nbytes // 2
        backend.load_private_bytes(1, 0, checkpoint.private[:half])
        harness.execute(backend, 2, others, subject)
        harness.execute(backend, 2, others, others.before[alone:])  # beside each other
        backend.load_private_bytes(1, half, checkpoint.private[half:])
        harness.execute(backend, 2, others, others.after[:3])
        if ending == "finished":
            for i, chunk in enumerate(checkpoint.chunks):
                n_rows = chunk.nbytes // inventory.row_bytes
                backend.load_rows(1, i * harness.CHUNK_ROWS, n_rows, chunk, n_rows)
            backend.finish_restore(1)
            restored = harness.proceed(backend, 1, plan)
        else:
            backend.abort_restore(1)
        logits = harness.execute(backend, 2, others, others.after[3:])
        ends = tuple(harness.capture(backend, 2 + who, others.conversations[who]) for who in others.who)
    undisturbed = harness.uninterrupted(model, others)
    for a, b in zip(undisturbed.end, ends, strict=True):
        assert _same(harness.compare_states(a, b))
    assert harness.n_different(undisturbed.logits[-len(logits) :], logits) == 0
    if ending == "finished":
        assert _same(harness.compare(harness.uninterrupted(model, plan), restored))


# -- a slot used before --------------------------------------------------------------------------


def _cancelled_restore(backend: LlamaBackend, slot: int) -> None:
    (other,) = harness.take(backend, 3, _plan(backend, "cancelled", 400))
    backend.begin_restore(slot, other.tokens)
    for i, chunk in enumerate(other.chunks):
        n_rows = min(harness.CHUNK_ROWS, 400 - i * harness.CHUNK_ROWS)
        backend.load_rows(slot, i * harness.CHUNK_ROWS, n_rows, chunk, n_rows)
    if other.private.nbytes:
        backend.load_private(slot, other.private)
    backend.abort_restore(slot)


def _refused_restore(backend: LlamaBackend, slot: int) -> None:
    (other,) = harness.take(backend, 2, _plan(backend, "refused", 399))
    backend.begin_restore(slot, other.tokens)
    with pytest.raises(StateRejected):
        backend.finish_restore(slot)


EMPTIED: dict[str, Callable[[LlamaBackend, int], None]] = {
    "truncated": lambda backend, slot: backend.truncate(slot, 0),
    "all cleared": lambda backend, _: backend.clear_all(),
    "restore cancelled": _cancelled_restore,
    "restore refused": _refused_restore,
}


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("variant", ALL)
def test_an_emptied_slot_is_as_fresh_as_a_new_context(variant: str) -> None:
    """Cold against cold: a ring that kept its write head, a state that kept its bytes would show.

    A report about another backend says that a fused op leaks state between requests on a reused
    slot; this is the control for it.
    """
    model = _model(variant)
    with model.open() as backend:
        plan, dirt = _plan(backend, variant), _plan(backend, "dirt", 777)
        reference = harness.uninterrupted(model, plan)
        found = {}
        for way, empty in EMPTIED.items():
            for slot in (2, 3):
                backend.truncate(slot, 0)
            backend.truncate(1, 0)
            harness.execute(backend, 1, dirt, [*dirt.before, *dirt.after])
            empty(backend, 1)
            assert backend.position(1) == 0
            harness.execute(backend, 1, plan, plan.before)
            found[way] = harness.compare(reference, harness.proceed(backend, 1, plan))
    assert {way: differences for way, differences in found.items() if not _same(differences)} == {}


# -- logits and full contexts --------------------------------------------------------------------


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("variant", KINDS)
def test_logits_are_no_part_of_the_state(variant: str) -> None:
    """After a restore there are none until a token was decoded; those of before are not given."""
    with _model(variant).open() as backend:
        plan = _plan(backend, variant)
        (checkpoint,) = harness.take(backend, 0, plan)
        assert np.isfinite(backend.logits(0)).all()
        for slot in (0, 1):
            harness.restore(backend, slot, checkpoint)
            with pytest.raises(BackendError, match=f"no logits for slot {slot}"):
                backend.logits(slot)
            with pytest.raises(BackendError, match=f"no logits for slot {slot}"):
                backend.output_index(slot)
        backend.decode([Span(0, checkpoint.tokens[:1], True), Span(1, checkpoint.tokens[:1], False)])
        assert np.isfinite(backend.logits(0)).all()
        with pytest.raises(BackendError, match="no logits for slot 1"):
            backend.logits(1)
        backend.truncate(0, 0)
        with pytest.raises(BackendError, match="no logits for slot 0"):
            backend.logits(0)


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("variant", KINDS)
def test_a_full_context_refuses_and_stays_as_it_was(variant: str) -> None:
    with _model(variant).open(n_ctx=512, n_slots=2) as backend:
        n_ctx = backend.info.n_ctx
        tokens = harness.random_tokens("full", n_ctx + 1, backend.info.n_vocab)
        whole = Plan((tokens[:n_ctx],), tuple(harness.prefill(0, 0, n_ctx)), (), (n_ctx,))
        (full,) = harness.take(backend, 0, whole)
        logits = backend.logits(0)
        for spans in ([Span(0, tokens[:1], True)], [Span(0, tokens[:1], True), Span(1, tokens[:1], True)]):
            with pytest.raises(ContextFull, match=f"slot 0 is full.*{n_ctx}"):
                backend.decode(spans)
        assert backend.position(1) == 0
        assert _same(harness.compare_states(full, harness.capture(backend, 0, full.tokens)))
        assert harness.n_different(logits, backend.logits(0)) == 0
        with pytest.raises(ContextFull):
            backend.decode([Span(1, tokens[:200], False), Span(0, tokens[:1], False)][::-1])
        # the very last row is a restore point as well
        harness.restore(backend, 1, full)
        assert _same(harness.compare_states(full, harness.capture(backend, 1, full.tokens)))


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("variant", KINDS)
def test_refused_tokens_change_nothing(variant: str) -> None:
    model = _model(variant)
    with model.open() as backend:
        plan = _plan(backend, variant)
        harness.take(backend, 0, plan)
        for token in (-1, backend.info.n_vocab):
            with pytest.raises(ValueError, match="outside the vocabulary"):
                backend.decode([Span(0, np.array([3, token], np.int32), True)])
        with pytest.raises(ValueError, match="ascending"):
            backend.decode([Span(1, plan.conversations[0][:1], True), Span(0, plan.conversations[0][:1], True)])
        assert backend.position(1) == 0
        reference = harness.uninterrupted(model, plan)
        assert _same(harness.compare(reference, harness.proceed(backend, 0, plan)))


# -- calls that are never made -------------------------------------------------------------------


def _sources() -> dict[File, str]:
    files = [*(ROOT / "native/src").glob("*.cpp"), *(ROOT / "native/src").glob("*.h")]
    files += (ROOT / "gufo_gguf/backend").glob("*.py")
    return {file: file.read_text(encoding="utf-8") for file in files}


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("seq_cp(", "across streams the copy is pending until the next decode; rows read before are wrong"),
        ("SEQ_FLAGS_ON_DEVICE", "one device slot per sequence: an older state silently becomes the newer one"),
        ("seq_add(", "a context shift moves positions, and rows are no longer at theirs"),
        ("tensor_get(", "not ordered with the computation on a device; use transfer"),
        ("tensor_set(", "not ordered with the computation on a device; use transfer"),
    ],
)
def test_calls_that_break_the_state_are_not_made(call: str, why: str) -> None:
    sources = _sources()
    assert len(sources) > 10
    assert [str(file) for file, text in sources.items() if call in text] == [], why
