"""llama-server's own endpoints, metrics and the cache's, against the scripted engine."""

from __future__ import annotations

import json

import pytest

from gufo_gguf.server.settings import ServerSettings
from tests.server.conftest import Running, Serve
from tests.server.standin import tokens_of


def lines_of(running: Running, path: str, **body: object) -> list[dict[str, object]]:
    text = running.post(path, stream=True, **body).text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_completion(running: Running, path: str) -> None:
    body = running.post(path, prompt="Once", n_predict=8, return_tokens=True).json()
    assert body["content"] == "Hello world!"
    assert (body["stop"], body["stop_type"], body["stopping_word"]) == (True, "eos", "")
    assert body["tokens_evaluated"] == len(tokens_of("Once"))
    assert body["tokens_predicted"] == len(body["tokens"]) == 3
    assert body["timings"]["cache_n"] + body["timings"]["prompt_n"] == body["tokens_evaluated"]
    assert body["prompt"] == "<s>Once"
    assert body["generation_settings"]["n_predict"] == 8
    assert body["has_new_line"] is False and body["truncated"] is False


def test_completion_stream(running: Running) -> None:
    *parts, last = lines_of(running, "/completion", prompt="Once")
    assert "".join(str(p["content"]) for p in parts) == "Hello world!"
    assert all(p["stop"] is False and p["tokens"] for p in parts)
    assert last["stop"] is True and last["content"] == "" and last["timings"]


def test_completion_ends(running: Running) -> None:
    assert running.post("/completion", prompt="x", n_predict=1).json()["stop_type"] == "limit"
    body = running.post("/completion", prompt="x", stop=[" wor"]).json()
    assert (body["stop_type"], body["stopping_word"], body["content"]) == ("word", " wor", "Hello")


def test_several_prompts_give_a_list(running: Running) -> None:
    body = running.post("/completion", prompt=["a", [98]]).json()
    assert [(r["index"], r["prompt"]) for r in body] == [(0, "<s>a"), (1, "b")]


def test_completion_probabilities(running: Running) -> None:
    body = running.post("/completion", prompt="x", n_probs=2).json()
    probabilities = body["completion_probabilities"]
    assert [p["token"] for p in probabilities] == ["Hello", " world", "!"]
    assert all(len(p["top_logprobs"]) == 2 and p["bytes"] for p in probabilities)
    streamed = lines_of(running, "/completion", prompt="x", n_probs=2)[:-1]
    assert [len(p["completion_probabilities"]) for p in streamed] == [1, 1, 1]  # type: ignore[arg-type]
    assert "completion_probabilities" not in running.post("/completion", prompt="x").json()


def test_response_fields(running: Running) -> None:
    fields = ["content", "generation_settings/n_predict", "nothing/here"]
    body = running.post("/completion", prompt="x", n_predict=4, response_fields=fields).json()
    assert body == {"content": "Hello world!", "generation_settings/n_predict": 4}


def test_tokenize_and_back(running: Running) -> None:
    text = "Grüße <|im_start|>"
    ids = running.post("/tokenize", content=text).json()["tokens"]
    assert ids[-1] == 258
    assert running.post("/detokenize", tokens=ids).json()["content"] == text
    assert running.post("/tokenize", content=text, parse_special=False).json()["tokens"] == list(text.encode())
    assert running.post("/tokenize", content="a", add_special=True).json()["tokens"] == [256, 97]
    assert running.post("/tokenize", content=["a", 98, "c"], add_special=True).json()["tokens"] == [256, 97, 98, 99]
    pieces = running.post("/tokenize", content="aü", with_pieces=True).json()["tokens"]
    assert pieces[0] == {"id": 97, "piece": "a"}
    assert pieces[1] == {"id": 0xC3, "piece": [0xC3]}


def test_tokens_out_of_the_vocabulary(running: Running) -> None:
    assert running.error("/detokenize", tokens=[5, 260])["param"] == "tokens"
    assert running.error("/detokenize", tokens="abc")["param"] == "tokens"
    assert running.error("/tokenize", content=5.5)["param"] == "content"


def test_apply_template(running: Running) -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompt = running.post("/apply-template", messages=messages).json()["prompt"]
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    bare = running.post("/apply-template", messages=messages, add_generation_prompt=False).json()["prompt"]
    assert bare == "<|im_start|>user\nhi<|im_end|>\n"
    assert running.engine.requests == []


def test_props_and_slots(running: Running) -> None:
    props = running.http.get("/props").json()
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == running.engine.n_ctx
    assert props["default_generation_settings"]["params"]["temperature"] == 0.8
    assert props["chat_template"] == "{# chatml #}"
    slots = running.http.get("/slots").json()
    assert [s["id"] for s in slots] == [0, 1]
    assert running.http.get("/slots?fail_on_no_slot=1").status_code == 200


def test_endpoints_can_be_off(serve: Serve) -> None:
    running = serve(settings=ServerSettings(port=0, drain_s=0.2, slots_endpoint=False, metrics_endpoint=False))
    assert running.http.get("/slots").status_code == 501
    assert running.http.get("/metrics").status_code == 501


def test_metrics(running: Running) -> None:
    answer = running.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert int(answer.headers["process-start-time-unix"]) > 0
    values = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    assert float(values["llamacpp:prompt_tokens_total"]) == 6
    assert float(values["llamacpp:prompt_tokens_cached_total"]) == 4
    assert float(values["llamacpp:prompt_tokens_seconds"]) == 12
    assert float(values["llamacpp:requests_processing"]) == 0
    assert float(values["gufo_passes_total"]) == 4
    assert "# TYPE llamacpp:n_decode_total counter" in answer.text


def test_models_show_the_context_length_in_every_field_clients_read(running: Running) -> None:
    card = running.http.get("/v1/models").json()["data"][0]
    assert card["id"] == "standin"
    for name in ("context_length", "max_model_len", "context_window", "max_context_length"):
        assert card[name] == running.engine.n_ctx
    assert card["meta"]["n_ctx"] == running.engine.n_ctx
    assert running.openai.models.list().data[0].id == "standin"
    assert running.openai.models.retrieve("standin").id == "standin"
    assert running.http.get("/v1/models/other").status_code == 404


def test_cache_status_and_events(running: Running) -> None:
    assert running.http.get("/v1/cache").json()["enabled"] is True
    events = running.http.get("/v1/cache/events", params={"since": 2}).json()["data"]
    assert [e["seq"] for e in events] == [3, 4, 5]
    assert running.http.get("/v1/cache/events", params={"limit": 0}).status_code == 400
    with running.http.stream("GET", "/v1/cache/events?stream=true&since=3") as stream:
        lines = stream.iter_lines()
        assert [next(lines) for _ in range(2)] == ["event: cache", 'data: {"seq":4,"kind":"admitted"}']


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/infill", "/props"])
def test_what_is_not_built_says_so(running: Running, path: str) -> None:
    answer = running.post(path, input="x")
    assert (answer.status_code, answer.json()["error"]["type"]) == (501, "not_supported_error")


def test_openapi_documents_errors_as_they_are(running: Running) -> None:
    document = running.http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
            assert {"400", "401", "503"} <= operation["responses"].keys(), path
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "tools", "max_completion_tokens", "cache_prompt"} <= fields.keys()
