"""The whole server on real models: tiny ones of random weights, and those with a name.

What is asserted is what a user sees: how much of a prompt was cached, where it came from, that the
answer keeps its shape.  That restored state is exact is shown in tests/qualification.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from gufo_gguf.engine.types import GenerateRequest
from gufo_gguf.server.settings import ServerSettings
from tests.conftest import tiny_model_path
from tests.server.agents import AGENTS, Agent
from tests.server.conftest import Running, running_server
from tests.server.test_streams import eventually

pytestmark = pytest.mark.native

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You answer in few words. " * 30}
Message = dict[str, Any]


@dataclass
class Conversation:
    """A chat as an agent keeps it; each turn checks what its answer says about reuse."""

    running: Running
    messages: list[Message] = field(default_factory=lambda: [SYSTEM])

    def turn(self, text: str, **fields: object) -> dict[str, Any]:
        """Send one more user message, streaming; returns the usage."""
        self.messages.append({"role": "user", "content": text})
        usage, answer = stream_chat(self.running, self.messages, **fields)
        self.messages.append({"role": "assistant", "content": answer})
        return usage


def stream_chat(running: Running, messages: list[Message], **fields: object) -> tuple[dict[str, Any], str]:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "stream_options": {"include_usage": True}, **fields}
    text, usage = "", None
    for chunk in running.openai.chat.completions.create(model="any", messages=messages, stream=True, **options):  # type: ignore[call-overload]
        if chunk.choices and chunk.choices[0].delta.content:
            text += chunk.choices[0].delta.content
        usage = chunk.usage or usage
    assert usage is not None
    timings = chunk.model_extra["timings"]
    found: dict[str, Any] = usage.model_dump()
    assert timings["cache_n"] == found["prompt_tokens_details"]["cached_tokens"]
    assert timings["cache_n"] + timings["prompt_n"] == found["prompt_tokens"]
    return found, text


NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def one_of(name: str, *values: str) -> dict[str, Any]:
    """Schema of an object with one field of few values."""
    properties = {name: {"enum": list(values)}}
    return {"type": "object", "properties": properties, "required": [name], "additionalProperties": False}


def events_of(text: str) -> list[dict[str, Any]]:
    """Objects of a stream's data lines."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


class Recorded:
    """What the server asked the engine for: the stable boundaries are there."""

    def __init__(self, engine: Any) -> None:
        self.requests: list[GenerateRequest] = []
        self._submit = engine.submit
        engine.submit = self.submit

    def submit(self, request: GenerateRequest) -> Any:
        self.requests.append(request)
        return self._submit(request)

    @property
    def last_stable(self) -> int:
        return min(self.requests[-1].stable)


def native_server(path: Any, n_slots: int, **llama: Any) -> Iterator[tuple[Running, Recorded]]:
    from gufo_gguf.backend.llama import LlamaOptions
    from gufo_gguf.engine.engine import Engine, EngineOptions

    options = LlamaOptions(n_ctx=4096, n_slots=n_slots, n_batch=512, n_ubatch=128, n_threads=1, **llama)
    engine = Engine.load(path, EngineOptions(llama=options, cache_ram_bytes=256 << 20))
    recorded = Recorded(engine)
    with running_server(engine, ServerSettings(port=0, drain_s=0.2)) as running:
        yield running, recorded
        assert engine.check() == []
        assert eventually(lambda: not any(s["is_processing"] for s in engine.slots()))


@pytest.fixture(scope="module", params=["qwen4exp", "llama"])
def one_slot(request: pytest.FixtureRequest) -> Iterator[tuple[Running, Recorded]]:
    yield from native_server(tiny_model_path(request.param), 1)


@pytest.fixture(scope="module")
def two_slots() -> Iterator[tuple[Running, Recorded]]:
    yield from native_server(tiny_model_path("qwen4exp"), 2)


def test_three_turns(one_slot: tuple[Running, Recorded]) -> None:
    running, recorded = one_slot
    chat = Conversation(running, [{"role": "system", "content": "Three turns. " * 40}])
    assert cached(chat.turn("First?")) < 20
    for text in ("Second?", "Third?"):
        stable = recorded.last_stable
        usage = chat.turn(text)
        assert cached(usage) >= stable > 100
        assert usage["gufo"]["reuse_source"] in ("live", "ram")
        assert usage["gufo"]["prefilled_tokens"] == usage["prompt_tokens"] - cached(usage)


def test_edit_of_the_last_message_restores_what_came_before(one_slot: tuple[Running, Recorded]) -> None:
    running, recorded = one_slot
    chat = Conversation(running, [{"role": "system", "content": "An edit. " * 40}])
    chat.turn("First?")
    before = recorded.last_stable
    chat.turn("Second, with a mistake?")
    edited = [*chat.messages[:-2], {"role": "user", "content": "Second, without?"}]
    usage, _ = stream_chat(running, edited)
    assert cached(usage) >= before > 100
    assert usage["gufo"]["reuse_source"] in ("live", "ram")


def test_two_conversations_take_turns_on_one_slot(one_slot: tuple[Running, Recorded]) -> None:
    running, recorded = one_slot
    chats = [Conversation(running, [{"role": "system", "content": f"Conversation {name}. " * 40}]) for name in "AB"]
    stable = [0, 0]
    for turn in range(3):
        for i, chat in enumerate(chats):
            usage = chat.turn(f"Question {turn}?")
            assert cached(usage) >= stable[i]
            if turn:
                assert usage["gufo"]["reuse_source"] == "ram"
                assert stable[i] > 100
            stable[i] = recorded.last_stable


def test_identical_request_again_evaluates_nothing_or_one_token(one_slot: tuple[Running, Recorded]) -> None:
    running, _ = one_slot
    messages = [{"role": "system", "content": "Again. " * 40}, {"role": "user", "content": "Same?"}]
    first, answer = stream_chat(running, messages)
    second, again = stream_chat(running, messages)
    assert cached(second) >= first["prompt_tokens"] - 1
    assert again == answer


def test_client_gone_then_retry(one_slot: tuple[Running, Recorded]) -> None:
    running, recorded = one_slot
    messages = [{"role": "system", "content": "Gone. " * 60}, {"role": "user", "content": "Tell a long story."}]
    body = {"messages": messages, "stream": True, "max_tokens": 2000, "ignore_eos": True}
    with running.http.stream("POST", CHAT, json=body) as stream:
        texts = stream.iter_text()
        seen = next(texts)
        while '"content":"' not in seen:
            seen += next(texts)
    assert eventually(lambda: not any(s["is_processing"] for s in running.engine.slots())), "the slot is free again"
    usage, _ = stream_chat(running, messages)
    assert cached(usage) >= recorded.last_stable > 100


def test_client_gone_in_prefill_leaves_a_usable_server(one_slot: tuple[Running, Recorded]) -> None:
    running, _ = one_slot
    messages = [{"role": "user", "content": "word " * 1500}]
    body = {"messages": messages, "stream": True, "return_progress": True, "max_tokens": 4}
    with running.http.stream("POST", CHAT, json=body) as stream:
        texts = stream.iter_text()
        seen = next(texts)
        while "prompt_progress" not in seen:
            seen += next(texts)
    assert eventually(lambda: not any(s["is_processing"] for s in running.engine.slots()))
    assert running.engine.check() == []  # type: ignore[attr-defined]
    usage, _ = stream_chat(running, messages, max_tokens=4)
    assert usage["completion_tokens"] == 4


def test_cache_prompt_false_neither_reads_nor_writes(one_slot: tuple[Running, Recorded]) -> None:
    running, _ = one_slot
    messages = [{"role": "system", "content": "Cold. " * 40}, {"role": "user", "content": "Twice?"}]
    for _ in range(2):
        usage, _answer = stream_chat(running, messages, extra_body={"cache_prompt": False})
        assert cached(usage) == 0
        assert usage["gufo"]["miss_reason"] == "disabled"
        assert usage["gufo"]["captured"] == []


def test_text_completions_reuse_too(one_slot: tuple[Running, Recorded]) -> None:
    running, _ = one_slot
    prompt = "Once upon a time there was a server." * 20
    first = running.post("/v1/completions", prompt=prompt, max_tokens=4, temperature=0).json()
    longer = running.post("/v1/completions", prompt=prompt + "\n\nAnd then", max_tokens=4, temperature=0).json()
    assert cached(first["usage"]) < 20  # a model without private state is cut wherever prompts part
    assert cached(longer["usage"]) > 0.8 * first["usage"]["prompt_tokens"]
    ids = running.post("/tokenize", content=prompt, add_special=True).json()["tokens"]
    as_ids = running.post("/v1/completions", prompt=ids, max_tokens=4, temperature=0).json()
    assert as_ids["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"] == len(ids)


def test_stream_equals_whole(one_slot: tuple[Running, Recorded]) -> None:
    running, _ = one_slot
    messages = [{"role": "user", "content": "Say something."}]
    _, streamed = stream_chat(running, messages, extra_body={"cache_prompt": False})
    whole = running.post(CHAT, messages=messages, max_tokens=12, temperature=0, cache_prompt=False).json()
    assert whole["choices"][0]["message"]["content"] == streamed


def test_seed_repeats_and_differs(one_slot: tuple[Running, Recorded]) -> None:
    running, _ = one_slot
    fields = {"prompt": "Once", "max_tokens": 16, "temperature": 1.5, "cache_prompt": False, "ignore_eos": True}
    texts = [running.post("/v1/completions", seed=seed, **fields).json()["choices"][0]["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_logprobs_cover_the_text(one_slot: tuple[Running, Recorded]) -> None:
    running, _ = one_slot
    body = running.post("/completion", prompt="Once", n_predict=8, n_probs=5, temperature=0, ignore_eos=True).json()
    probabilities = body["completion_probabilities"]
    assert len(probabilities) == 8
    for one in probabilities:
        assert len(one["top_logprobs"]) == 5
        assert one["top_logprobs"][0]["id"] == one["id"], "greedy takes the most likely token"
        assert one["logprob"] <= 0
    assert bytes(b for one in probabilities for b in one["bytes"]).decode("utf-8", "replace") == body["content"]


def test_schema_constrains_the_answer(one_slot: tuple[Running, Recorded]) -> None:
    running, _ = one_slot
    schema = {
        "type": "object",
        "properties": {"answer": {"enum": ["yes", "no"]}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    format_ = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    fields = {
        "response_format": format_,
        "max_tokens": 200,
        "seed": 1,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    body = running.post(CHAT, messages=[{"role": "user", "content": "?"}], **fields).json()
    choice = body["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"])["answer"] in ("yes", "no")


def test_required_tool_is_called(one_slot: tuple[Running, Recorded]) -> None:
    running, _ = one_slot
    parameters = {
        "type": "object",
        "properties": {"unit": {"enum": ["c", "f"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": parameters}}]
    # the grammar allows any text before the call, and a model of random weights would never come to it
    call_text = '<tool_call>\n{"name": "weather", "arguments": {"unit": "c"}}\n</tool_call>'
    wanted = set(running.post("/tokenize", content=call_text).json()["tokens"])
    others = [
        [t, False] for t in range(running.engine.info.n_vocab) if t not in wanted and not running.engine.vocab.is_eog(t)
    ]
    flat = {"temperature": 5, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 1, "max_tokens": 1000}
    body = running.post(
        CHAT,
        messages=[{"role": "user", "content": "?"}],
        tools=tools,
        tool_choice="required",
        logit_bias=others,
        **NO_THINKING,
        **flat,
    ).json()
    message = body["choices"][0]["message"]
    assert body["choices"][0]["finish_reason"] == "tool_calls", body
    call = message["tool_calls"][0]["function"]
    assert call["name"] == "weather"
    assert json.loads(call["arguments"])["unit"] in ("c", "f")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"grammar": "root ::= this is (not a grammar"}, "grammar"),
        ({"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}}, None),
        ({"samplers": ["no_such_sampler"]}, "samplers"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ],
)
def test_what_only_the_engine_can_refuse(
    one_slot: tuple[Running, Recorded], fields: dict[str, object], param: str | None
) -> None:
    running, _ = one_slot
    for stream in (False, True):
        answer = running.post(CHAT, messages=[{"role": "user", "content": "x"}], stream=stream, **fields)
        assert answer.status_code == 400, answer.text
        if param:
            assert answer.json()["error"]["param"] == param


def test_context_length_exceeded_and_the_edge_below(one_slot: tuple[Running, Recorded]) -> None:
    running, _ = one_slot
    n_ctx = running.engine.info.n_ctx
    ids = running.post("/tokenize", content="word").json()["tokens"]
    error = running.error("/v1/completions", prompt=(ids * n_ctx)[:n_ctx])
    assert (error["code"], error["n_ctx"], error["n_prompt_tokens"]) == ("context_length_exceeded", n_ctx, n_ctx)
    prompt = (ids * n_ctx)[: n_ctx - 3]
    body = running.post("/v1/completions", prompt=prompt, max_tokens=50, ignore_eos=True).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert 1 <= body["usage"]["completion_tokens"] <= 4, "a full context ends the answer"


def test_progress_starts_at_the_cached_part(one_slot: tuple[Running, Recorded]) -> None:
    running, _ = one_slot
    messages = [{"role": "user", "content": "progress " * 300}]
    for turn in range(2):
        text = running.post(CHAT, messages=messages, stream=True, return_progress=True, max_tokens=2).text
        progress = [c["prompt_progress"] for c in events_of(text) if "prompt_progress" in c]
        if turn == 0:
            assert len(progress) >= 2
            assert [p["processed"] for p in progress] == sorted(p["processed"] for p in progress)
            assert progress[-1]["processed"] == progress[-1]["total"]
        assert all(p["cache"] <= p["processed"] <= p["total"] for p in progress)


def test_anthropic_counts_what_was_cached(one_slot: tuple[Running, Recorded]) -> None:
    running, _ = one_slot
    body = {
        "system": "Anthropic. " * 40,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 8,
        "stream": True,
    }
    starts = []
    for _ in range(2):
        events = [
            json.loads(line[6:])
            for line in running.post("/v1/messages", **body).text.splitlines()
            if line.startswith("data: ")
        ]
        starts.append(events[0]["message"]["usage"])
        assert events[-1] == {"type": "message_stop"}
    total = [u["input_tokens"] + u["cache_read_input_tokens"] for u in starts]
    assert total[0] == total[1] == running.post("/v1/messages/count_tokens", **body).json()["input_tokens"]
    assert starts[0]["cache_read_input_tokens"] < 20 and starts[1]["cache_read_input_tokens"] > 100


def test_metrics_and_cache_status_of_a_real_engine(one_slot: tuple[Running, Recorded]) -> None:
    running, _ = one_slot
    running.post("/completion", prompt="Once", n_predict=3, ignore_eos=True)
    text = running.http.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["llamacpp:tokens_predicted_total"]) >= 3
    assert float(values["llamacpp:n_decode_total"]) > 0
    status = running.http.get("/v1/cache").json()
    assert status["enabled"] is True and status["checkpoints"]
    events = running.http.get("/v1/cache/events").json()["data"]
    assert events and [e["seq"] for e in events] == sorted(e["seq"] for e in events)
    assert "Once" not in json.dumps(events)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda a: a.name)
def test_agents_turns_extend_each_other(one_slot: tuple[Running, Recorded], agent: Agent) -> None:
    running, recorded = one_slot
    recorded.requests.clear()
    for body in agent.requests:
        limits = {name: 4 for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if name in body}
        answer = running.http.post(agent.path, json={**body, **(limits or {"n_predict": 4})})
        assert answer.status_code == 200, answer.text
    first, tool_turn, _side, compaction, retry = recorded.requests
    for earlier, later in ((first, tool_turn), (tool_turn, compaction)):
        stable = min(earlier.stable)
        assert later.tokens[:stable].tolist() == earlier.tokens[:stable].tolist()
        assert stable > 100
    assert retry.tokens.tolist() == first.tokens.tolist()


def test_two_conversations_at_once(two_slots: tuple[Running, Recorded]) -> None:
    import threading

    running, _ = two_slots
    usages: dict[str, list[dict[str, Any]]] = {"A": [], "B": [], "C": []}

    def talk(name: str) -> None:
        chat = Conversation(running, [{"role": "system", "content": f"Together {name}. " * 40}])
        for turn in range(3):
            usages[name].append(chat.turn(f"Question {turn}?"))

    threads = [threading.Thread(target=talk, args=(name,)) for name in usages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for name, found in usages.items():
        assert len(found) == 3, name
        assert [cached(u) > 100 for u in found] == [False, True, True]


def test_random_cancels_leak_no_slot(two_slots: tuple[Running, Recorded]) -> None:
    running, _ = two_slots
    draw = random.Random(7)
    messages = [SYSTEM, {"role": "user", "content": "?"}]
    body = {"messages": messages, "stream": True, "max_tokens": 64, "ignore_eos": True}
    for _ in range(40):
        with httpx.stream("POST", running.url + CHAT, json=body, timeout=30) as stream:
            for _text, _ in zip(stream.iter_text(), range(draw.randrange(6)), strict=False):
                pass
    assert eventually(lambda: not any(s["is_processing"] for s in running.engine.slots()))
    assert running.engine.check() == []  # type: ignore[attr-defined]
    usage, _ = stream_chat(running, messages)
    assert cached(usage) > 100
