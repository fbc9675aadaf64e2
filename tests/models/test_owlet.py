"""The trained model: what it read is given back, cold and from every kind of restored state.

Recall makes a restore's exactness visible: each part of the state, left out, costs facts or changes
what is written.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest

from gufo_gguf.backend.base import Span
from gufo_gguf.cache.types import ComponentKind
from gufo_gguf.models.default import owlet
from gufo_gguf.models.recipe import chat_template
from models.owlet.dialogues import Turn, Writer
from tests.engine.lineage import TracedEngine
from tests.engine.served import ask, served, wait_until_written
from tests.models.recall import Document, Reader, Saved, document, rendered, texts

# -- the dialogues it was trained on have the template's form ------------------------------------


def _message(turn: Turn) -> dict[str, Any]:
    """A turn of a training dialogue as a client would send it."""
    if turn.role == "tool":
        return {
            "role": "tool",
            "content": turn.text.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>"),
        }
    if turn.text.startswith("<tool_call>"):
        call = json.loads(turn.text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        return {"role": turn.role, "content": None, "tool_calls": [{"function": call}]}
    return {"role": turn.role, "content": turn.text}


def _render(turns: list[Turn], **more: Any) -> str:
    environment = jinja2.Environment()
    environment.filters["tojson"] = json.dumps
    return environment.from_string(chat_template()).render(messages=[_message(t) for t in turns], **more)


def _dialogues() -> list[list[Turn]]:
    functions = [{"name": "f", "args": ["x"], "doc": "Give x back as it is.", "code": "def f(x):\n    return x"}]
    return [Writer(random.Random(seed), texts(), functions).conversation(4000) for seed in range(40)]


def test_training_dialogues_are_what_the_template_renders() -> None:
    for turns in _dialogues():
        assert _render(turns) == rendered(turns)
    assert any(turn.role == "tool" for turns in _dialogues() for turn in turns)


def test_tools_of_a_request_stand_where_training_had_them() -> None:
    found = [turns for turns in _dialogues() if turns[0].role == "system" and "# Tools" in turns[0].text]
    assert found
    for turns in found:
        before, _, rest = turns[0].text.partition("# Tools\n")
        tools = [json.loads(line) for line in rest.split("\n") if line.startswith('{"type"')]
        bare = [replace(turns[0], text=before.rstrip("\n")), *turns[1:]] if before else turns[1:]
        assert _render(bare, tools=tools) == rendered(turns)


@pytest.mark.skipif(not importlib.util.find_spec("tokenizers"), reason="tokenizers is not installed: the train extra")
def test_training_cut_dialogues_as_the_whole_text_is_cut() -> None:
    from models.owlet import coding, tokenizer

    for turns in _dialogues()[:10]:
        assert coding.encode(turns)[0] == tokenizer.load().encode(rendered(turns)).ids


# -- recall, cold --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.close()


def _answers(reader: Reader, before: Saved, read: Document) -> list[str]:
    """Each question asked by itself, from a restored state."""
    out = []
    for question in read.questions:
        reader.restore(before)
        reader.read(question.text)
        out.append(reader.answer())
    return out


def _share(answers: list[str], read: Document) -> float:
    return sum(a == q.answer for a, q in zip(answers, read.questions, strict=True)) / len(answers)


def _cold(reader: Reader, read: Document, n: int) -> list[str]:
    """The first n questions, each after reading all of the document again."""
    out = []
    for question in read.questions[:n]:
        reader.forget()
        reader.read(read.text)
        reader.read(question.text)
        out.append(reader.answer())
    return out


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize(("n_chars", "n_tokens", "n_cold"), [(2600, 1000, 20), (12_500, 4000, 2)])
def test_facts_are_given_back(reader: Reader, n_chars: int, n_tokens: int, n_cold: int) -> None:
    """Cold for the first questions, from a restored state for all: the same words."""
    read = document(n_tokens, n_chars, 20)
    cold = _cold(reader, read, n_cold)
    reader.forget()
    reader.read(read.text)
    assert 0.85 * n_tokens < len(reader.tokens) < 1.5 * n_tokens
    warm = _answers(reader, reader.saved(), read)
    assert warm[:n_cold] == cold
    assert _share(warm, read) >= 0.95, [(a, q.answer) for a, q in zip(warm, read.questions, strict=True)]


# -- every part of the state is needed -----------------------------------------------------------

PARTS = {
    "cache_k_": ComponentKind.ROWS,
    "cache_v_": ComponentKind.ROWS,
    "cache_idx_k_": ComponentKind.ROWS,
    "cache_r_": ComponentKind.PRIVATE,
    "cache_s_": ComponentKind.PRIVATE,
    "cache_ple_r_": ComponentKind.PRIVATE,
}


@pytest.mark.native
def test_the_parts_are_all_there_are(reader: Reader) -> None:
    for part in reader.inventory.components:
        names = [prefix for prefix in PARTS if part.id.startswith(prefix)]
        assert part.id == "position" or (len(names) == 1 and PARTS[names[0]] is part.kind), part


@pytest.mark.native
@pytest.mark.slow
def test_without_a_kind_of_rows_facts_are_forgotten(reader: Reader) -> None:
    read = document(5, 2600, 16)
    reader.forget()
    reader.read(read.text)
    saved = reader.saved()
    whole = _answers(reader, saved, read)
    assert _share(whole, read) >= 0.95
    for part in ("cache_k_", "cache_v_", "cache_idx_k_"):
        answers = _answers(reader, reader.without(saved, part), read)
        assert _share(answers, read) <= 0.8, f"{part}: {_share(answers, read)} still right"


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("part", ["cache_r_", "cache_s_"])
def test_without_private_state_answers_break_off(reader: Reader, part: str) -> None:
    """Restored in the middle of its answer, where the last tokens matter most."""
    read = document(5, 2600, 16)
    reader.forget()
    reader.read(read.text)
    before = reader.saved()
    n_changed = 0
    for question in read.questions:
        answer = reader.ids(question.answer + "<|im_end|>")
        half = len(answer) // 2
        reader.restore(before)
        reader.read([*reader.ids(question.text), *answer[:half]])
        inside = reader.saved()
        rest = []
        for state in (inside, reader.without(inside, part)):
            reader.restore(state)
            reader.read(answer[half : half + 1])
            rest.append(reader.following(len(answer)))
        n_changed += rest[0] != rest[1]
    assert n_changed >= 3, f"{n_changed} of {len(read.questions)} answers changed"


@pytest.mark.native
@pytest.mark.slow
def test_without_the_ngram_layers_history_text_goes_on_otherwise(reader: Reader) -> None:
    """It reaches back three tokens and its part is small: facts survive, the likely next words do not all."""
    ids = reader.ids(texts()[0])[:1200]
    n_changed = 0
    for end in range(300, 1200, 30):
        reader.forget()
        reader.read(ids[end - 300 : end])
        inside = reader.saved()
        logits, found = [], []
        for state in (inside, reader.without(inside, "cache_ple_r_")):
            reader.restore(state)
            reader.read(ids[end : end + 1])
            logits.append(reader.backend.logits(0))
            found.append(reader.following(16))
        assert np.abs(logits[0] - logits[1]).max() > 0.01
        n_changed += found[0] != found[1]
    assert n_changed >= 1, "no text went on otherwise"


# -- every kind of restore -----------------------------------------------------------------------


def _replayed(engine: TracedEngine, slot: int, n_prompt: int, n_answer: int) -> list[int]:
    """What an uninterrupted run with the same pass ends says from token n_prompt on."""
    control, n, out = engine.control, 0, []
    control.truncate(0, 0)
    for step in engine.recorder.lineage[slot]:
        assert not isinstance(step, int), "a hybrid's history is never cut"
        control.decode([Span(0, step, True)])
        n += len(step)
        if n >= n_prompt:
            out.append(int(control.logits(0).argmax()))
    return out[:n_answer]


class Asked:
    """Questions to one engine; each answer against the uninterrupted run and against the fact."""

    def __init__(self, n_slots: int) -> None:
        self.engine = TracedEngine(owlet(), n_slots=n_slots)
        self.vocab = self.engine.backend.vocab()

    def ask(self, text: str, answer: str) -> str:
        """Where the state came from."""
        ids = self.vocab.tokenize(text, add_special=False, parse_special=True)
        expected = self.vocab.tokenize(answer + "<|im_end|>", add_special=False, parse_special=True)
        found = self.engine.ask(ids, n=len(expected))
        slots = [
            s for s, steps in enumerate(self.engine.recorder.lineage) if self._covers(steps, [*ids, *found.tokens])
        ]
        assert found.tokens in [_replayed(self.engine, s, len(ids), len(expected)) for s in slots]
        assert found.tokens == expected, (self.vocab.detokenize(found.tokens), answer)
        return str(found.finished.report.reuse_source)

    @staticmethod
    def _covers(steps: list[Any], ids: list[int]) -> bool:
        tokens = [int(t) for step in steps for t in step]
        return len(tokens) >= len(ids) - 1 and tokens[: len(ids) - 1] == ids[: len(tokens)][: len(ids) - 1]


@pytest.mark.native
@pytest.mark.slow
def test_restored_answers_are_the_uninterrupted_ones() -> None:
    read, other = document(21, 2300, 8), document(22, 900, 2)
    asked = Asked(n_slots=2)
    try:
        q = read.questions
        sources = [asked.ask(read.text + q[0].text, q[0].answer)]
        # the same slot goes on from its live end
        more = read.text + q[0].text + q[0].answer + "<|im_end|>\n"
        sources.append(asked.ask(more + q[1].text, q[1].answer))
        # branches off a checkpoint into the other slot, then back
        sources.append(asked.ask(read.text + q[2].text, q[2].answer))
        # both slots are taken by something else; only RAM has it now
        asked.ask(other.text + other.questions[0].text, other.questions[0].answer)
        asked.engine.spill()
        asked.ask("<|im_start|>user\nHello!" + other.text + other.questions[1].text, other.questions[1].answer)
        sources.append(asked.ask(read.text + q[3].text, q[3].answer))
        # an edit behind the facts: restored before it, the rest read again
        edited = more.replace(q[0].text, q[0].text.replace("What is", "Tell me: what is"))
        sources.append(asked.ask(edited + q[4].text, q[4].answer))
        assert sources[0] == "none" and sources[1] == "live", sources
        assert sources[2] in ("live", "ram") and sources[3:] == ["ram", "ram"], sources
    finally:
        asked.engine.close()


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_facts_survive_the_server(tmp_path: Path, end: str) -> None:
    """Asked cold, and again by the next process from disk: same pass ends, same answer and probabilities."""
    read = document(31, 2600, 4)
    messages = [{"role": turn.role, "content": turn.text} for turn in read.turns]
    fields = {"ignore_eos": False, "max_tokens": 24}

    def question(i: int) -> list[dict[str, Any]]:
        fact = read.questions[i].fact
        return [*messages, {"role": "user", "content": f"What is the {fact.attribute} of {fact.key}?"}]

    with served(owlet(), "-c", 4096, "--cache-disk", tmp_path) as first:
        cold = ask(first.http, question(0), **fields)
        assert cold.cached == 0
        wait_until_written(first.http)
        getattr(first, end)()
    with served(owlet(), "-c", 2048, "-j", 2, "--cache-disk", tmp_path) as second:
        warm = ask(second.http, question(0), **fields)
        assert warm.source == "disk" and warm.cached > 800
        assert warm.exact == cold.exact and warm.text == read.questions[0].answer
        for i in (1, 2, 3):
            assert ask(second.http, question(i), **fields).text == read.questions[i].answer
