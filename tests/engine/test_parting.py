"""A conversation's live state is kept when another conversation takes its slot."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.agent.simulated import SHAPES, Options, Simulation
from benchmarks.agent.trace import Ask, Sizes, Tokens, Workload
from benchmarks.agent.workloads import side_requests
from gufo_gguf.core.errors import BackendError

SMALL = Workload("small", "x", "one slot", side_requests, 1, 4)


def text(seed: int, n: int) -> Tokens:
    return np.random.default_rng(seed).integers(20, 500, n, dtype=np.int32)


def world(copies: float | None = None, shape: str = "tiny") -> Simulation:
    return Simulation(SMALL, Sizes(0.5), Options(SHAPES[shape], copies=copies))


def play(at: Simulation, tokens: Tokens, n_answer: int = 40) -> tuple[int, Tokens]:
    """Tokens reused, and the history that the client sends next."""
    ((job, answer),) = at.run((Ask("x", "turn", tokens=tokens, n_answer=n_answer),))
    assert at.manager.check() == []
    return job.n_reused, np.concatenate([tokens, np.array(answer, np.int32), text(99, 30)])


def test_the_end_of_an_answer_is_kept_when_its_slot_is_taken() -> None:
    at = world()
    first = text(1, 1500)
    _, again = play(at, first)
    play(at, text(2, 1500))
    assert play(at, again)[0] == len(first) + 39, "all but the token that was sampled last"


def test_nothing_is_kept_of_a_conversation_that_goes_on_in_its_slot() -> None:
    at = world()
    _, again = play(at, text(1, 1500))
    n, _ = play(at, again)
    assert n == 1539
    assert "parting" not in {str(row.origin) for row in at.manager.checkpoints()}


def test_a_title_is_not_worth_its_private_state() -> None:
    at = world(shape="flash-next")
    play(at, text(1, 400))  # 4,272 rows of private state
    play(at, text(2, 1500))
    assert "parting" not in {str(row.origin) for row in at.manager.checkpoints()}


def test_what_a_request_restores_is_never_given_up_for_what_it_overwrites() -> None:
    at = world(copies=1.2)
    play(at, text(1, 1500))
    for seed in (2, 3):
        _, other = play(at, text(seed, 1400))
    n, _ = play(at, other)
    assert n >= 1400


def test_a_copy_that_fails_costs_the_copy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    at = world()
    first = text(1, 1500)
    _, again = play(at, first)
    parted = at.manager.reserve_parting
    private_out = at.backend.private_out

    def failing(*arguments: object) -> object:
        ticket = parted(*arguments)  # type: ignore[arg-type]
        if ticket is not None:

            def fail(*_: object) -> None:
                monkeypatch.setattr(at.backend, "private_out", private_out)
                raise BackendError("no copy")

            monkeypatch.setattr(at.backend, "private_out", fail)
        return ticket

    monkeypatch.setattr(at.manager, "reserve_parting", failing)
    play(at, text(2, 1500))
    monkeypatch.setattr(at.manager, "reserve_parting", parted)
    assert play(at, again)[0] == len(first), "the prompt's own checkpoint is left"
