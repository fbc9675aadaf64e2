"""What usage says about reasoning, and probabilities after the sampler."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Running, Serve
from tests.server.standin import StandinEngine

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
Usage = dict[str, Any]


def chat_usage(running: Running, *, stream: bool, n: int = 1) -> Usage:
    if not stream:
        found: Usage = running.post(CHAT, messages=USER, n=n).json()["usage"]
        return found
    usage = None
    options: dict[str, Any] = {"stream_options": {"include_usage": True}, "n": n}
    for chunk in running.openai.chat.completions.create(model="any", messages=USER, stream=True, **options):  # type: ignore[call-overload]
        usage = chunk.usage or usage
    assert usage is not None
    return dict(usage.model_dump())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "reasoning", "total"),
    [
        (["<think>", "be", "cause", "</think>", "Hello", "!"], 3, 6),
        (["<think>", "because</think>Hel", "lo"], 2, 3),
        (["<think>", "never", "ended"], 3, 3),
        (["Hello", "!"], 0, 2),
    ],
)
def test_reasoning_tokens(serve: Serve, script: list[str], reasoning: int, total: int, stream: bool) -> None:
    running = serve(StandinEngine(script=lambda r: script))
    usage = chat_usage(running, stream=stream)
    assert usage["completion_tokens"] == total
    assert usage["completion_tokens_details"]["reasoning_tokens"] == reasoning


def test_reasoning_tokens_of_several_choices_add_up(serve: Serve) -> None:
    running = serve(StandinEngine(script=lambda r: ["<think>", "hm", "</think>", "Hello"]))
    for stream in (False, True):
        assert chat_usage(running, stream=stream, n=3)["completion_tokens_details"]["reasoning_tokens"] == 6


def test_reasoning_tokens_of_a_response(serve: Serve) -> None:
    running = serve(StandinEngine(script=lambda r: ["<think>", "hm", "</think>", "Hello"]))
    whole = running.openai.responses.create(model="any", input="hi")
    assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens == 2
    for event in running.openai.responses.create(model="any", input="hi", stream=True):
        if event.type == "response.completed":
            assert event.response.usage is not None
            assert event.response.usage.output_tokens_details.reasoning_tokens == 2
            break
    else:
        raise AssertionError("the stream did not complete")


def test_chances_after_the_sampler(running: Running) -> None:
    body: dict[str, Any] = {"messages": USER, "logprobs": True, "top_logprobs": 2, "post_sampling_probs": True}
    shown = running.post(CHAT, **body).json()["choices"][0]["logprobs"]["content"]
    assert running.engine.requests[-1].post_sampling and len(shown) == 3
    for entry in shown:
        assert 0 <= entry["prob"] <= 1 and "logprob" not in entry and "top_logprobs" not in entry
        assert [sorted(top) for top in entry["top_probs"]] == [["bytes", "id", "prob", "token"]] * 2
    whole = running.post("/completion", prompt="x", n_probs=3, post_sampling_probs=True).json()
    assert whole["generation_settings"]["post_sampling_probs"] is True
    assert len(whole["completion_probabilities"][0]["top_probs"]) == 3
    stream = running.post("/completion", prompt="x", n_probs=3, post_sampling_probs=True, stream=True).text
    assert '"top_probs"' in stream and '"logprob"' not in stream
