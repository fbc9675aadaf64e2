"""Shapes of real use, whole conversations at a time: what must stay warm stays warm, bytes included."""

from __future__ import annotations

import pytest

from gufo_gguf.cache.events import EventKind, EventLog
from gufo_gguf.cache.manager import CacheManager
from gufo_gguf.cache.types import (
    CacheLimits,
    CaptureTicket,
    PromptView,
    ReuseSource,
    StateShape,
    Tokens,
)
from tests.cache.rig import Rig, join, text

OPENING = text(4, 77)
"""What a template appends to ask for the assistant's turn; the next turn does not repeat it."""


class Chat:
    """One conversation as a client resends it: history + message + opening, then the reply is kept."""

    def __init__(self, rig: Rig, seed: int, system: Tokens | None = None) -> None:
        self.rig = rig
        self.seed = 1000 * seed
        self.history = text(60, self.seed) if system is None else system

    def turn(self, n_message: int = 20, n_reply: int = 6, *, keep_reply: bool = True, verify: bool = True) -> int:
        """Tokens that had to be evaluated."""
        self.seed += 1
        asked = join(self.history, text(n_message, self.seed))
        reply = text(n_reply, self.seed + 500)
        prompt = join(asked, OPENING)
        run = self.rig.ask(prompt, (len(asked),), reply)
        if verify:
            self.rig.verify(run.slot)
        self.history = join(asked, OPENING, reply if keep_reply else reply[-2:])
        return len(prompt) - run.admission.n_reused


def test_a_conversation_continues_in_place_for_fifty_turns() -> None:
    rig = Rig(budget=60_000, n_ctx=2048, check=False)
    chat = Chat(rig, 1)
    chat.turn()
    for i in range(50):
        assert chat.turn(verify=i % 10 == 9) == 24, "the new message and the opening"
    assert rig.manager.check() == []
    assert {e.reason for e in rig.of_kind(EventKind.LOOKUP)} == {"no_checkpoint", ""}
    assert rig.manager.stats().peak_bytes <= 60_000


@pytest.mark.parametrize("n_chats", range(2, 7))
@pytest.mark.parametrize("n_slots", [1, 2])
def test_more_conversations_than_slots_stay_warm(n_chats: int, n_slots: int) -> None:
    rig = Rig(n_slots=n_slots, budget=60_000)
    chats = [Chat(rig, i + 1) for i in range(n_chats)]
    for chat in chats:
        chat.turn()
    for _ in range(3):
        for chat in chats:
            assert chat.turn() <= 4 + 6 + 20 + 4, "at worst: the last reply again, and what is new"


def test_reasoning_that_the_client_strips_costs_the_last_reply_only() -> None:
    rig = Rig(n_slots=2)
    chat = Chat(rig, 1)
    chat.turn(keep_reply=False)
    for _ in range(4):
        assert chat.turn(n_reply=30, keep_reply=False) == 2 + 20 + 4, "what is left of the reply, and what is new"
        assert rig.manager.tables.slots[1].n_tokens == 0, "restored over its own reply, not across slots"


def test_an_edited_message_can_be_undone() -> None:
    """Message 2 of 8 is edited, then the edit is taken back: the old branch is still there."""
    rig = Rig(n_ctx=2048)
    chat = Chat(rig, 1)
    before = [chat.history]
    for _ in range(8):
        chat.turn()
        before.append(chat.history)
    whole = chat.history
    chat.history = before[1]
    chat.seed += 100
    assert chat.turn() == 20 + 4, "turn 2 left a checkpoint where its reused history ended"
    chat.history = whole
    # The live frontier is gone; the last reply lies beyond the deepest checkpoint.
    assert chat.turn() == 6 + 20 + 4


def test_without_private_state_an_edit_restarts_at_the_edit_itself() -> None:
    rig = Rig(private_bytes=0, n_slots=1)
    a = text(400, 1)
    rig.ask(a)
    run = rig.ask(join(a[:333], text(50, 2)))
    assert run.admission.n_reused == 333
    rig.verify(run.slot)
    back = rig.ask(join(a, text(9, 3)))
    assert (back.admission.source, back.admission.n_reused) == (ReuseSource.RAM, 400)
    rig.verify(back.slot)


def test_an_identical_resend_evaluates_nothing() -> None:
    rig = Rig()
    prompt = text(300, 1)
    rig.ask(prompt, (290,), reply=text(10, 2))
    again = rig.start(rig.view(prompt, (290,)))
    assert again is not None and again.prefilled
    plan = again.admission.restore
    assert plan is not None and plan.logits is not None
    stored = rig.pool[plan.logits].copy()
    fresh = Rig()
    run = fresh.start(fresh.view(prompt, (290,)))
    assert run is not None
    while not run.prefilled:
        fresh.prefill(run)
    assert stored.tobytes() == fresh.backend.logits(0).tobytes()


def test_scopes_and_inputs_never_meet() -> None:
    rig = Rig(n_slots=1)
    prompt = text(100, 1)
    rig.ask(prompt)
    other = PromptView("another model", join(prompt, text(10, 2)))
    run = rig.start(other)
    assert run is not None and run.admission.source is ReuseSource.NONE
    rig.finish(run)


@pytest.mark.parametrize("private_bytes", [5_000_000, 20_000_000])
def test_eight_conversations_share_a_prefix_in_the_room_of_four(private_bytes: int) -> None:
    """8,000 tokens each, 6,000 shared, one slot, a budget of four full copies: all eight stay warm."""
    row_bytes, n = 27_460, 8000
    manager = CacheManager(
        StateShape(row_bytes, private_bytes, 0),
        CacheLimits(4 * (n * row_bytes + private_bytes)),
        n_slots=1,
        n_ctx=1 << 14,
        log=EventLog(),
    )
    system = text(6000, 1)
    histories = [join(system, text(n - 6000, 10 + i)) for i in range(8)]
    for round_ in range(4):
        evaluated = []
        for i, history in enumerate(histories):
            evaluated.append(len(history) - _play(manager, history, len(history) - 5))
            histories[i] = join(history[:-5], text(60, 1000 * round_ + i))
        assert manager.check() == []
        assert evaluated == ([8000, 3904] + [2000] * 6 if round_ == 0 else [60] * 8)


def _play(manager: CacheManager, tokens: Tokens, stable: int) -> int:
    """A request without a backend; returns the tokens reused."""
    view = PromptView("scope", tokens, (stable,))
    lookup = manager.lookup(view)
    admission = manager.acquire(view, lookup)
    assert admission is not None
    manager.preserved(admission.lease, admission.preserve)
    assert manager.ready(admission)
    at = admission.n_reused
    for point in manager.plan_captures(admission.lease, view, lookup.common_prefix, 512):
        manager.extend(admission.lease, tokens[at : point.boundary])
        at = point.boundary
        ticket = manager.reserve_capture(admission.lease, point)
        if isinstance(ticket, CaptureTicket):
            manager.commit_capture(ticket)
    manager.extend(admission.lease, tokens[at:])
    manager.release(admission.lease)
    return admission.n_reused
