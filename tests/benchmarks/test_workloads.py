"""The workloads do what their titles say, at every size, and are the same each time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.agent.oracle import Played, common_prefix, lcp
from benchmarks.agent.trace import HIGH_ID, LOW_ID, Ask, Restart, Sizes, Step, Text, deepest, rehearse
from benchmarks.agent.workloads import WORKLOADS, Workload, by_name


def asks(steps: list[Step]) -> list[Ask]:
    return [ask for step in steps if not isinstance(step, Restart) for ask in step]


def workload(name: str) -> Workload:
    return by_name(name)[0]


def trace(name: str, scale: float = 1.0) -> list[Played]:
    found = []
    for ask in asks(rehearse(workload(name), Sizes(scale))):
        assert ask.tokens is not None
        found.append(Played(ask.tokens, np.full(ask.n_answer, LOW_ID, np.int32)))
    return found


@pytest.mark.parametrize("one", WORKLOADS, ids=lambda w: w.name)
def test_every_workload_is_deterministic_and_scales(one: Workload) -> None:
    small, again, full = (asks(rehearse(one, Sizes(scale))) for scale in (0.1, 0.1, 1.0))
    for a, b in zip(small, again, strict=True):
        assert a.messages == b.messages
        assert a.tokens is None or (b.tokens is not None and np.array_equal(a.tokens, b.tokens))
    assert deepest(one, Sizes(0.1)) < deepest(one, Sizes(1.0)) / 4
    for ask in full:
        assert (ask.tokens is None) != (ask.messages is None) and ask.n_answer >= 4
        assert ask.tokens is None or (ask.tokens.min() >= LOW_ID and ask.tokens.max() < HIGH_ID)


def test_another_seed_is_another_text() -> None:
    one, other = (asks(rehearse(workload("agent"), Sizes(0.1, seed)))[0].tokens for seed in (0, 1))
    assert one is not None and other is not None and lcp(one, other) < 5


def test_text_depends_on_its_label_alone() -> None:
    text = Text(3)
    first = text.draw("a", 50)
    text.draw("b", 70)
    assert np.array_equal(first, text.draw("a", 50)) and not np.array_equal(first, text.draw("b", 50))


def test_the_agent_reaches_thirty_thousand_tokens_in_forty_turns_by_appending() -> None:
    played = trace("agent")
    assert len(played) == 40 and len(played[-1].prompt) > 28_000
    new = common_prefix(played)[1:]
    assert all(n < 3_100 for n in new)  # nothing but what each turn appends


def test_subagents_share_six_thousand_tokens_with_their_parent() -> None:
    played = [a.tokens for a in asks(rehearse(workload("subagents"), Sizes())) if a.kind == "subagent"]
    assert len(played) == 8
    assert all(lcp(played[0], p) == 6_000 for p in played[1:] if p is not None and played[0] is not None)  # type: ignore[arg-type]


def test_six_conversations_take_turns() -> None:
    names = [a.conversation for a in asks(rehearse(workload("rotating"), Sizes()))]
    assert len(set(names)) == 6 and all(names[i] != names[i + k] for i in range(30) for k in range(1, 6))


def test_an_edit_leaves_the_trunk_and_an_undo_returns_to_it() -> None:
    steps = asks(rehearse(workload("edits"), Sizes()))
    played = [a.tokens for a in steps]
    for i, ask in enumerate(steps):
        if ask.kind == "edit":
            shared = max(lcp(p, ask.tokens) for p in played[:i])  # type: ignore[arg-type]
            assert len(ask.tokens) - shared == 900  # type: ignore[arg-type]
    undone = [i for i, ask in enumerate(steps) if ask.kind == "undo"]
    assert len(undone) == 3
    for i in undone:
        assert max(lcp(p, steps[i].tokens) for p in played[:i]) < len(steps[i].tokens)  # type: ignore[arg-type]
        assert lcp(played[i - 1], steps[i].tokens) < len(played[i - 1])  # type: ignore[arg-type]


def test_thinking_never_comes_back() -> None:
    history = asks(rehearse(workload("thinking"), Sizes(0.1)))[-1].messages
    assert history is not None and all("reasoning_content" not in m for m in history)
    assert {m["role"] for m in history} == {"system", "user", "assistant", "tool"}


def test_side_requests_do_not_enter_the_conversation() -> None:
    steps = asks(rehearse(workload("side"), Sizes()))
    main = [a.tokens for a in steps if a.conversation == "main"]
    assert {a.kind for a in steps} == {"start", "turn", "title", "summary"}
    assert all(lcp(a, b) == len(a) for a, b in itertools.pairwise(main))  # type: ignore[arg-type]


def test_compaction_keeps_the_system_prompt_and_nothing_else() -> None:
    steps = asks(rehearse(workload("compaction"), Sizes()))
    after = [i + 1 for i, a in enumerate(steps[:-1]) if a.kind == "summary"]
    assert len(after) == 2
    first = after[0]  # in a rehearsal all summaries are equal, so only the first round is new
    shared = max(lcp(p.tokens, steps[first].tokens) for p in steps[:first])  # type: ignore[arg-type]
    assert shared == 4_000


@pytest.mark.parametrize(("name", "kill"), [("restart", False), ("kill", True)])
def test_the_restart_comes_in_the_middle(name: str, kill: bool) -> None:
    steps = rehearse(workload(name), Sizes())
    at = [i for i, s in enumerate(steps) if isinstance(s, Restart)]
    assert len(at) == 1 and steps[at[0]] == Restart(kill)
    after = steps[at[0] + 1]
    assert not isinstance(after, Restart) and after[0].kind == "resumed"
    assert after[0].tokens is not None and 15_000 < len(after[0].tokens) < 25_000


def test_four_conversations_start_at_the_same_moment() -> None:
    first = rehearse(workload("starts"), Sizes())[0]
    assert not isinstance(first, Restart) and len(first) == 4
    assert lcp(first[0].tokens, first[3].tokens) == 6_000  # type: ignore[arg-type]


def test_workloads_are_found_by_name_and_letter() -> None:
    assert [w.letter for w in by_name("c,agent")] == ["c", "a"]
    with pytest.raises(ValueError, match="no workload 'z'"):
        by_name("z")
