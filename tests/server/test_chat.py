"""/v1/chat/completions with the official client, against the scripted engine."""

from __future__ import annotations

import json
import math

import pytest

from gufo_gguf.backend.message_parser import MessageDelta
from gufo_gguf.cache.types import RequestReport
from gufo_gguf.engine.types import Finished, FinishReason, TextDelta, Timings
from gufo_gguf.server.chat.answer import Answer
from tests.server.conftest import Running, Serve
from tests.server.standin import StandinEngine, StandinParser
from tests.server.test_streams import eventually

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}]
THOUGHT = ["<think>", "h", "m", "</think>", "He", "llo"]
CALLS = [
    "On it.",
    '<tool_call>{"name": "look", "arguments": ',
    '{"at": "x"}}</tool_call>',
    '<tool_call>{"name": "look", "arguments": {"at": "y"}}',
    "</tool_call>",
]


def test_whole_answer(running: Running) -> None:
    answer = running.openai.chat.completions.create(model="any", messages=USER)  # type: ignore[arg-type]
    message = answer.choices[0].message
    assert (message.role, message.content, message.tool_calls) == ("assistant", "Hello world!", None)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    timings = answer.model_extra["timings"]  # type: ignore[index]
    assert timings["cache_n"] + timings["prompt_n"] == answer.usage.prompt_tokens


def test_later_turns_report_at_least_the_stable_boundary(running: Running) -> None:
    messages = [{"role": "system", "content": "Be brief."}]
    stable = 0
    for turn in range(3):
        messages.append({"role": "user", "content": f"Question {turn}"})
        answer = running.openai.chat.completions.create(model="any", messages=messages)  # type: ignore[arg-type]
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == stable
        stable = running.engine.requests[-1].stable[-1]
        assert 0 < stable < answer.usage.prompt_tokens
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})


def test_stream_has_one_role_then_content_then_reason(running: Running) -> None:
    chunks = list(running.openai.chat.completions.create(model="any", messages=USER, stream=True))  # type: ignore[arg-type]
    first, *rest = [c.choices[0] for c in chunks]
    assert (first.delta.role, first.delta.content) == ("assistant", None)
    assert all(c.delta.role is None for c in rest)
    assert "".join(c.delta.content or "" for c in rest) == "Hello world!"
    assert [c.finish_reason for c in rest] == [None, None, None, "stop"]


def test_stream_usage(running: Running) -> None:
    options = {"include_usage": True}
    chunks = list(
        running.openai.chat.completions.create(model="any", messages=USER, stream=True, stream_options=options)  # type: ignore[call-overload]
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 3
    assert chunks[-1].model_extra["timings"]["predicted_n"] == 3
    assert chunks[-1].usage.model_extra["gufo"]["reuse_source"] == "none"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_told_apart(serve: Serve, stream: bool) -> None:
    running = serve(StandinEngine(script=lambda r: THOUGHT))
    if not stream:
        message = running.post(CHAT, messages=USER).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "Hello")
        return
    deltas = [
        c.choices[0].delta for c in running.openai.chat.completions.create(model="any", messages=USER, stream=True)
    ]  # type: ignore[arg-type]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "hm"
    assert "".join(d.content or "" for d in deltas) == "Hello"


def test_reasoning_is_taken_back(running: Running) -> None:
    for name in ("reasoning_content", "reasoning"):
        past = {"role": "assistant", "content": "a", name: "because"}
        running.post(CHAT, messages=[*USER, past, *USER])
        assert running.engine.chat.inputs[-2].messages[1]["reasoning_content"] == "because"


def test_tool_calls_whole(serve: Serve) -> None:
    running = serve(StandinEngine(script=lambda r: CALLS))
    choice = running.openai.chat.completions.create(model="any", messages=USER, tools=TOOLS).choices[0]  # type: ignore[call-overload]
    assert choice.finish_reason == "tool_calls"
    assert [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls] == [
        ("look", {"at": "x"}),
        ("look", {"at": "y"}),
    ]
    assert len({c.id for c in choice.message.tool_calls}) == 2


def test_tool_calls_streamed(serve: Serve) -> None:
    running = serve(StandinEngine(script=lambda r: CALLS))
    with running.openai.chat.completions.stream(model="any", messages=USER, tools=TOOLS) as stream:  # type: ignore[arg-type]
        message = stream.get_final_completion().choices[0].message
    assert message.content == "On it."
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls or ()] == [
        ("look", '{"at": "x"}'),
        ("look", '{"at": "y"}'),
    ]


def test_no_tool_calls_means_no_field(running: Running) -> None:
    assert "tool_calls" not in running.post(CHAT, messages=USER, tools=TOOLS).json()["choices"][0]["message"]
    assert '"tool_calls"' not in running.post(CHAT, messages=USER, tools=TOOLS, stream=True).text


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "look"}}, {"type": "function", "function": {"name": "look"}}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, "required"),
    ],
)
def test_tool_choice_reaches_the_template(running: Running, choice: object, expected: object) -> None:
    assert running.post(CHAT, messages=USER, tools=TOOLS, tool_choice=choice).status_code == 200
    assert running.engine.chat.inputs[0].tool_choice == expected


def test_tools_of_other_types_are_skipped(running: Running) -> None:
    tools = [{"type": "web_search"}, *TOOLS, {"type": "code_interpreter", "container": {}}]
    assert running.post(CHAT, messages=USER, tools=tools).status_code == 200
    assert running.engine.chat.inputs[0].tools == TOOLS


@pytest.mark.parametrize("format_", [None, {"type": "text"}])
def test_free_text_has_no_schema(running: Running, format_: object) -> None:
    running.post(CHAT, messages=USER, response_format=format_)
    assert running.engine.chat.inputs[0].json_schema is None


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"response_format": {"type": "json_object"}}, {}),
        ({"response_format": {"type": "json_object", "schema": {"const": 1}}}, {"const": 1}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}},
            {"const": 1},
        ),
        ({"json_schema": {"const": 1}}, {"const": 1}),
    ],
)
def test_response_format_reaches_template_and_sampler(
    running: Running, fields: dict[str, object], schema: object
) -> None:
    running.post(CHAT, messages=USER, **fields)
    assert running.engine.chat.inputs[0].json_schema == schema
    assert running.engine.requests[0].sampling.grammar == "root ::= json"


@pytest.mark.parametrize(
    "format_", [{"type": "sound"}, {"type": "json_object", "schema": 5}, {"type": "json_schema", "json_schema": 5}]
)
def test_unusable_response_format(running: Running, format_: object) -> None:
    assert str(running.error(CHAT, messages=USER, response_format=format_)["param"]).startswith("response_format")


def test_messages_are_brought_into_one_form(running: Running) -> None:
    messages = [
        {"role": "developer", "content": "A"},
        {"role": "system", "content": [{"type": "text", "text": "B", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "one"}, {"type": "text", "text": "two"}],
            "name": "me",
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "done"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "x"}],
            "annotations": [],
        },
        {"role": "user", "content": "go"},
    ]
    assert running.post(CHAT, messages=messages).status_code == 200
    assert running.engine.chat.inputs[0].messages == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}, "id": "c"}],
        },
        {"role": "tool", "content": "done", "tool_call_id": "c"},
        {"role": "assistant", "content": "x", "reasoning_content": "t"},
        {"role": "user", "content": "go"},
    ]


def test_late_system_message_survives_a_template_that_refuses_it(running: Running) -> None:
    running.engine.chat.refuse_late_system = True
    messages = [
        {"role": "system", "content": "A"},
        *USER,
        {"role": "assistant", "content": "x"},
        {"role": "system", "content": "B"},
        *USER,
    ]
    assert running.post(CHAT, messages=messages).status_code == 200
    assert [m["role"] for m in running.engine.chat.inputs[-1].messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "user",
    ]


def test_template_kwargs_thinking_and_effort(running: Running) -> None:
    inputs = running.engine.chat.inputs
    for fields, thinking, effort in [
        ({}, True, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "high"}, True, "high"),
        ({"reasoning": {"effort": "low"}}, True, "low"),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"enable_thinking": False}, False, None),
    ]:
        inputs.clear()
        assert running.post(CHAT, messages=USER, **fields).status_code == 200
        assert inputs[0].enable_thinking is thinking
        assert inputs[0].template_kwargs.get("reasoning_effort") == effort
    running.post(CHAT, messages=USER, thinking_budget_tokens=64)
    assert running.engine.requests[-1].sampling.reasoning_budget_tokens == 64
    assert running.engine.requests[-1].sampling.reasoning_budget_start_tag == "<think>"


def test_logprobs(running: Running) -> None:
    answer = running.openai.chat.completions.create(model="any", messages=USER, logprobs=True, top_logprobs=2)  # type: ignore[arg-type]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(t.token for t in logprobs.content) == "Hello world!"
    assert [len(t.top_logprobs) for t in logprobs.content] == [2, 2, 2]
    assert running.engine.requests[0].n_logprobs == 2


def test_logprobs_without_alternatives(running: Running) -> None:
    answer = running.post(CHAT, messages=USER, logprobs=True).json()
    assert [t["top_logprobs"] for t in answer["choices"][0]["logprobs"]["content"]] == [[], [], []]
    assert running.engine.requests[0].n_logprobs == 1


def test_streamed_logprobs_cover_every_token(serve: Serve) -> None:
    running = serve(StandinEngine(script=lambda r: THOUGHT))
    seen = ""
    for chunk in running.openai.chat.completions.create(model="any", messages=USER, logprobs=True, stream=True):  # type: ignore[arg-type]
        logprobs = chunk.choices[0].logprobs
        seen += "".join(t.token for t in logprobs.content or ()) if logprobs else ""
    assert seen == "".join(THOUGHT)


def test_several_choices(running: Running) -> None:
    answer = running.openai.chat.completions.create(model="any", messages=USER, n=2, seed=3)  # type: ignore[arg-type]
    assert [c.index for c in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(running.engine.requests[0].tokens)
    assert answer.usage.completion_tokens == 6
    assert [r.sampling.seed for r in running.engine.requests] == [3, 4]


def test_sampling_fields_reach_the_engine(running: Running) -> None:
    fields: dict[str, object] = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repeat_penalty": 1.1,
        "repeat_last_n": 32,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "dry_multiplier": 0.8,
        "dry_sequence_breakers": ["\n"],
        "xtc_probability": 0.4,
        "mirostat": 2,
        "seed": -1,
        "samplers": ["top_k"],
        "ignore_eos": True,
        "grammar": "root ::= x",
    }
    assert running.post(CHAT, messages=USER, **fields).status_code == 200
    sampling = running.engine.requests[0].sampling
    fields["seed"] = 2**32 - 1
    assert {name: getattr(sampling, name) for name in fields} == fields
    running.post(CHAT, messages=USER, repetition_penalty=1.2)
    assert running.engine.requests[1].sampling.repeat_penalty == 1.2


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ({"65": -100}, {65: -100.0}),
        ([[65, 1.5], ["BC", False]], {65: 1.5, 66: -math.inf, 67: -math.inf}),
        ({"BC": 2}, {66: 2.0, 67: 2.0}),
    ],
)
def test_logit_bias(running: Running, bias: object, expected: dict[int, float]) -> None:
    running.post(CHAT, messages=USER, logit_bias=bias)
    assert running.engine.requests[0].sampling.logit_bias == expected


def test_stop_strings_of_the_template_are_added(running: Running) -> None:
    running.post(CHAT, messages=USER, stop=["END"])
    assert running.engine.requests[0].stop == ("END", "<|im_end|>")


def test_assistant_beginning_is_continued(running: Running) -> None:
    messages = [*USER, {"role": "assistant", "content": "Hel"}]
    running.post(CHAT, messages=messages)
    assert running.engine.chat.inputs[0].continue_final is True
    running.engine.chat.inputs.clear()
    running.post(CHAT, messages=messages, add_generation_prompt=True)
    assert running.engine.chat.inputs[0].continue_final is False
    error = running.error(CHAT, messages=messages, add_generation_prompt=True, continue_final_message=True)
    assert error["param"] == "continue_final_message"


def test_cache_prompt_false_asks_for_no_boundaries(running: Running) -> None:
    running.post(CHAT, messages=USER, cache_prompt=False)
    request = running.engine.requests[0]
    assert (request.cache_prompt, request.stable) == (False, ())


def test_progress_is_reported_when_asked_for(running: Running) -> None:
    text = running.post(CHAT, messages=USER, stream=True, return_progress=True).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    progress = [c["prompt_progress"] for c in chunks if "prompt_progress" in c]
    n_prompt = len(running.engine.requests[0].tokens)
    assert progress[0]["processed"] == progress[0]["cache"] == 0
    assert progress[-1]["processed"] == progress[-1]["total"] == n_prompt
    running.post(CHAT, messages=USER, stream=True)
    assert running.engine.requests[1].progress is False


def test_prompt_can_be_shown_and_counted(running: Running) -> None:
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert running.post(CHAT, messages=USER, verbose=True).json()["__verbose"]["prompt"] == prompt
    assert "__verbose" not in running.post(CHAT, messages=USER).json()
    counted = running.post(CHAT + "/input_tokens", messages=USER).json()["input_tokens"]
    assert counted == len(running.engine.requests[0].tokens)


def test_parsers_are_closed(serve: Serve) -> None:
    running = serve(StandinEngine(script=lambda r: THOUGHT))
    running.post(CHAT, messages=USER)
    running.post(CHAT, messages=USER, stream=True)
    assert len(running.engine.chat.parsers) == 2
    # the client has its last byte before the server's generator has run to its end
    assert eventually(lambda: all(p.closed for p in running.engine.chat.parsers))


def test_long_answers_are_parsed_in_gathered_pieces() -> None:
    now = 0.0
    pieces: list[str] = []

    class Costly(StandinParser):
        def feed(self, text: str, *, final: bool = False) -> list[MessageDelta]:
            nonlocal now
            now += 1e-6 * len(self.text)  # as the real one, which reads everything again
            pieces.append(text)
            return super().feed(text, final=final)

    answer = Answer(Costly(), clock=lambda: now, cost=lambda: now)
    text = ""
    for _ in range(4000):
        now += 0.001
        text += "".join(d.content for d in answer.feed(TextDelta(" word", (1,))))
    busy = sum(1e-6 * 5 * i for i in range(4000))
    assert 1e-6 * sum(len("".join(pieces[:i])) for i in range(len(pieces))) < busy / 5
    assert pieces[:200] == [" word"] * 200, "the beginning comes piece by piece"
    report = RequestReport()
    last = Finished(FinishReason.STOP, None, 1, 4000, Timings(0, 1, 1, 4000, 1), report)
    text += "".join(d.content for d in answer.feed(last))
    assert text == " word" * 4000
