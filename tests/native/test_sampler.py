"""The sampler: one path for a context's logits and for stored ones, and the same draws as llama.cpp."""

from __future__ import annotations

import ctypes
import json
import math
from typing import Any

import numpy as np
import pytest

from gufo_gguf.backend.base import Logits, Span
from gufo_gguf.backend.llama import LlamaBackend
from gufo_gguf.backend.sampling import Sampler, schema_to_grammar, top_logprobs
from gufo_gguf.core.errors import GufoError, RequestError
from gufo_gguf.engine.types import SamplingParams, as_tokens

pytestmark = pytest.mark.native

WORDS = 'root ::= word (" " word)*\nword ::= [a-z]+\n'
JSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}


def random_logits(backend: LlamaBackend, seed: int, scale: float = 3.0) -> Logits:
    return (np.random.default_rng(seed).normal(size=backend.info.n_vocab) * scale).astype(np.float32)


def text_of(backend: LlamaBackend, tokens: list[int]) -> str:
    vocab = backend.vocab()
    return b"".join(vocab.text_piece(t) for t in tokens).decode("utf-8", "replace")


def ids_of(backend: LlamaBackend, text: str) -> list[int]:
    return backend.vocab().tokenize(text, add_special=False, parse_special=True)


def generate(
    backend: LlamaBackend, lib: ctypes.CDLL, params: SamplingParams, how: str, n: int = 40, **kw: Any
) -> list[int]:
    """n tokens behind one prompt, sampled from the context or from copied logits."""
    vocab = backend.vocab()
    prompt = as_tokens(ids_of(backend, "once upon a time there was a time"))
    backend.truncate(0, 0)
    backend.decode([Span(0, prompt, True)])
    out: list[int] = []
    with Sampler(lib, backend.model_ptr, params, **kw) as sampler:
        sampler.accept_prompt(prompt)
        for _ in range(n):
            if how == "context":
                token = sampler.sample(backend.ctx_ptr, backend.output_index(0))
            else:
                token = sampler.sample_logits(backend.logits(0))
            sampler.accept(token)
            out.append(token)
            if vocab.is_eog(token):
                break
            backend.decode([Span(0, as_tokens([token]), True)])
    return out


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "defaults": {},
    "hot": {"temperature": 1.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "penalties": {"repeat_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4, "repeat_last_n": 16},
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    "typical": {"typical_p": 0.7, "top_n_sigma": 2.0},
    "xtc": {"xtc_probability": 0.8, "xtc_threshold": 0.05, "temperature": 1.2},
    "dynatemp": {"dynatemp_range": 0.5},
    "mirostat1": {"mirostat": 1},
    "mirostat2": {"mirostat": 2, "mirostat_tau": 3.0},
    "bias": {"logit_bias": {65: 5.0, 66: -math.inf}},
    "no end": {"ignore_eos": True, "temperature": 1.5},
    "samplers": {"samplers": ["top_k", "temperature"], "top_k": 5},
    "adaptive": {"samplers": ["min_p", "adaptive_p"], "adaptive_target": 0.3},
    "grammar": {"grammar": WORDS, "temperature": 1.0},
    "grammar and penalties": {"grammar": WORDS, "repeat_penalty": 1.5, "temperature": 1.4, "dry_multiplier": 0.5},
    "lazy grammar": {
        "grammar": 'root ::= "e" [a-z]+ "."\n',
        "grammar_lazy": True,
        "grammar_triggers": [{"type": 2, "value": "(e)"}],
        "temperature": 1.2,
    },
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [1, 7])
def test_stored_logits_give_the_tokens_that_the_context_gives(
    backend: LlamaBackend, lib: ctypes.CDLL, name: str, seed: int
) -> None:
    params = SamplingParams(seed=seed, **CASES[name])
    from_context = generate(backend, lib, params, "context")
    assert generate(backend, lib, params, "vector") == from_context
    assert generate(backend, lib, params, "context", reference=True) == from_context, "not llama.cpp's own draws"


def test_json_grammar_matches_llama_cpp_and_yields_json(backend: LlamaBackend, lib: ctypes.CDLL) -> None:
    grammar = schema_to_grammar(lib, JSON_SCHEMA)
    params = SamplingParams(seed=5, temperature=0.7, grammar=grammar, grammar_type="output_format", repeat_penalty=1.1)
    tokens = generate(backend, lib, params, "context", n=300)
    assert tokens == generate(backend, lib, params, "vector", n=300)
    assert tokens == generate(backend, lib, params, "context", n=300, reference=True)
    if backend.vocab().is_eog(tokens[-1]):
        assert set(json.loads(text_of(backend, tokens))) == {"name", "n"}
    else:
        assert text_of(backend, tokens).lstrip().startswith("{")


def test_grammar_is_not_blocked_by_an_unlikely_vocabulary(backend: LlamaBackend, lib: ctypes.CDLL) -> None:
    params = SamplingParams(temperature=0.0, grammar='root ::= "yes" | "no"')
    with Sampler(lib, backend.model_ptr, params) as sampler:
        out: list[int] = []
        for step in range(8):
            out.append(sampler.sample_logits(random_logits(backend, step)))
            sampler.accept(out[-1])
            if backend.vocab().is_eog(out[-1]):
                break
    assert text_of(backend, out) in ("yes", "no")
    assert backend.vocab().is_eog(out[-1])


def test_accepting_what_the_grammar_forbids_is_an_error_and_never_ends_the_process(
    backend: LlamaBackend, lib: ctypes.CDLL
) -> None:
    params = SamplingParams(grammar='root ::= "yes"')
    with Sampler(lib, backend.model_ptr, params) as sampler, pytest.raises(RequestError, match="may not end here"):
        sampler.accept(backend.vocab().eos)
    with Sampler(lib, backend.model_ptr, params) as sampler, pytest.raises(RequestError, match="does not allow"):
        sampler.accept(ids_of(backend, "z")[0])


def test_prompt_tokens_count_for_penalties_only(backend: LlamaBackend, lib: ctypes.CDLL) -> None:
    logits = np.zeros(backend.info.n_vocab, np.float32)
    favourite, second = ids_of(backend, "a")[0], ids_of(backend, "b")[0]
    logits[favourite], logits[second] = 10.0, 9.0
    params = SamplingParams(temperature=0.0, repeat_penalty=2.0, repeat_last_n=8, grammar="root ::= [a-z]+")
    with Sampler(lib, backend.model_ptr, params) as sampler:
        assert sampler.sample_logits(logits) == favourite
        sampler.accept_prompt(as_tokens([favourite]))
        assert sampler.sample_logits(logits) == second
        sampler.accept_prompt(as_tokens([second]))
        assert sampler.sample_logits(logits) == favourite
        sampler.accept_prompt(as_tokens(ids_of(backend, "A B C 1 2 3 4 5 6")))  # the window moves on
        assert sampler.sample_logits(logits) == favourite


def test_penalties_rebuilt_from_tokens_equal_those_that_grew(backend: LlamaBackend, lib: ctypes.CDLL) -> None:
    params = SamplingParams(seed=3, repeat_penalty=1.4, frequency_penalty=0.3, dry_multiplier=0.6, temperature=0.0)
    with Sampler(lib, backend.model_ptr, params) as grown:
        history: list[int] = []
        for step in range(30):
            token = grown.sample_logits(random_logits(backend, step % 5))
            grown.accept(token)
            history.append(token)
        with Sampler(lib, backend.model_ptr, params) as rebuilt:
            rebuilt.accept_prompt(as_tokens(history))
            for step in range(20):
                logits = random_logits(backend, step % 7)
                token = grown.sample_logits(logits)
                assert rebuilt.sample_logits(logits) == token
                grown.accept(token)
                rebuilt.accept(token)


def test_a_long_prompt_counts_as_its_tokens_one_by_one(backend: LlamaBackend, lib: ctypes.CDLL) -> None:
    params = SamplingParams(
        repeat_penalty=1.3, frequency_penalty=0.2, repeat_last_n=100, dry_multiplier=0.7, dry_penalty_last_n=150, seed=4
    )
    prompt = as_tokens(np.random.default_rng(0).integers(0, 60, 2000))
    with Sampler(lib, backend.model_ptr, params) as once, Sampler(lib, backend.model_ptr, params) as piecewise:
        once.accept_prompt(prompt)
        for token in prompt:
            piecewise.accept_prompt(as_tokens([token]))
        for step in range(30):
            logits = random_logits(backend, step, 0.5)
            token = once.sample_logits(logits)
            assert piecewise.sample_logits(logits) == token
            once.accept(token)
            piecewise.accept(token)


def test_seed_none_draws_one_that_repeats_the_request(backend: LlamaBackend, lib: ctypes.CDLL) -> None:
    hot = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "xtc_probability": 0.5, "xtc_threshold": 0.001}

    def draws(seed: int | None) -> tuple[int, list[int]]:
        with Sampler(lib, backend.model_ptr, SamplingParams(seed=seed, **hot)) as sampler:
            out = [sampler.sample_logits(random_logits(backend, step)) for step in range(24)]
            return sampler.seed, out

    seed, first = draws(None)
    assert 0 <= seed < 2**32 - 1
    assert draws(seed) == (seed, first)
    assert draws(2**32 - 1)[0] != 2**32 - 1
    assert draws(seed ^ 1)[1] != first


def test_reset_and_clone(backend: LlamaBackend, lib: ctypes.CDLL) -> None:
    params = SamplingParams(seed=11, temperature=1.5, repeat_penalty=1.2, grammar=WORDS)

    def run(sampler: Sampler, first: int, n: int) -> list[int]:
        out = []
        for step in range(first, first + n):
            out.append(sampler.sample_logits(random_logits(backend, step)))
            sampler.accept(out[-1])
        return out

    with Sampler(lib, backend.model_ptr, params) as sampler:
        head = run(sampler, 0, 10)
        with sampler.clone() as copy:
            tail = run(sampler, 10, 10)
            assert run(copy, 10, 10) == tail
        sampler.reset()
        assert run(sampler, 0, 20) == head + tail


def test_preserved_tokens_are_the_single_token_ones(backend: LlamaBackend, lib: ctypes.CDLL) -> None:
    special = next(t for t in range(backend.info.n_vocab) if backend.vocab().is_control(t))
    name = backend.vocab().piece(special).decode()
    params = SamplingParams(preserved_tokens=[name, "two words"])
    with Sampler(lib, backend.model_ptr, params) as sampler:
        assert sampler.preserved_tokens == {special}


def test_trigger_word_that_is_one_token_must_be_preserved(backend: LlamaBackend, lib: ctypes.CDLL) -> None:
    special = next(t for t in range(backend.info.n_vocab) if backend.vocab().is_control(t))
    name = backend.vocab().piece(special).decode()
    lazy: dict[str, Any] = {
        "grammar": 'root ::= "x"',
        "grammar_lazy": True,
        "grammar_triggers": [{"type": 1, "value": name}],
    }
    with pytest.raises(RequestError, match="preserved"):
        Sampler(lib, backend.model_ptr, SamplingParams(**lazy))
    Sampler(lib, backend.model_ptr, SamplingParams(preserved_tokens=[name], **lazy)).close()


def test_reasoning_budget_forces_the_end(backend: LlamaBackend, lib: ctypes.CDLL) -> None:
    params = SamplingParams(
        temperature=1.0,
        seed=1,
        reasoning_budget_tokens=3,
        reasoning_budget_start_tag="<think>",
        reasoning_budget_end_tags=["</think>"],
        reasoning_budget_message="enough",
        generation_prompt="<think>",
        ignore_eos=True,
    )
    with Sampler(lib, backend.model_ptr, params) as sampler:
        out = []
        for step in range(40):
            out.append(sampler.sample_logits(random_logits(backend, step)))
            sampler.accept(out[-1])
    forced = ids_of(backend, "enough") + ids_of(backend, "</think>")
    places = [i for i in range(len(out)) if out[i : i + len(forced)] == forced]
    assert places, "the end sequence did not come"
    assert places[0] <= 8, "a started character may be finished, no more"


def test_candidates_are_what_the_chain_left(backend: LlamaBackend, lib: ctypes.CDLL) -> None:
    params = SamplingParams(seed=2, top_k=4, top_p=1.0, min_p=0.0, temperature=1.0)
    with Sampler(lib, backend.model_ptr, params) as sampler:
        with pytest.raises(RequestError, match="nothing was sampled"):
            sampler.candidates(3)
        logits = random_logits(backend, 0)
        token = sampler.sample_logits(logits)
        left = sampler.candidates(100)
    assert [t for t, _ in left] == np.argsort(-logits)[:4].tolist()
    assert token in [t for t, _ in left]
    assert sum(p for _, p in left) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a"{0,5} [{5,2}]? "{5,2}"? "b"{0,3} "c"{2,}? "."  # {5,2}',
        'root ::= (ws item?)* "."\nws ::= [ ]*\nitem ::= "a" | "b"',  # can repeat nothing: harmless
        "root ::= " + " ".join(f'"{i}"?' for i in range(300)) + ' "."',
        "root ::= " + " | ".join(f'"{i}"' for i in range(3000)) + ' | "."',
        "root ::= "
        + "".join(f"r{i} | " for i in range(100))
        + '"."'
        + "".join(f'\nr{i} ::= "{i}" root' for i in range(100)),
    ],
)
def test_ambiguous_grammars_that_come_to_an_end_are_taken(
    backend: LlamaBackend, lib: ctypes.CDLL, grammar: str
) -> None:
    with Sampler(lib, backend.model_ptr, SamplingParams(grammar=grammar, temperature=0.0)) as sampler:
        dot = backend.vocab().tokenize(".", add_special=False, parse_special=False)
        logits = np.full(backend.info.n_vocab, -1.0, np.float32)
        logits[dot[0]] = 1.0
        assert sampler.sample_logits(logits) == dot[0]


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        ({"grammar": 'root ::= "a" missing'}, "grammar", "'missing' is used but not defined"),
        ({"grammar": 'rule ::= "a"'}, "grammar", "no rule named 'root'"),
        ({"grammar": 'root := "a"'}, "grammar", "expecting ::="),
        ({"grammar": 'root ::= root "a"'}, "grammar", "left recursion"),
        ({"grammar": "root ::= " + "(" * 5000}, "grammar", "nested deeper"),
        (
            {
                "grammar": "root ::= r0\n"
                + "".join(f"r{i} ::= r{i + 1} | r{i + 1}\n" for i in range(60))
                + 'r60 ::= "x"'
            },
            "grammar",
            "begin in more than",
        ),
        (
            {"grammar": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(50_000)) + 'r50000 ::= "x"'},
            "grammar",
            "begin with one another",
        ),
        ({"grammar": "root ::= " + " | ".join(['"x"'] * 30_000)}, "grammar", "begin in more than"),
        ({"grammar": 'root ::= a root "z" | "x"\na ::= b\nb ::= "" | "y"'}, "grammar", "left recursion"),
        (
            {"grammar": 'root ::= a "x"\na ::= b | "y"\nb ::= c a "z"\nc ::= d\nd ::= "" | "w"'},
            "grammar",
            "left recursion",
        ),
        ({"grammar": 'root ::= "a"{5,2}'}, "grammar", "at most fewer"),
        ({"grammar": 'root ::= (("a" | "b"){ 10 # x\n , # y\n 9 })'}, "grammar", "at most fewer"),
        ({"grammar": "# only a comment"}, "grammar", "no rules"),
        ({"grammar": "%llguidance {}"}, "grammar", "GBNF"),
        ({"grammar": 'root ::= "a"', "grammar_lazy": True}, "grammar_triggers", "at least one trigger"),
        (
            {"grammar": 'root ::= "a"', "grammar_lazy": True, "grammar_triggers": [{"type": 2, "value": "(("}]},
            "grammar_triggers",
            "regular expression",
        ),
        ({"samplers": ["top_k", "nonsense"]}, "samplers", "nonsense"),
        ({"mirostat": 3}, "mirostat", "0, 1 or 2"),
        ({"repeat_penalty": 0.0}, "repeat_penalty", "greater than 0"),
        ({"top_k": 2**40}, "top_k", "must lie in"),
        ({"min_keep": -1}, "min_keep", "must lie in"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias", "not in the vocabulary"),
        ({"top_p": "much"}, "top_p", "must be a number"),
    ],
)
def test_errors_name_the_field(
    backend: LlamaBackend, lib: ctypes.CDLL, change: dict[str, Any], field: str, text: str
) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        Sampler(lib, backend.model_ptr, SamplingParams(**change))
    assert caught.value.param == field
    assert len(str(caught.value)) < 300


def test_windows_beyond_any_context_are_no_allocation(backend: LlamaBackend, lib: ctypes.CDLL) -> None:
    params = SamplingParams(
        repeat_penalty=1.1, repeat_last_n=2**31 - 1, dry_multiplier=0.5, dry_penalty_last_n=-1, temperature=0.0
    )
    with Sampler(lib, backend.model_ptr, params) as sampler:
        sampler.accept_prompt(as_tokens(range(100)))
        assert sampler.sample_logits(random_logits(backend, 1)) >= 0


def test_logits_of_another_vocabulary_are_refused(backend: LlamaBackend, lib: ctypes.CDLL) -> None:
    with Sampler(lib, backend.model_ptr, SamplingParams()) as sampler:
        with pytest.raises(RequestError, match="vocabulary"):
            sampler.sample_logits(np.zeros(7, np.float32))
        with pytest.raises(RequestError, match="vocabulary"):
            sampler.accept(backend.info.n_vocab)
        with pytest.raises(ValueError, match="float32"):
            sampler.sample_logits(np.zeros(backend.info.n_vocab))  # type: ignore[arg-type]


def test_close_is_idempotent(backend: LlamaBackend, lib: ctypes.CDLL) -> None:
    sampler = Sampler(lib, backend.model_ptr, SamplingParams())
    sampler.close()
    sampler.close()
    with pytest.raises(RequestError, match="null"):
        sampler.sample_logits(random_logits(backend, 0))


@pytest.mark.parametrize("scale", [0.01, 3.0, 60.0])
def test_logprobs_are_a_log_softmax(backend: LlamaBackend, lib: ctypes.CDLL, scale: float) -> None:
    logits = random_logits(backend, 9, scale)
    logits[5] = -np.inf
    wide = logits.astype(np.float64)
    expected = wide - (wide.max() + np.log(np.exp(wide - wide.max()).sum()))
    own, top = top_logprobs(lib, logits, 17, 20)
    assert own == pytest.approx(expected[17], rel=1e-6, abs=1e-5)
    order = np.lexsort((np.arange(logits.size), -wide))[:20]
    assert [t for t, _ in top] == order.tolist()
    assert [p for _, p in top] == pytest.approx(expected[order].tolist(), rel=1e-6, abs=1e-5)


def test_logprobs_edges(backend: LlamaBackend, lib: ctypes.CDLL) -> None:
    flat = np.zeros(backend.info.n_vocab, np.float32)
    own, top = top_logprobs(lib, flat, 3, 5)
    assert [t for t, _ in top] == [0, 1, 2, 3, 4], "ties go to the lower id"
    assert own == pytest.approx(-math.log(flat.size))
    assert top_logprobs(lib, flat, 0, 0)[1] == []
    assert len(top_logprobs(lib, flat, 0, flat.size + 10)[1]) == flat.size
    with pytest.raises(RequestError):
        top_logprobs(lib, flat, flat.size, 1)
    with pytest.raises(Exception, match="not numbers"):
        top_logprobs(lib, np.full(flat.size, np.nan, np.float32), 0, 1)


def test_schema_that_cannot_be_expressed_is_named(lib: ctypes.CDLL) -> None:
    with pytest.raises(RequestError) as caught:
        schema_to_grammar(lib, {"type": "no-such-type"})
    assert caught.value.param == "json_schema"


@pytest.mark.parametrize("case", ["spread", "ties", "masked", "all masked", "last"])
def test_the_largest_logit_is_what_llama_cpps_chain_takes(backend: LlamaBackend, lib: ctypes.CDLL, case: str) -> None:
    """Without penalties and biases a temperature of 0 skips the chain; a bias of 0 on one token does not."""
    chain = SamplingParams(temperature=0.0, logit_bias={1: 0.0})
    for seed in range(8):
        logits = random_logits(backend, seed)
        if case == "ties":
            logits = np.round(logits)
        elif case == "masked":
            logits[np.random.default_rng(seed).random(logits.size) < 0.9] = -np.inf
        elif case == "all masked":
            logits[:] = -np.inf
        elif case == "last":
            logits[-1] = 99.0
        with (
            Sampler(lib, backend.model_ptr, SamplingParams(temperature=0.0)) as plain,
            Sampler(lib, backend.model_ptr, chain) as other,
        ):
            token = plain.sample_logits(logits)
            assert token == int(np.argmax(logits))
            if case not in ("ties", "all masked"):  # the chain may order equal logits as it likes
                assert token == other.sample_logits(logits)


@pytest.mark.parametrize("where", [0, 17, -1])
def test_a_greedy_draw_refuses_logits_that_are_not_numbers(backend: LlamaBackend, lib: ctypes.CDLL, where: int) -> None:
    logits = random_logits(backend, 1)
    logits[where] = np.nan
    with (
        Sampler(lib, backend.model_ptr, SamplingParams(temperature=0.0)) as sampler,
        pytest.raises(GufoError, match="not numbers"),
    ):
        sampler.sample_logits(logits)
