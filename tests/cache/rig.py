"""A tiny executor: the real manager over the fake backend, and an oracle of uninterrupted runs.

Every slot and every checkpoint carries its *recipe*: the passes that computed its state, from the
first token on, and the cuts of rows-only memories.  ``Rig.verify`` cooks a recipe on a fresh
backend and compares rows, private state and logits as bytes with what lies in the slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gufo_gguf.backend.base import Span
from gufo_gguf.backend.fake import FakeBackend, Faults
from gufo_gguf.cache.events import CacheEvent, EventKind, EventLog
from gufo_gguf.cache.manager import CacheManager
from gufo_gguf.cache.types import (
    Admission,
    BufferId,
    CacheLimits,
    CapturePoint,
    CaptureRefused,
    CheckpointId,
    FromBuffer,
    FromSlot,
    InputMark,
    Lookup,
    Origin,
    PromptView,
    RestorePlan,
    RowCopy,
    StateShape,
    Tier,
    Tokens,
)
from gufo_gguf.core.errors import BackendError


@dataclass(frozen=True)
class Pass:
    """One slot's share of a pass: the sizes of all spans, its own place among them, its tokens."""

    sizes: tuple[int, ...]
    place: int
    tokens: Tokens


@dataclass(frozen=True)
class Cut:
    n_tokens: int


Recipe = tuple[Pass | Cut, ...]


@dataclass(eq=False)
class Run:
    """A request that holds a slot."""

    prompt: PromptView
    admission: Admission
    points: list[CapturePoint]
    captured: list[tuple[int, Origin]] = field(default_factory=list)
    refused: list[CaptureRefused] = field(default_factory=list)
    position: int = 0

    @property
    def slot(self) -> int:
        return self.admission.lease.slot

    @property
    def prefilled(self) -> bool:
        return self.position >= len(self.prompt.tokens)


def text(n: int, seed: int = 0) -> Tokens:
    """n reproducible tokens; different seeds share nothing beyond chance."""
    return np.random.default_rng(seed).integers(0, 50_000, n, dtype=np.int32)


def join(*parts: Tokens) -> Tokens:
    return np.concatenate(parts).astype(np.int32)


class Rig:
    def __init__(
        self,
        *,
        row_bytes: int = 24,
        private_bytes: int = 64,
        chunk_rows: int = 16,
        budget: int = 1 << 30,
        n_slots: int = 1,
        n_ctx: int = 4096,
        n_batch: int = 512,
        n_ubatch: int = 64,
        faults: Faults | None = None,
        ram: bool = True,
        check: bool = True,
        **limits: int,
    ) -> None:
        self.options = {"row_bytes": row_bytes, "private_bytes": private_bytes, "n_batch": n_batch}
        self.options |= {"n_ubatch": n_ubatch, "n_ctx": n_ctx}
        self.backend = FakeBackend(n_slots=n_slots, faults=faults, **self.options)
        self.shape = StateShape(row_bytes, private_bytes, self.backend.info.n_vocab * 4, chunk_rows)
        self.limits = CacheLimits(budget, chunk_rows=chunk_rows, **limits)
        self.events: list[CacheEvent] = []
        self.manager = CacheManager(
            self.shape, self.limits, n_slots, n_ctx, EventLog(sinks=[self.events.append]), ram=ram
        )
        self.pool: dict[BufferId, np.ndarray] = {}
        self.slot_recipe: list[Recipe] = [()] * n_slots
        self.recipe: dict[CheckpointId, tuple[int, Recipe]] = {}
        self.disk: dict[int, tuple[Recipe, np.ndarray, np.ndarray, np.ndarray | None]] = {}
        """By number of the durable entry: recipe, rows packed as one piece, private state, logits."""
        self.stored_logits: dict[int, np.ndarray] = {}
        """By slot: what a restore from disk brought along, until the slot computes."""
        self.rows_copied = 0
        self.tolerant = faults is not None
        """Failed plans are answered as an engine does; otherwise they are a mistake and raise."""
        self._check = check

    # -- one request -----------------------------------------------------------------------------
    def view(self, tokens: Tokens, stable: tuple[int, ...] = (), **options: object) -> PromptView:
        return PromptView("scope", tokens, stable, **options)

    def start(self, prompt: PromptView) -> Run | None:
        """Lookup, slot, preservation, restore; falls back to cold when the backend fails."""
        got = self.acquire(prompt)
        return None if got is None else self.carry_out(*got)

    def acquire(self, prompt: PromptView) -> tuple[PromptView, Lookup, Admission] | None:
        lookup = self.manager.lookup(prompt)
        admission = self.manager.acquire(prompt, lookup)
        self.settle()
        return None if admission is None else (prompt, lookup, admission)

    def carry_out(self, prompt: PromptView, lookup: Lookup, admission: Admission) -> Run:
        slot = admission.lease.slot
        try:
            self.preserve(admission.preserve)
            self.manager.preserved(admission.lease, admission.preserve)
            self._place(admission, prompt.tokens)
            ok = self.manager.ready(admission)
        except BackendError as error:
            if not self.tolerant:
                raise
            self.backend.abort_restore(slot)
            self.manager.abandon(admission, type(error).__name__)
            ok = False
        assert ok or self.tolerant
        if not ok:
            self.backend.abort_restore(slot)
            self.slot_recipe[slot] = ()
        run = Run(prompt, admission, [], position=admission.n_reused if ok else 0)
        self.settle()
        run.points = list(
            self.manager.plan_captures(admission.lease, prompt, lookup.common_prefix, self.backend.info.n_ubatch)
        )
        self.capture_due(run)
        return run

    def prefill(self, *runs: Run, limit: int | None = None) -> None:
        """One joint pass over what these requests still have to prefill, up to their next stop each."""
        spans = {r.slot: r.prompt.tokens[r.position : min(self.stop(r), r.position + (limit or 1 << 30))] for r in runs}
        self.decode(spans)
        for run in runs:
            run.position += len(spans[run.slot])
            self.capture_due(run)

    def stop(self, run: Run) -> int:
        """Where the next pass of a request ends: a capture, a multiple of n_batch, or the prompt's end."""
        n_batch = self.backend.info.n_batch
        ends = [len(run.prompt.tokens), (run.position // n_batch + 1) * n_batch]
        return min(ends + [p.boundary for p in run.points if p.boundary > run.position])

    def decode(self, spans: dict[int, Tokens]) -> None:
        slots = sorted(slot for slot in spans if len(spans[slot]))
        self.backend.decode([Span(slot, spans[slot], True) for slot in slots])
        sizes = tuple(len(spans[slot]) for slot in slots)
        for place, slot in enumerate(slots):
            self.stored_logits.pop(slot, None)
            self.slot_recipe[slot] += (Pass(sizes, place, spans[slot]),)
            lease = self.manager.tables.slots[slot].lease
            self.manager.extend(lease, spans[slot])

    def generate(self, run: Run, tokens: Tokens) -> None:
        """Decode one by one, as if these had been sampled."""
        for i in range(len(tokens)):
            self.decode({run.slot: tokens[i : i + 1]})
            run.position += 1

    def finish(self, run: Run) -> None:
        self.manager.release(run.admission.lease)
        self.settle()

    def ask(self, tokens: Tokens, stable: tuple[int, ...] = (), reply: Tokens | None = None, **options: object) -> Run:
        """A whole request."""
        run = self.start(self.view(tokens, stable, **options))
        assert run is not None
        while not run.prefilled:
            self.prefill(run)
        if reply is not None:
            self.generate(run, reply)
        self.finish(run)
        return run

    # -- plans -----------------------------------------------------------------------------------
    def capture_due(self, run: Run) -> None:
        while run.points and run.points[0].boundary <= run.position:
            point = run.points.pop(0)
            if point.boundary == run.position:
                self.capture(run, point)

    def capture(self, run: Run, point: CapturePoint) -> None:
        ticket = self.manager.reserve_capture(run.admission.lease, point)
        self.settle()
        if ticket is None:
            return
        if isinstance(ticket, CaptureRefused):
            run.refused.append(ticket)
            return
        try:
            if ticket.private is not None:
                self.backend.private_out(run.slot, self.buffer(ticket.private))
            if ticket.tail is not None:
                n = point.boundary - ticket.tail_first
                self.backend.rows_out(run.slot, ticket.tail_first, n, self.buffer(ticket.tail))
            if ticket.logits is not None:
                stored = self.stored_logits.get(run.slot)
                logits = self.backend.logits(run.slot).view(np.uint8) if stored is None else stored
                self.buffer(ticket.logits)[:] = logits
        except BackendError as error:
            if not self.tolerant:
                raise
            self.manager.abandon_capture(ticket, type(error).__name__)
        else:
            if self.manager.commit_capture(ticket):
                self.recipe[ticket.checkpoint] = (point.boundary, self.slot_recipe[run.slot])
                run.captured.append((point.boundary, point.origin))
        self.settle()

    def preserve(self, copies: tuple[RowCopy, ...]) -> None:
        for copy in copies:
            self.backend.rows_out(copy.slot, copy.first_row, copy.n_rows, self.buffer(copy.dst))
            self.rows_copied += copy.n_rows

    def spill(self, max_rows: int = 1 << 30) -> int:
        copies = self.manager.plan_spill(max_rows)
        self.preserve(copies)
        self.manager.preserve_done(copies)
        self.settle()
        return len(copies)

    def settle(self) -> None:
        """What an engine does after any call: drop freed buffers; here also: check everything."""
        for buffer in self.manager.take_freed():
            self.pool.pop(buffer, None)
        if self._check:
            assert self.manager.check() == []

    def buffer(self, buffer: BufferId) -> np.ndarray:
        if buffer not in self.pool:
            self.pool[buffer] = self.backend.alloc(self.manager.buffer_bytes(buffer))
        return self.pool[buffer]

    def _place(self, admission: Admission, tokens: Tokens) -> None:
        slot, plan = admission.lease.slot, admission.restore
        self.stored_logits.pop(slot, None)
        if plan is None:
            if admission.truncate_to is not None:
                self.backend.truncate(slot, admission.truncate_to)
                cut = admission.truncate_to
                self.slot_recipe[slot] = (*self.slot_recipe[slot], Cut(cut)) if cut else ()
            return
        assert admission.truncate_to == plan.keep_rows
        self.backend.begin_restore(slot, tokens[: plan.n_tokens], plan.keep_rows)
        if plan.tier is Tier.DISK:
            self._place_from_disk(slot, plan)
            return
        row_bytes = self.shape.row_bytes
        for piece in plan.pieces:
            if isinstance(piece.source, FromSlot):
                staging = self.backend.alloc(piece.n_rows * row_bytes)
                self.backend.rows_out(piece.source.slot, piece.first_row, piece.n_rows, staging)
                self.backend.load_rows(slot, piece.first_row, piece.n_rows, staging, piece.n_rows)
            else:
                assert isinstance(piece.source, FromBuffer)
                held = self.pool[piece.source.buffer]  # a buffer that nobody filled is a mistake in the plan
                self.backend.load_rows(slot, piece.first_row, piece.n_rows, held, piece.source.buffer_rows)
        if plan.private is not None:
            self.backend.load_private(slot, self.pool[plan.private])
        self.backend.finish_restore(slot)
        n_tokens, recipe = self.recipe[plan.checkpoint]
        self.slot_recipe[slot] = recipe if plan.n_tokens == n_tokens else (*recipe, Cut(plan.n_tokens))

    def persist(self, checkpoint: CheckpointId) -> int | None:
        """Write a retained checkpoint out whole and make it durable; its entry's number."""
        durable = self.manager.durable
        durable.pin(checkpoint)
        while copies := durable.plan_preserve(checkpoint, 2 * self.shape.chunk_rows):
            self.preserve(copies)
            self.manager.preserve_done(copies)
            self.settle()
        source, parts = self.manager.tables.checkpoints.get(checkpoint), durable.export(checkpoint)
        assert source is not None and parts is not None
        scratch = FakeBackend(**self.options)
        scratch.begin_restore(0, source.tokens)
        for i, (_, buffer) in enumerate(parts.chunks):
            scratch.load_rows(
                0, i * self.shape.chunk_rows, self.shape.chunk_rows, self.pool[buffer], self.shape.chunk_rows
            )
        if parts.tail is not None:
            n = source.parts.tail_rows
            scratch.load_rows(0, source.n_tokens - n, n, self.pool[parts.tail], n)
        if parts.private is not None:
            scratch.load_private(0, self.pool[parts.private])
        scratch.finish_restore(0)
        state = state_of(scratch, 0)
        split = source.n_tokens * self.shape.row_bytes
        number = durable.add(
            source.scope, source.tokens, source.inputs, source.origin, has_logits=parts.logits is not None
        )
        logits = None if parts.logits is None else self.pool[parts.logits].copy()
        self.disk[number] = (self.recipe[checkpoint][1], state[:split], state[split:], logits)
        durable.unpin(checkpoint)
        self.settle()
        return number

    def _place_from_disk(self, slot: int, plan: RestorePlan) -> None:
        recipe, rows, private, logits = self.disk[int(plan.checkpoint)]
        known = self.manager.durable.get(int(plan.checkpoint))
        assert known is not None
        whole = len(known.tokens)
        if len(rows):
            self.backend.load_rows(slot, 0, plan.n_tokens, rows, whole)
        if len(private):
            self.backend.load_private(slot, private)
        self.backend.finish_restore(slot)
        if logits is not None and plan.n_tokens == whole:
            self.stored_logits[slot] = logits
        self.slot_recipe[slot] = recipe if plan.n_tokens == whole else (*recipe, Cut(plan.n_tokens))

    # -- oracle ----------------------------------------------------------------------------------
    def verify(self, slot: int) -> None:
        """The slot's bytes are those of an uninterrupted run of its recipe, and so is what follows."""
        n = self.backend.position(slot)
        assert n == self.manager.tables.slots[slot].n_tokens
        if n == 0:
            return
        reference, at = cook(self.slot_recipe[slot], self.options)
        faults, self.backend._faults = self.backend._faults, None
        same = np.array_equal(state_of(self.backend, slot), state_of(reference, at))
        self.backend._faults = faults
        assert same, f"slot {slot}: {n} tokens differ from an uninterrupted run"

    def of_kind(self, kind: EventKind) -> list[CacheEvent]:
        return [e for e in self.events if e.kind is kind]


def cook(recipe: Recipe, options: dict[str, int]) -> tuple[FakeBackend, int]:
    """A fresh backend that ran these passes, and the slot that holds the result."""
    n_slots = max([p.place + 1 for p in recipe if isinstance(p, Pass)] + [1])
    n_slots = max([n_slots] + [len(p.sizes) for p in recipe if isinstance(p, Pass)])
    backend = FakeBackend(n_slots=n_slots + 1, **options)
    home = 0
    for item in recipe:
        if isinstance(item, Cut):
            backend.truncate(home, item.n_tokens)
            continue
        home = move(backend, home, item.place)
        spans = []
        for place, size in enumerate(item.sizes):
            if place != item.place:
                backend.truncate(place, 0)
            spans.append(Span(place, item.tokens if place == item.place else np.ones(size, dtype=np.int32), True))
        backend.decode(spans)
    return backend, home


def move(backend: FakeBackend, home: int, to: int) -> int:
    """The place of a span decides bytes, so the one sequence lives at that place for this pass."""
    if home != to:
        backend._slots[to], backend._slots[home] = backend._slots[home], backend._slots[to]
    return to


def state_of(backend: FakeBackend, slot: int) -> np.ndarray:
    """All rows and the private state of a slot as one array of bytes."""
    inventory = backend.info.inventory
    assert inventory is not None
    n = backend.position(slot)
    rows = backend.alloc(n * inventory.row_bytes)
    private = backend.alloc(inventory.private_bytes)
    if len(rows):
        backend.rows_out(slot, 0, n, rows)
    if len(private):
        backend.private_out(slot, private)
    return np.concatenate([rows, private])


def mark(position: int, digest: str) -> InputMark:
    return InputMark(position, digest)
