"""A request that gets no slot although all are idle starts cold, and never waits for ever."""

from gufo_gguf.cache.types import PromptView
from gufo_gguf.engine.job import Job, Phase
from gufo_gguf.engine.types import Finished, FinishReason, GenerateRequest, as_tokens
from tests.engine.simulation import World


def _job(ended: list[Finished]) -> Job:
    tokens = as_tokens(range(20))
    take = lambda e: ended.append(e) if isinstance(e, Finished) else None  # noqa: E731
    return Job(GenerateRequest(tokens, max_tokens=2), PromptView("s", tokens), take)


def test_a_restore_that_cannot_come_is_not_waited_for() -> None:
    world, ended = World(1, n_slots=1), []
    acquire = world.manager.acquire
    world.manager.acquire = lambda prompt, lookup: None if prompt.read else acquire(prompt, lookup)  # type: ignore[method-assign]
    world.scheduler.add(_job(ended))
    for _ in range(50):
        world.scheduler.step()
    assert [e.reason for e in ended] == [FinishReason.LENGTH]


def test_no_slot_at_all_is_an_error_of_that_request() -> None:
    world, ended = World(1, n_slots=1), []
    world.manager.acquire = lambda prompt, lookup: None  # type: ignore[method-assign]
    job = _job(ended)
    world.scheduler.add(job)
    for _ in range(5):
        world.scheduler.step()
    assert job.phase is Phase.DONE and ended[0].reason is FinishReason.ERROR
    assert world.scheduler.idle()


def test_a_sampler_that_cannot_be_made_ends_only_its_own_job() -> None:
    world, bad, good = World(1, n_slots=1), [], []
    make, world.scheduler._make_sampler = world.scheduler._make_sampler, lambda request: 1 // 0
    world.scheduler.add(_job(bad))
    world.scheduler.step()
    world.scheduler._make_sampler = make
    world.scheduler.add(_job(good))
    for _ in range(50):
        world.scheduler.step()
    assert [e.reason for e in bad] == [FinishReason.ERROR]
    assert [e.reason for e in good] == [FinishReason.LENGTH]
