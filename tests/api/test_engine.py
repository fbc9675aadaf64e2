"""The Python API on tiny models: answers, streams, conversations, and what goes wrong."""

from __future__ import annotations

import asyncio
import doctest
import importlib
from collections.abc import Iterator

import numpy as np
import pytest

from gufo_gguf import Answer, Conversation, Engine, GufoError, SamplingParams
from gufo_gguf.core.errors import ConfigError, ContextLengthExceeded, ModelError, RequestError
from gufo_gguf.engine.types import FinishReason
from tests.conftest import TinyModel, tiny_model_path

pytestmark = pytest.mark.native

GREEDY = SamplingParams(temperature=0.0)
SMALL = {"ctx_size": 2048, "threads": 1, "batch_size": 256, "ubatch_size": 64, "cache_ram_bytes": 64 << 20}
SYSTEM = {"role": "system", "content": "You answer in few words. " * 12}


@pytest.fixture(scope="module", params=["qwen4exp", "llama"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(tiny_model_path(request.param), **SMALL) as made:
        yield made
        assert made.check() == []


def talk(engine: Engine, name: str, **options: object) -> Conversation:
    system = {"role": "system", "content": f"{name}: you answer in few words. " * 12}
    return engine.conversation([system], sampling=GREEDY, max_tokens=8, ignore_eos=True, **options)  # type: ignore[arg-type]


def same(a: Answer, b: Answer) -> bool:
    """Equal tokens and equal log-probabilities, bit for bit."""
    return a.tokens.tolist() == b.tokens.tolist() and a.logprobs == b.logprobs and bool(a.logprobs)


def test_models_by_name() -> None:
    with Engine("owlet", ctx_size=512, threads=1, cache_ram_bytes=1 << 20) as named, Engine(ctx_size=512) as default:
        assert named.model_id == default.model_id and "owlet" in named.model_id
        assert named.info.n_ctx == 512
    with pytest.raises(ModelError, match="no-such-name"):
        Engine("no-such-name")


@pytest.mark.parametrize("name", ["facade", "conversation"])
def test_examples_in_the_docstrings(name: str, tiny_model: TinyModel) -> None:
    module = importlib.import_module(f"gufo_gguf.api.{name}")
    n_examples = 0
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder().find(module, globs={"MODEL": tiny_model("qwen4exp"), "Engine": Engine}):
        n_examples += len(test.examples)
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
    assert n_examples >= 3


def test_answer_stream_and_coroutine_say_the_same(engine: Engine) -> None:
    messages = [SYSTEM, {"role": "user", "content": "Three ways?"}]
    options = {"sampling": GREEDY, "max_tokens": 12, "cache": False}
    whole = engine.chat(messages, **options)  # type: ignore[arg-type]
    stream = engine.stream(messages, **options)  # type: ignore[arg-type]
    assert "".join(stream) == whole.text == stream.answer.text
    assert stream.answer.tokens.tolist() == whole.tokens.tolist()

    async def both() -> tuple[str, Answer]:
        s = engine.stream(messages, **options)  # type: ignore[arg-type]
        text = "".join([piece async for piece in s])
        return text, await engine.achat(messages, **options)  # type: ignore[arg-type]

    text, answer = asyncio.run(both())
    assert text == answer.text == whole.text
    assert answer.usage.cached_tokens == 0 and answer.usage.cache.prefilled_tokens == answer.usage.prompt_tokens


def test_text_and_its_tokens_are_one_prompt(engine: Engine) -> None:
    text = engine.complete("The owl looked at", max_tokens=6, sampling=GREEDY, logprobs=3)
    ids = engine.tokenize("The owl looked at", bos=True)
    again = engine.complete(ids, max_tokens=6, sampling=GREEDY, logprobs=3)
    assert again.tokens.tolist() == text.tokens.tolist() and again.text == text.text
    assert again.usage.cached_tokens >= len(ids) - 1
    assert len(text.logprobs) == len(text.tokens) and all(len(p.top) == 3 for p in text.logprobs)
    assert engine.detokenize(engine.tokenize("a <b> c")) == "a <b> c"


def test_other_names_of_roles_are_those_of_templates(engine: Engine) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert engine.render(messages) == engine.render([{**messages[0], "role": "system"}, messages[1]])


def test_json_schema_and_grammar(engine: Engine) -> None:
    import json

    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    for answer in (
        engine.complete("A number:", json_schema=schema, max_tokens=64),
        engine.chat("A number?", json_schema=schema, max_tokens=64, thinking=False),
    ):
        assert json.loads(answer.text)["n"] in (1, 2)
    assert engine.complete("Yes or no?", grammar='root ::= "yes" | "no"').text in ("yes", "no")


@pytest.mark.parametrize("logprobs", [0, 2])
def test_an_opening_that_does_not_fit_its_grammar_is_text(engine: Engine, logprobs: int) -> None:
    """A lazy grammar sees what woke it when it is drawn already; a tool call's opening with something else behind."""
    plain = engine.complete("Once upon", max_tokens=12, sampling=GREEDY)
    lazy = SamplingParams(
        temperature=0.0,
        grammar='root ::= "@@@ never"',
        grammar_lazy=True,
        grammar_triggers=[{"type": 2, "value": "[\\s\\S]"}],
    )
    answer = engine.complete("Once upon", max_tokens=12, sampling=lazy, logprobs=logprobs)
    assert answer.tokens.tolist() == plain.tokens.tolist() and len(answer.logprobs) == (12 if logprobs else 0)
    assert engine.core.failure is None


def test_the_next_turn_goes_on_behind_the_sampled_tokens(engine: Engine) -> None:
    conversation = talk(engine, "turns")
    first = conversation.ask("First?")
    end = len(conversation)
    assert end == len(first.prompt_tokens) + len(first.tokens)
    second = conversation.ask("Second?")
    assert second.prompt_tokens[:end].tolist() == [*first.prompt_tokens, *first.tokens]
    # a limit ended the answer: its last token was sampled and never evaluated
    assert second.usage.cached_tokens == end - 1 and str(second.usage.reuse_source) == "live"
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "user", "assistant"]


def test_a_checkpoint_is_the_very_state_that_was_left(engine: Engine) -> None:
    conversation = talk(engine, "exact", logprobs=2)
    conversation.ask("First?")
    uninterrupted = conversation.fork(keep=False)
    reference = uninterrupted.ask("Second?")  # in the slot, as if nothing had happened

    conversation = talk(engine, "exact2", logprobs=2)
    conversation.ask("First?")
    here = conversation.checkpoint()
    assert here.boundary == len(conversation) - 1 and here.evaluated_tokens == 0
    second = conversation.ask("Second?")
    talk(engine, "another one takes the slot").ask("Hello?")
    conversation.restore(here)
    again = conversation.ask("Second?")
    assert same(again, second)
    assert again.usage.cached_tokens >= here.boundary and str(again.usage.reuse_source) == "ram"
    assert reference.usage.cached_tokens > 0


def test_a_checkpoint_after_the_slot_was_taken_costs_nothing(engine: Engine) -> None:
    conversation = talk(engine, "late", logprobs=2)
    conversation.ask("First?")
    talk(engine, "somebody else").ask("Hello?")
    here = conversation.checkpoint()
    assert here.evaluated_tokens == 0 and here.boundary == len(conversation) - 1, "what the slot held was kept"
    answer = conversation.ask("Second?")
    assert answer.usage.cached_tokens >= here.boundary and str(answer.usage.reuse_source) in ("ram", "live")


def test_a_checkpoint_of_what_is_nowhere_says_what_it_cost(engine: Engine) -> None:
    conversation = talk(engine, "not kept", logprobs=2, cache=False)
    conversation.ask("First?")
    talk(engine, "and its slot taken").ask("Hello?")
    here = conversation.checkpoint()
    assert 0 < here.evaluated_tokens <= len(conversation) and here.boundary == len(conversation)
    assert conversation.checkpoint().evaluated_tokens == 0, "it is there now"


def test_forks_share_their_past_and_nothing_else(engine: Engine) -> None:
    left = talk(engine, "fork", logprobs=2)
    left.ask("First?")
    right = left.fork()
    a = left.ask("Left?")
    b = right.ask("Right?")
    assert a.prompt_tokens.tolist() != b.prompt_tokens.tolist()
    assert left.messages[:3] == right.messages[:3] and left.messages[3] != right.messages[3]
    assert b.usage.cached_tokens >= len(b.prompt_tokens) // 2
    assert same(right.fork(keep=False).ask("More?"), right.fork(keep=False).ask("More?"))


def test_leaving_a_stream_early_changes_nothing(engine: Engine) -> None:
    conversation = talk(engine, "left early")
    conversation.ask("First?")
    before = (conversation.messages, conversation.tokens.tolist())
    for _ in conversation.stream("A long one?", max_tokens=500):
        break
    assert (conversation.messages, conversation.tokens.tolist()) == before
    stream = conversation.stream("Cancelled?", max_tokens=500)
    stream.cancel()
    assert stream.result().finish_reason is FinishReason.CANCELLED
    assert (conversation.messages, conversation.tokens.tolist()) == before
    assert conversation.ask("Still there?").usage.cached_tokens > 0


def test_mistakes_are_named(engine: Engine) -> None:
    with pytest.raises(RequestError, match="temprature: no such option"):
        engine.chat("Hi", temprature=0)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="belongs to chat"):
        engine.complete("Hi", tools=[])  # type: ignore[call-arg]
    with pytest.raises(RequestError, match=r"messages\[0\]"):
        engine.chat([{"content": "Hi"}])
    with pytest.raises(RequestError, match="at least one"):
        engine.chat([])
    with pytest.raises(RequestError, match="empty"):
        engine.complete([])
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.complete([10**8])
    with pytest.raises(RequestError, match="max_tokens"):
        engine.complete("Hi", max_tokens=-1)
    with pytest.raises(ContextLengthExceeded, match=r"2050 tokens.*2048.*ctx_size") as caught:
        engine.complete(np.ones(2050, dtype=np.int32))
    assert (caught.value.n_prompt, caught.value.n_ctx) == (2050, 2048) and "server" not in str(caught.value)
    for role in ("usr", "User", "", 5, ["user"]):
        with pytest.raises(RequestError, match=r"role: must be one of system, developer, user"):
            engine.chat([{"role": role, "content": "Hi"}])
        with pytest.raises(RequestError, match=r"role: must be one of system, developer, user"):
            engine.conversation().ask({"role": role, "content": "Hi"})
    with pytest.raises(RequestError, match="json_schema: not JSON"):
        engine.complete("Hi", json_schema={"default": float("nan")})
    stream = engine.stream("Hi", max_tokens=1)
    with pytest.raises(GufoError, match="not complete"):
        _ = stream.answer
    stream.result()
    with pytest.raises(GufoError, match="read once"):
        list(stream)


def test_two_engines_in_one_process_and_life_after_close(tiny_model: TinyModel) -> None:
    first = Engine(tiny_model("qwen4exp"), alias="one", **SMALL)
    with Engine(tiny_model("lfm2"), alias="two", **SMALL) as second:
        a = [first.complete("Same text", max_tokens=4, sampling=GREEDY).tokens.tolist() for _ in range(2)]
        b = second.complete("Same text", max_tokens=4, sampling=GREEDY).tokens.tolist()
        assert a[0] == a[1] and (first.model_id, second.model_id) == ("one", "two")
        first.close()
        first.close()
        assert second.complete("Same text", max_tokens=4, sampling=GREEDY).tokens.tolist() == b
        with pytest.raises(GufoError, match="closed"):
            first.chat("Hello")
    with pytest.raises(GufoError, match="closed"):
        second.check()


def test_what_cannot_be_loaded_is_named(tmp_path, tiny_model: TinyModel) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf"):
        Engine(tmp_path / "none.gguf")
    with pytest.raises(ConfigError, match="--cache-type-k"):
        Engine(tiny_model("llama"), cache_type_k="f99")


def test_without_a_cache_checkpoints_hold_tokens_alone(tiny_model: TinyModel) -> None:
    with Engine(tiny_model("qwen4exp"), **{**SMALL, "cache": False}) as engine:
        conversation = talk(engine, "uncached")
        conversation.ask("First?")
        here = conversation.checkpoint()
        assert (here.boundary, here.evaluated_tokens) == (0, 0)
        second = conversation.ask("Second?")
        conversation.restore(here)
        assert conversation.ask("Second?").tokens.tolist() == second.tokens.tolist()
