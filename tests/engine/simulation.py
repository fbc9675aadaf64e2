"""A seeded simulation of the real manager, scheduler and executor over the fake backend.

    python -m tests.engine.simulation --seeds 1000 --ops 1000      (one million operations)

Random conversations, edits, forks, resends, cancels and idle time, with budgets from "nothing fits"
to "everything fits" and 1 to 4 slots; in most worlds with a disk tier, whose server is stopped, killed
or loses its power now and then, whose files are damaged and whose disk fills up.  What must hold:

- every state that a slot starts from was computed: its chain link was seen at a decode;
- the backend never has to refuse what the cache gives it (the fake proves that rows and private state
  belong together): damage is found before, by checksums;
- stored next-token logits are those that were computed for exactly the prompt they answer;
- after every operation ``CacheManager.check()`` is empty and the pool holds no forgotten buffer;
- every request ends, with the number of tokens it asked for.

A failing seed repeats exactly: nothing here reads a clock or a random source of its own.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from dataclasses import dataclass, field

import numpy as np

from gufo_gguf.backend import fake_state as fs
from gufo_gguf.backend.base import Logits
from gufo_gguf.backend.fake import FakeBackend
from gufo_gguf.cache.events import EventLog, encode
from gufo_gguf.cache.manager import CacheManager
from gufo_gguf.cache.types import CacheLimits, Lease, PromptView, StateShape, Tokens
from gufo_gguf.core.errors import StateRejected
from gufo_gguf.engine.executor import Executor
from gufo_gguf.engine.job import Job, Phase
from gufo_gguf.engine.pool import BufferPool
from gufo_gguf.engine.scheduler import Scheduler
from gufo_gguf.engine.types import Event, Finished, FinishReason, GenerateRequest, TextDelta, TokenLogprob, as_tokens
from tests.engine.simulated_disk import SimulatedDisk

N_VOCAB = 48


class ObservedBackend(FakeBackend):
    """Remembers every link ever computed and refuses a start from any other."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.seen: set[int] = {fs.SEED_LINK}
        self.logits_of: dict[bytes, tuple[int, ...]] = {}
        """Every vector of logits that was read, and the tokens it continues."""
        self.restores = 0

    def _advance(self, slot, tokens: Tokens, total: int, place: int) -> None:  # type: ignore[no-untyped-def]
        before = len(slot.tokens)
        assert slot.link in self.seen, "a pass starts from a state nobody computed"
        super()._advance(slot, tokens, total, place)
        self.seen.add(slot.link)
        if self._row_bytes:  # with rows, every row carries its link
            self.seen.update(slot.rows[before : before + len(tokens), :8].copy().view(np.uint64).reshape(-1).tolist())

    def logits(self, slot: int) -> Logits:
        out = super().logits(slot)
        self.logits_of[out.tobytes()] = self.history(slot)
        return out

    def history(self, slot: int) -> tuple[int, ...]:
        return tuple(self._slots[slot].tokens)

    def _reject(self, slot: int, why: str) -> StateRejected:
        raise AssertionError(f"the cache gave slot {slot} what is no state: {why}")

    def finish_restore(self, slot: int) -> None:
        super().finish_restore(slot)
        self.restores += 1
        assert self._slots[slot].link in self.seen, "a restore gave a state nobody computed"


class ObservedExecutor(Executor):
    """Logits that go into a checkpoint must be those of the slot's own tokens."""

    def _logits(self, lease: Lease) -> Logits:
        out = super()._logits(lease)
        assert isinstance(self._backend, ObservedBackend)
        assert self._backend.logits_of.get(out.tobytes()) == self._backend.history(lease.slot), "another text's logits"
        return out


class GreedySampler:
    """Argmax over the fake's logits; ``prompt``: stored logits must be the ones that follow it."""

    def __init__(self, backend: FakeBackend, prompt: Tokens | None = None) -> None:
        self._backend = backend
        self._prompt = prompt

    def sample(self, slot: int) -> int:
        return int(np.argmax(self._backend.logits(slot)))

    def sample_logits(self, logits: Logits) -> int:
        if isinstance(self._backend, ObservedBackend) and self._prompt is not None:
            origin = self._backend.logits_of.get(logits.tobytes())
            assert origin == tuple(self._prompt.tolist()), "stored logits follow another text"
        return int(np.argmax(logits))

    def accept(self, token: int) -> None: ...

    def logprobs(self, logits: Logits, token: int, n_top: int) -> TokenLogprob:
        raise NotImplementedError


class PlainText:
    stop_text: str | None = None

    def feed(self, token: int) -> str:
        return f"{token} "

    def flush(self) -> str:
        return ""


@dataclass
class Conversation:
    tokens: list[int]
    generated: int = 0


@dataclass
class Outcome:
    """What a finished job said."""

    n_tokens: int = 0
    finished: Finished | None = None
    tokens: list[int] = field(default_factory=list)


class World:
    """Everything one seed runs on."""

    def __init__(
        self,
        seed: int,
        *,
        budget_bytes: int | None = None,
        n_slots: int | None = None,
        disk: bool | None = None,
        systems: bool | None = None,
    ) -> None:
        """``systems``: requests say where their system prompt ends."""
        rng = self.rng = random.Random(seed)
        row_bytes, private_bytes = rng.choice([(24, 64), (24, 256), (40, 0), (0, 96), (24, 2048)])
        self.n_slots = n_slots or rng.randint(1, 4)
        chunk_rows = rng.choice([4, 8, 16])
        self._options = {
            "row_bytes": row_bytes,
            "private_bytes": private_bytes,
            "n_ctx": 384,
            "n_vocab": N_VOCAB,
            "n_batch": 64,
            "n_ubatch": rng.choice([8, 16, 32]),
        }
        whole = 384 * row_bytes + private_bytes + 4 * N_VOCAB
        budget = rng.choice([0, whole // 2, 2 * whole, 6 * whole, 60 * whole]) if budget_bytes is None else budget_bytes
        self.shape = StateShape(row_bytes, private_bytes, 4 * N_VOCAB, chunk_rows)
        self.limits = CacheLimits(
            ram_bytes=budget,
            max_checkpoints=rng.choice([2, 6, 128]),
            chunk_rows=chunk_rows,
            grid_step=rng.choice([16, 32]),
            grid_end_margin=4,
            learned_min=8,
            learned_merge=4,
        )
        self.lines: list[str] = []
        self.disk: SimulatedDisk | None = None
        rng = self.disk_rng = random.Random(f"disk {seed}")
        if disk if disk is not None else rng.random() < 0.7:
            spacing = rng.choice([1, 16, 64])
            self.disk = SimulatedDisk(rng, rng.choice([1 << 16, 1 << 19, 1 << 24]), spacing)
        self.systems_known = random.Random(f"systems {seed}").random() < 0.5 if systems is None else systems
        self.restores = self.restarts = 0
        self.start()
        self.systems = [self._text(rng.randint(10, 60)) for _ in range(3)]
        self.conversations: list[Conversation] = []
        self.open: list[tuple[Job, Outcome, Conversation]] = []
        self.ops = 0

    def start(self) -> None:
        """What a process makes: everything but the folder and the clients."""
        self.backend = ObservedBackend(n_slots=self.n_slots, **self._options)
        self.events = EventLog(sinks=(lambda e: self.lines.append(encode(e)),))
        ram = self.limits.ram_bytes
        self.manager = CacheManager(
            self.shape, self.limits, self.n_slots, self.backend.info.n_ctx, self.events, enabled=True, ram=ram > 0
        )
        self.pool = BufferPool(self.backend.alloc, max(ram, 1) * 2)
        self.executor = ObservedExecutor(self.backend, self.manager, self.pool, clock=lambda: 0.0)
        self.scheduler = Scheduler(
            self.backend,
            self.manager,
            self.executor,
            lambda request: GreedySampler(self.backend, request.tokens),
            lambda request: PlainText(),
            lambda token: False,
            prefill_chunk=32,
            shared_prefix_min=8,
            clock=lambda: 0.0,
        )
        if self.disk is not None:
            self.disk.attach(self.manager, self.backend, self.pool, self.executor)

    def restart(self) -> None:
        """The server ends, in one of three ways, and another one opens the folder."""
        assert self.disk is not None
        how = self.disk_rng.choice(["stop", "kill", "power"])
        if how == "stop":
            self.settle()
        self.disk.end(how, self.executor)
        self.open.clear()  # their clients have seen the connection break
        old = self.backend
        self.restores += old.restores
        self.restarts += 1
        self.n_slots = self.disk_rng.randint(1, 4)
        self.start()
        self.backend.seen, self.backend.logits_of = old.seen, old.logits_of
        self.disk.verify()

    # -- operations ------------------------------------------------------------------------------
    def run(self, n_ops: int) -> None:
        for _ in range(n_ops):
            self.operate()
            self.ops += 1
        self.settle()
        self.restores += self.backend.restores

    def operate(self) -> None:
        rng = self.rng
        op = rng.random()
        if op < 0.45 and len(self.open) < 6:
            self.submit(self.next_prompt())
        elif op < 0.50 and self.open:
            rng.choice(self.open)[0].cancelled = True
        elif op < 0.90:
            for _ in range(rng.randint(1, 8)):
                self.scheduler.step()
        elif self.scheduler.idle():
            for _ in range(rng.randint(1, 3)):
                self.executor.spill(self.backend.info.n_ubatch)
        if self.disk is not None:
            self.operate_disk(self.disk)
        self.collect()
        self.verify()

    def operate_disk(self, disk: SimulatedDisk) -> None:
        rng = self.disk_rng
        op = rng.random()
        if op < 0.35:
            while self.executor.prepare_write(rng.choice([4, 64])) and rng.random() < 0.9:
                pass
        elif op < 0.75:
            disk.step()
        elif op < 0.77:
            disk.harm()
        elif op < 0.78:
            disk.fs.capacity_bytes = None if disk.fs.capacity_bytes else disk.fs.used_bytes() + rng.randint(0, 4096)
        elif op < 0.80:
            self.restart()
        disk.hear()

    def next_prompt(self) -> Conversation:
        rng = self.rng
        kind = rng.random()
        if not self.conversations or kind < 0.15:
            conversation = Conversation(list(rng.choice(self.systems)) + self._text(rng.randint(1, 40)))
            self.conversations.append(conversation)
            if len(self.conversations) > 8:
                self.conversations.pop(0)
            return conversation
        conversation = rng.choice(self.conversations)
        if kind < 0.30:  # an edit: the end goes, new text comes
            del conversation.tokens[rng.randint(1, len(conversation.tokens)) :]
            conversation.tokens += self._text(rng.randint(1, 20))
        elif kind < 0.45:  # a fork
            conversation = Conversation(
                conversation.tokens[: rng.randint(1, len(conversation.tokens))] + self._text(rng.randint(1, 20))
            )
            self.conversations.append(conversation)
        elif kind < 0.90:  # the next turn
            conversation.tokens += self._text(rng.randint(1, 30))
        if len(conversation.tokens) > 340:  # compaction
            conversation.tokens = list(self.systems[0]) + self._text(20)
        if self.disk is not None and self.disk_rng.random() < 0.3:  # prompts that end at equal places
            del conversation.tokens[max(1, len(conversation.tokens) // 8 * 8) :]
        return conversation

    def _system_end(self, tokens: list[int]) -> int:
        return next((len(s) for s in self.systems if tokens[: len(s)] == list(s)), 0)

    def submit(self, conversation: Conversation) -> None:
        rng = self.rng
        tokens = as_tokens(conversation.tokens)
        n = len(tokens)
        stable = tuple(sorted({rng.randint(max(1, n - 6), n) for _ in range(rng.randint(0, 2))}))
        use = rng.random() > 0.05
        request = GenerateRequest(tokens, max_tokens=rng.randint(0, 6), stable=stable)
        system_end = self._system_end(conversation.tokens) if self.systems_known else 0
        outcome = Outcome()

        def emit(event: Event) -> None:
            if isinstance(event, TextDelta):
                outcome.tokens += event.tokens
            elif isinstance(event, Finished):
                outcome.finished = event

        job = Job(request, PromptView("world", tokens, stable, system_end, read=use, write=use), emit)
        self.open.append((job, outcome, conversation))
        self.scheduler.add(job)

    def collect(self) -> None:
        for entry in [e for e in self.open if e[0].phase is Phase.DONE]:
            job, outcome, conversation = entry
            self.open.remove(entry)
            assert outcome.finished is not None
            if outcome.finished.reason is FinishReason.LENGTH:
                assert len(outcome.tokens) == min(job.request.max_tokens or 0, outcome.finished.n_generated)
                if conversation.tokens == job.prompt.tokens.tolist():
                    conversation.tokens += outcome.tokens  # the client resends what was generated
            else:
                assert outcome.finished.reason is FinishReason.CANCELLED, outcome.finished

    def settle(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.step() and self.scheduler.idle():
                break
        else:
            raise AssertionError("requests do not end")
        self.collect()
        self.verify()
        if self.disk is not None:
            self.disk.hear()
            self.executor.prepare_write(1)
            self.disk.verify()
        assert not self.open

    def verify(self) -> None:
        problems = self.manager.check()
        assert problems == [], problems
        assert self.manager.off is None, self.manager.off
        for buffer in self.pool.used():
            assert self.manager.buffer_bytes(buffer) > 0

    def _text(self, n: int) -> list[int]:
        # few distinct tokens: accidental common prefixes happen
        return [
            self.rng.randint(0, 5) if self.rng.random() < 0.5 else self.rng.randint(0, N_VOCAB - 1) for _ in range(n)
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--ops", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # full disks and damaged files are the point
    restores = ops = restarts = written = restored = damaged = 0
    for seed in range(args.first, args.first + args.seeds):
        world = World(seed)
        try:
            world.run(args.ops)
        except BaseException:
            print(f"seed {seed} failed after {world.ops} operations", file=sys.stderr)
            raise
        restores += world.restores
        ops += world.ops
        if (seed - args.first) % 1000 == 999:
            print(f"... {seed + 1 - args.first} seeds", file=sys.stderr, flush=True)
        if world.disk is not None:
            world.disk.count()
            restarts += world.restarts
            written += world.disk.written
            restored += world.disk.restored
            damaged += world.disk.damaged
    print(f"{args.seeds} seeds, {ops} operations, {restores} restores: every start was a computed state")
    print(f"disk: {restarts} restarts, {written} writes, {restored} restores, {damaged} damaged files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
