"""Sessions of coding agents: every request is served, and each turn extends the one before."""

from __future__ import annotations

import httpx
import pytest

from tests.server.agents import AGENTS, Agent
from tests.server.conftest import Running, Serve
from tests.server.standin import StandinEngine


def send(running: Running, agent: Agent) -> list[httpx.Response]:
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "context-management-2025-06-27",
        "x-stainless-lang": "js",
    }
    return [running.http.post(agent.path, json=body, headers=headers) for body in agent.requests]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda a: a.name)
def test_session(running: Running, agent: Agent) -> None:
    for answer in send(running, agent):
        assert answer.status_code == 200, answer.text
        assert "Hello" in answer.text and "error" not in answer.text.replace('"error":null', "")
    first, tool_turn, _side, compaction, retry = running.engine.requests
    for earlier, later in ((first, tool_turn), (tool_turn, compaction)):
        stable = earlier.stable[-1]
        assert stable > 100
        assert later.tokens[:stable].tolist() == earlier.tokens[:stable].tolist(), "the next turn extends this one"
    assert retry.tokens.tolist() == first.tokens.tolist()


@pytest.mark.parametrize("agent", AGENTS, ids=lambda a: a.name)
def test_tools_reach_the_template(running: Running, agent: Agent) -> None:
    send(running, agent)
    names = [tool["function"]["name"] for tool in running.engine.chat.inputs[0].tools]
    assert names in (["Bash"], ["shell"], ["bash"], [])
    assert bool(names) == ("tools" in agent.first)
    roles = [m["role"] for m in next(i for i in running.engine.chat.inputs if len(i.messages) > 3).messages]
    if names:
        assert roles[-2:] == ["assistant", "tool"] or "tool" in roles


def test_reasoning_comes_back_in_every_api(serve: Serve) -> None:
    running = serve(StandinEngine(script=lambda r: ["<think>", "because", "</think>", "Hello"]))
    for agent in AGENTS:
        answer = running.http.post(agent.path, json=agent.first)
        assert "because" in answer.text and "think>" not in answer.text, agent.name
