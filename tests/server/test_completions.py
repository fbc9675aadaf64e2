"""/v1/completions with the official client, against the scripted engine."""

from __future__ import annotations

import pytest

from tests.server.conftest import Running, Serve
from tests.server.standin import StandinEngine, tokens_of


def test_whole_answer_has_usage_and_timings(running: Running) -> None:
    answer = running.openai.completions.create(model="any", prompt="Once", max_tokens=8)
    assert answer.choices[0].text == "Hello world!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokens_of("Once"))
    assert answer.usage.completion_tokens == 3
    timings = answer.model_extra["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == answer.usage.prompt_tokens


def test_second_request_reports_what_was_cached(running: Running) -> None:
    first = running.post("/v1/completions", prompt="Once upon").json()["usage"]
    second = running.post("/v1/completions", prompt="Once upon a time").json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert first["gufo"]["reuse_source"] == "none"
    assert first["gufo"]["miss_reason"] == "no_checkpoint"
    assert second["prompt_tokens_details"]["cached_tokens"] == len(tokens_of("Once upon"))
    assert second["gufo"]["reuse_source"] == "ram"
    assert second["gufo"]["restored_tokens"] + second["gufo"]["prefilled_tokens"] == second["prompt_tokens"]


def test_cache_prompt_false_reaches_the_engine(running: Running) -> None:
    running.post("/v1/completions", prompt="Once", cache_prompt=False)
    assert running.engine.requests[0].cache_prompt is False


def test_stream_equals_whole(running: Running) -> None:
    chunks = list(running.openai.completions.create(model="any", prompt="Once", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "Hello world!"
    assert [c.choices[0].finish_reason for c in chunks[-2:]] == [None, "stop"]
    assert len({c.id for c in chunks}) == 1


def test_stream_usage_comes_last_when_asked_for(running: Running) -> None:
    options = {"include_usage": True}
    chunks = list(running.openai.completions.create(model="any", prompt="Once", stream=True, stream_options=options))
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3
    assert all(c.usage is None for c in chunks[:-1])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[256, 97, 98]]),
        ([97, 98], [[97, 98]]),
        ([97, "b", 99], [[97, 98, 99]]),
        (["a", "b"], [[256, 97], [256, 98]]),
        ([[97], "b", [98, "c"]], [[97], [256, 98], [98, 99]]),
        ({"prompt_string": "a"}, [[256, 97]]),
    ],
)
def test_prompt_forms(running: Running, prompt: object, expected: list[list[int]]) -> None:
    answer = running.post("/v1/completions", prompt=prompt)
    assert answer.status_code == 200
    assert [r.tokens.tolist() for r in running.engine.requests] == expected
    assert len(answer.json()["choices"]) == len(expected)


@pytest.mark.parametrize("prompt", [None, 5, [], [[]], [1.5], [True], [[1, None]], {"a": 1}, [-1], [1 << 31]])
def test_unusable_prompts_name_the_field(running: Running, prompt: object) -> None:
    assert running.error("/v1/completions", prompt=prompt)["param"] == "prompt"


def test_choices_of_several_prompts_are_counted_once_per_prompt(running: Running) -> None:
    body = running.post("/v1/completions", prompt=["ab", "cde"], n=2, seed=5).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == len(tokens_of("ab")) + len(tokens_of("cde"))
    assert body["usage"]["completion_tokens"] == 4 * 3
    assert [r.sampling.seed for r in running.engine.requests] == [5, 6, 5, 6]


def test_streams_of_several_choices_are_told_apart(serve: Serve) -> None:
    running = serve(StandinEngine(script=lambda r: [str(r.sampling.seed), "."]))
    chunks = list(running.openai.completions.create(model="any", prompt="x", n=3, seed=7, stream=True))
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["7.", "8.", "9."]


def test_echo_puts_the_prompt_first(running: Running) -> None:
    assert (
        running.post("/v1/completions", prompt="Once ", echo=True).json()["choices"][0]["text"] == "Once Hello world!"
    )
    assert running.post("/v1/completions", prompt=[65, 66], echo=True).json()["choices"][0]["text"] == "ABHello world!"
    chunks = list(running.openai.completions.create(model="any", prompt="Once ", echo=True, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "Once Hello world!"


def test_logprobs(running: Running) -> None:
    logprobs = running.openai.completions.create(model="any", prompt="x", logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Hello", " world", "!"]
    assert logprobs.token_logprobs == [-0.25, -0.25, -0.25]
    assert logprobs.text_offset == [0, 5, 11]
    assert logprobs.top_logprobs == [{"A": -0.5, "B": -1.0}] * 3


def test_stop_strings_end_the_answer(running: Running) -> None:
    body = running.post("/v1/completions", prompt="x", stop=" wor").json()
    assert body["choices"][0] == {"text": "Hello", "index": 0, "logprobs": None, "finish_reason": "stop"}
    assert running.engine.requests[0].stop == (" wor",)


def test_max_tokens_ends_with_length(running: Running) -> None:
    body = running.post("/v1/completions", prompt="x", max_tokens=1).json()
    assert body["choices"][0]["text"] == "Hello"
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5}, 5),
        ({"n_predict": 6, "max_tokens": 5}, 6),
        ({"max_completion_tokens": 7, "max_tokens": None}, 7),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 9.0}, 9),
        ({}, None),
    ],
)
def test_token_limit_has_three_names(running: Running, fields: dict[str, object], expected: int | None) -> None:
    assert running.post("/v1/completions", prompt="x", **fields).status_code == 200
    assert running.engine.requests[0].max_tokens == expected


def test_json_schema_becomes_a_grammar(running: Running) -> None:
    running.post("/v1/completions", prompt="x", json_schema={"type": "object"})
    assert running.engine.requests[0].sampling.grammar == "root ::= json"
    assert running.error("/v1/completions", prompt="x", json_schema={"type": "hiccup"})["param"] == "json_schema"
