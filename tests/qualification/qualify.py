"""One group of cases: a checkpoint, the uninterrupted run, and every path compared with it.

reference context   before ─ after                            (gives no state in between)
source context      before ─ checkpoint ┬─ slots 2, 3: fresh, then dirty
                                        └─ something else ─ same slot, same slot rows kept
other context       restore ─ after         (other n_ctx, other n_slots, other slot)
other process       restore ─ after
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path as File

from gufo_gguf.backend.llama import LlamaBackend
from tests.conftest import tiny_model_path
from tests.qualification import harness
from tests.qualification.cases import BY_NAME, Case, Path
from tests.qualification.harness import Checkpoint, Loading, Model, Outcome, Plan

ROOT = File(__file__).parents[2]
_DIRT = 150
"""Tokens by which the conversation that made a slot dirty is longer than the checkpoint."""
_SOURCE, _OTHER = 0, 2


@dataclass(frozen=True, slots=True)
class Job:
    """What another process needs to continue from checkpoints."""

    model: Model
    plan: Plan
    checkpoints: tuple[Checkpoint, ...]
    n_ctx: int
    n_slots: int
    base: int
    how: Loading


@dataclass(frozen=True, slots=True)
class Continued:
    identity: str
    restored: tuple[Checkpoint, ...]
    """Read back before continuing."""
    outcome: Outcome


def model_of(case: Case) -> Model:
    variant = BY_NAME[case.variant]
    return Model(tiny_model_path(variant.arch, case.weights), case.kv, variant.swa_full)


def run_case(case: Case) -> dict[str, int]:
    """Differences of one case by what differs; all must be 0."""
    return dict(run_group(case.group, [case.path]))[case.path]


def run_group(group: Case, paths: Iterable[Path]) -> Iterator[tuple[Path, dict[str, int]]]:
    """Differences of each path, in the order of ``Path``."""
    model, wanted = model_of(group), set(paths)
    with model.open() as source:
        inventory = source.info.inventory
        assert inventory is not None, source.info.uncacheable
        assert inventory.memory == BY_NAME[group.variant].memory
        plan = harness.make_plan(group.variant, group.n_tokens, group.joint, source.info.n_vocab)
        reference = harness.uninterrupted(model, plan)
        checkpoints = harness.take(source, _SOURCE, plan)
        for path in Path:
            if path in wanted:
                found = _continue(path, source, model, plan, checkpoints)
                yield path, _differences(reference, source, checkpoints, found)


def _continue(
    path: Path, source: LlamaBackend, model: Model, plan: Plan, checkpoints: tuple[Checkpoint, ...]
) -> Continued:
    if path is Path.PROCESS:
        return in_another_process(Job(model, plan, checkpoints, harness.N_CTX, 3, base=0, how=Loading.PARTS))
    if path is Path.CONTEXT:
        return carry_out(Job(model, plan, checkpoints, n_ctx=4096, n_slots=3, base=1, how=Loading.PARTS))
    base = _OTHER if path in (Path.FRESH, Path.DIRTY) else _SOURCE
    if path is Path.DIRTY:
        _make_dirty(source, base, plan)
    elif path in (Path.SAME, Path.KEPT):
        _move_on(source, base, plan)
    keep = [_rows_to_keep(n) if path is Path.KEPT else 0 for n in plan.at]
    how = Loading.BLOCKS if path in (Path.FRESH, Path.SAME) else Loading.ONE_BY_ONE
    return _resume(source, base, plan, checkpoints, keep, how)


def _rows_to_keep(n_tokens: int) -> int:
    """Whole chunks; a first chunk that is not full is kept to the last row."""
    return n_tokens // harness.CHUNK_ROWS * harness.CHUNK_ROWS or n_tokens


def _make_dirty(backend: LlamaBackend, base: int, plan: Plan) -> None:
    for who in plan.who:
        backend.truncate(base + who, 0)
        n = plan.at[who] + _DIRT
        tokens = harness.random_tokens(f"dirt/{who}", n, backend.info.n_vocab)
        dirt = Plan((tokens,), tuple(harness.prefill(0, 0, n)), (), (n,))
        harness.execute(backend, base + who, dirt, dirt.before)


def _move_on(backend: LlamaBackend, base: int, plan: Plan) -> None:
    """Let every slot go on with tokens of its own, so that what lies behind the checkpoint is wrong."""
    tokens = tuple(harness.random_tokens(f"elsewhere/{who}", 60, backend.info.n_vocab) for who in plan.who)
    other = Plan(tokens, (), (), ())
    for who in plan.who:
        harness.execute(backend, base, other, harness.prefill(who, 0, 50))
    harness.execute(backend, base, other, harness.decodes([50] * len(tokens), 10))


def _resume(
    backend: LlamaBackend, base: int, plan: Plan, checkpoints: tuple[Checkpoint, ...], keep: list[int], how: Loading
) -> Continued:
    for who in plan.who:
        harness.restore(backend, base + who, checkpoints[who], keep_rows=keep[who], how=how)
    restored = tuple(harness.capture(backend, base + who, checkpoints[who].tokens) for who in plan.who)
    return Continued(backend.info.identity, restored, harness.proceed(backend, base, plan))


def carry_out(job: Job) -> Continued:
    with job.model.open(job.n_ctx, job.n_slots) as backend:
        return _resume(backend, job.base, job.plan, job.checkpoints, [0] * len(job.plan.at), job.how)


def in_another_process(job: Job) -> Continued:
    with tempfile.TemporaryDirectory() as folder:
        question, answer = File(folder, "job"), File(folder, "answer")
        question.write_bytes(pickle.dumps(job))
        worker = [sys.executable, "-m", "tests.qualification.worker", str(question), str(answer)]
        done = subprocess.run(worker, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the other process failed:\n{done.stderr[-4000:]}")
        found = pickle.loads(answer.read_bytes())
        assert isinstance(found, Continued)
        return found


def _differences(
    reference: Outcome, source: LlamaBackend, checkpoints: tuple[Checkpoint, ...], found: Continued
) -> dict[str, int]:
    result = harness.compare(reference, found.outcome)
    result["identity"] = int(found.identity != source.info.identity)
    for before, after, end in zip(checkpoints, found.restored, found.outcome.end, strict=True):
        for name, n in harness.compare_states(before, after).items():
            result[f"restored {name}"] = result.get(f"restored {name}", 0) + n
        result["history"] = result.get("history", 0) + harness.n_rewritten(source, before, end)
    return result
