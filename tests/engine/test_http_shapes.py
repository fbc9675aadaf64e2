"""Shapes of conversation that local servers are known to be slow or wrong at, over HTTP.

Every answer is compared with an uninterrupted run under the same conditions (``witness.py``): state
bytes and the log-probabilities that the client saw.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.engine.served import Talk
from tests.engine.witness import Witness, witnessed

pytestmark = [pytest.mark.native, pytest.mark.slow]


def turn(witness: Witness, talk: Talk, text: str, **fields: Any) -> Any:
    """One more question; the answer joins the history as the server gave it."""
    talk.messages.append({"role": "user", "content": text})
    reply = witness.ask(talk.messages, **fields)
    talk.messages.append({"role": "assistant", "content": reply.message.get("content") or ""})
    return reply


def system(name: str, n: int = 12) -> str:
    return f"Conversation {name}. " + "You answer in few words, and never about the weather. " * n


# -- reasoning -----------------------------------------------------------------------------------
THOUGHT = r"""root ::= "<think>\n" [a-z ]{20} "\n</think>\n\n" [a-z]{6}"""


@pytest.mark.parametrize("client", ["strips", "sends back"])
def test_reasoning_in_the_history_costs_the_last_answer_at_most(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    with witnessed(tiny_model("qwen4exp"), monkeypatch) as witness:
        messages: list[dict[str, Any]] = [{"role": "system", "content": system("think")}]
        stable = n_before = 0
        for i in range(4):
            messages.append({"role": "user", "content": f"Question {i}?"})
            reply = witness.ask(messages, grammar=THOUGHT, max_tokens=64, ignore_eos=False)
            assert len(reply.message["reasoning_content"].strip()) > 10 and len(reply.message["content"]) == 6
            if i:
                assert reply.cached >= stable > 100, "all but the last answer is still there"
                n_new = reply.usage["prompt_tokens"] - n_before
                assert reply.usage["gufo"]["prefilled_tokens"] <= n_new + 8, "an assistant opening more, at most"
            stable, n_before = witness.stable(), reply.usage["prompt_tokens"]
            answer = {"role": "assistant", "content": reply.message["content"]}
            if client == "sends back":
                answer["reasoning_content"] = reply.message["reasoning_content"]
            messages.append(answer)


# -- system prompts ------------------------------------------------------------------------------
@pytest.mark.parametrize("question", ["What now?", "\n What now?"])
def test_the_second_conversation_starts_behind_the_system_prompt(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    with witnessed(tiny_model("qwen4exp"), monkeypatch, n_slots=1) as witness:
        opening = {"role": "system", "content": system("share", 60)}
        first = witness.ask([opening, {"role": "user", "content": question}])
        assert "system" in {c["origin"] for c in first.usage["gufo"]["captured"]}
        n_system = next(c["boundary"] for c in first.usage["gufo"]["captured"] if c["origin"] == "system")
        assert 512 <= n_system < first.usage["prompt_tokens"]
        for i in range(3):
            reply = witness.ask([opening, {"role": "user", "content": f"Another question, {i}."}])
            assert reply.cached == n_system
            assert "system" not in {c["origin"] for c in reply.usage["gufo"]["captured"]}


# -- edits ---------------------------------------------------------------------------------------
def test_an_edit_and_its_undo_find_both_branches(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with witnessed(tiny_model("qwen4exp"), monkeypatch) as witness:
        talk = Talk(system("edit"))
        stables = []
        for i in range(8):
            turn(witness, talk, f"Message number {i + 1} of eight?")
            stables.append(witness.stable())
        original = list(talk.messages)
        edited = Talk(messages=original[:3])  # system, first question, first answer
        reply = turn(witness, edited, "Message number two, edited?")
        assert reply.cached >= stables[0] > 100, "what came before the edit is there"
        assert reply.cached < stables[1]
        turn(witness, edited, "And on from the edit?")
        undone = Talk(messages=list(original))
        reply = turn(witness, undone, "Message number nine, after the undo?")
        assert reply.cached >= stables[7], "the old branch is back, to its last message"
        reply = turn(witness, edited, "And the edited branch again?")
        assert reply.cached > stables[0] + 20, "and so is the new one"


def test_an_edit_without_private_state_starts_at_the_edit(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with witnessed(tiny_model("llama"), monkeypatch) as witness:
        talk = Talk(system("rows"))
        for i in range(5):
            turn(witness, talk, f"Message number {i + 1} of five, of some length?")
        before = witness.prompt()
        talk.messages[5]["content"] = "Message number 3 of five, of SOME length?"
        reply = witness.ask(talk.messages[:6])
        after = witness.prompt()
        n = min(len(before), len(after))
        common = next(i for i in range(n) if before[i] != after[i])
        assert reply.cached == reply.usage["gufo"]["common_prefix_tokens"] == common
        assert reply.usage["gufo"]["prefilled_tokens"] == len(after) - common


# -- many conversations --------------------------------------------------------------------------
@pytest.mark.parametrize("n_slots", [2, 3, 4, 5, 6])
def test_more_conversations_than_slots_stay_warm(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, n_slots: int
) -> None:
    with witnessed(tiny_model("qwen4exp"), monkeypatch, n_slots=n_slots) as witness:
        talks = [Talk(system(chr(65 + i), 4)) for i in range(n_slots + 2)]
        stable = [0] * len(talks)
        for round_ in range(3):
            for i, talk in enumerate(talks):
                reply = turn(witness, talk, f"Question {round_}?", max_tokens=4)
                if round_:
                    assert reply.cached >= stable[i] > 40, f"{talk.system[:14]} in round {round_}"
                    assert reply.source == "ram"
                stable[i] = witness.stable()


def test_two_conversations_take_turns_in_two_slots(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with witnessed(tiny_model("qwen4exp"), monkeypatch, n_slots=2) as witness:
        talks, stable, slots = [Talk(system("A")), Talk(system("B"))], [0, 0], [-1, -1]
        for round_ in range(4):
            for i, talk in enumerate(talks):
                reply = turn(witness, talk, f"Question {round_}?")
                if round_:
                    assert reply.cached >= stable[i] > 100
                    assert witness.executor.last_slot == slots[i], "each keeps its own"
                stable[i], slots[i] = witness.stable(), witness.executor.last_slot
        assert slots[0] != slots[1]


def test_superseded_turns_go_before_the_last_copy_of_another(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen4exp")
    with witnessed(model, monkeypatch) as witness:
        once = Talk(system("B"))
        turn(witness, once, "Only once?")
        one = witness.engine.cache_status()["ram"]["unique_bytes"]
    with witnessed(model, monkeypatch, ram_bytes=4 * one) as witness:
        once = Talk(system("B"))
        turn(witness, once, "Only once?")
        last_copy = witness.stable()
        mine = {row["id"] for row in witness.engine.cache_status()["checkpoints"] if row["n_tokens"] <= last_copy}
        busy = Talk(system("A"))
        for i in range(10):
            turn(witness, busy, f"Question {i}, and so on and on?")
        gone = witness.removed()
        assert len(gone) >= 5, "the budget was felt"
        assert not mine & {e["checkpoint"] for e in gone}, "the other conversation's last copy is not among them"
        reply = turn(witness, once, "Still there?")
        assert reply.cached >= last_copy > 100 and reply.source == "ram"


def test_the_witness_sees_one_wrong_byte(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without it, agreement could mean that nothing is compared."""
    with witnessed(tiny_model("qwen4exp"), monkeypatch) as witness:
        talk = Talk(system("tampered"))
        turn(witness, talk, "First?")
        turn(witness, Talk(system("other")), "Something else takes the slot?")
        manager, pool = witness.engine._manager, witness.engine._pool

        def tamper() -> None:
            for checkpoint in manager.tables.checkpoints.all():
                buffer = checkpoint.parts.private
                assert buffer is not None
                pool.get(buffer, manager.buffer_bytes(buffer))[4096:8192:64] ^= 1

        witness.engine._owner.ask(tamper).result()
        with pytest.raises(AssertionError, match="bytes differ"):
            turn(witness, talk, "Second?")
