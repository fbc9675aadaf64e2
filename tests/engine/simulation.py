"""A seeded simulation of the real manager, scheduler and executor over the fake backend.

    python -m tests.engine.simulation --seeds 1000 --ops 1000      (one million operations)

Random conversations, edits, forks, resends, cancels and idle time, with budgets from "nothing fits"
to "everything fits" and 1 to 4 slots.  What must hold after every operation:

- every state that a slot starts from was computed: its chain link was seen at a decode, and the
  fake (strict) proves rows and private state belong together;
- ``CacheManager.check()`` is empty and the pool holds no memory of a forgotten buffer;
- every request ends, with the number of tokens it asked for.

A failing seed repeats exactly: nothing here reads a clock or a random source of its own.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass, field

import numpy as np

from gufo_gguf.backend import fake_state as fs
from gufo_gguf.backend.base import Logits
from gufo_gguf.backend.fake import FakeBackend
from gufo_gguf.cache.events import EventLog, encode
from gufo_gguf.cache.manager import CacheManager
from gufo_gguf.cache.types import CacheLimits, PromptView, StateShape, Tokens
from gufo_gguf.engine.executor import Executor
from gufo_gguf.engine.job import Job, Phase
from gufo_gguf.engine.pool import BufferPool
from gufo_gguf.engine.scheduler import Scheduler
from gufo_gguf.engine.types import Event, Finished, FinishReason, GenerateRequest, TextDelta, TokenLogprob, as_tokens

N_VOCAB = 48


class ObservedBackend(FakeBackend):
    """Remembers every link ever computed and refuses a start from any other."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.seen: set[int] = {fs.SEED_LINK}
        self.restores = 0

    def _advance(self, slot, tokens: Tokens, total: int, place: int) -> None:  # type: ignore[no-untyped-def]
        before = len(slot.tokens)
        assert slot.link in self.seen, "a pass starts from a state nobody computed"
        super()._advance(slot, tokens, total, place)
        self.seen.add(slot.link)
        if self._row_bytes:  # with rows, every row carries its link
            self.seen.update(slot.rows[before : before + len(tokens), :8].copy().view(np.uint64).reshape(-1).tolist())

    def finish_restore(self, slot: int) -> None:
        super().finish_restore(slot)
        self.restores += 1
        assert self._slots[slot].link in self.seen, "a restore gave a state nobody computed"


class GreedySampler:
    """Argmax over the fake's logits."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend

    def sample(self, slot: int) -> int:
        return self.sample_logits(self._backend.logits(slot))

    def sample_logits(self, logits: Logits) -> int:
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

    def __init__(self, seed: int, *, budget_bytes: int | None = None, n_slots: int | None = None) -> None:
        rng = self.rng = random.Random(seed)
        row_bytes, private_bytes = rng.choice([(24, 64), (24, 256), (40, 0), (0, 96), (24, 2048)])
        slots = n_slots or rng.randint(1, 4)
        chunk_rows = rng.choice([4, 8, 16])
        self.backend = ObservedBackend(
            row_bytes=row_bytes,
            private_bytes=private_bytes,
            n_slots=slots,
            n_ctx=384,
            n_vocab=N_VOCAB,
            n_batch=64,
            n_ubatch=rng.choice([8, 16, 32]),
        )
        whole = 384 * row_bytes + private_bytes + 4 * N_VOCAB
        budget = rng.choice([0, whole // 2, 2 * whole, 6 * whole, 60 * whole]) if budget_bytes is None else budget_bytes
        shape = StateShape(row_bytes, private_bytes, 4 * N_VOCAB, chunk_rows)
        limits = CacheLimits(
            ram_bytes=budget,
            max_checkpoints=rng.choice([2, 6, 128]),
            chunk_rows=chunk_rows,
            grid_step=rng.choice([16, 32]),
            grid_end_margin=4,
            learned_min=8,
            learned_merge=4,
        )
        self.lines: list[str] = []
        self.events = EventLog(sinks=(lambda e: self.lines.append(encode(e)),))
        self.manager = CacheManager(
            shape, limits, slots, self.backend.info.n_ctx, self.events, enabled=True, ram=budget > 0
        )
        self.pool = BufferPool(self.backend.alloc, max(budget, 1) * 2)
        self.executor = Executor(self.backend, self.manager, self.pool, clock=lambda: 0.0)
        self.scheduler = Scheduler(
            self.backend,
            self.manager,
            self.executor,
            lambda request: GreedySampler(self.backend),
            lambda request: PlainText(),
            lambda token: False,
            prefill_chunk=32,
            shared_prefix_min=8,
            clock=lambda: 0.0,
        )
        self.systems = [self._text(rng.randint(10, 60)) for _ in range(3)]
        self.conversations: list[Conversation] = []
        self.open: list[tuple[Job, Outcome, Conversation]] = []
        self.ops = 0

    # -- operations ------------------------------------------------------------------------------
    def run(self, n_ops: int) -> None:
        for _ in range(n_ops):
            self.operate()
            self.ops += 1
        self.settle()

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
        self.collect()
        self.verify()

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
        return conversation

    def submit(self, conversation: Conversation) -> None:
        rng = self.rng
        tokens = as_tokens(conversation.tokens)
        n = len(tokens)
        stable = tuple(sorted({rng.randint(max(1, n - 6), n) for _ in range(rng.randint(0, 2))}))
        use = rng.random() > 0.05
        request = GenerateRequest(tokens, max_tokens=rng.randint(0, 6), stable=stable)
        outcome = Outcome()

        def emit(event: Event) -> None:
            if isinstance(event, TextDelta):
                outcome.tokens += event.tokens
            elif isinstance(event, Finished):
                outcome.finished = event

        job = Job(request, PromptView("world", tokens, stable, read=use, write=use), emit)
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
    restores = ops = 0
    for seed in range(args.first, args.first + args.seeds):
        world = World(seed)
        try:
            world.run(args.ops)
        except BaseException:
            print(f"seed {seed} failed after {world.ops} operations", file=sys.stderr)
            raise
        restores += world.backend.restores
        ops += world.ops
    print(f"{args.seeds} seeds, {ops} operations, {restores} restores: every start was a computed state")
    return 0


if __name__ == "__main__":
    sys.exit(main())
