"""Three turns with the models that have a name: the embedded default, and SmolLM2."""

from __future__ import annotations

import pytest

from gufo_gguf.models.default import model_path
from tests.server.test_native import Conversation, cached, native_server

pytestmark = pytest.mark.native


def test_the_default_model_gives_facts_back() -> None:
    for running, recorded in native_server(model_path(), 1):
        chat = Conversation(running, [{"role": "system", "content": "You answer briefly."}])
        chat.turn("The code word of project Kea is drounast. The port of project Kea is 40721.")
        for question, answer in (("code word", "drounast"), ("port", "40721")):
            stable = recorded.last_stable
            usage = chat.turn(f"What is the {question} of project Kea?")
            assert chat.messages[-1]["content"] == answer
            assert cached(usage) >= stable > 0


@pytest.mark.slow
def test_smollm2_remembers_its_conversation() -> None:
    for running, recorded in native_server(model_path("smollm2"), 1):
        chat = Conversation(running, [{"role": "system", "content": "You are a helpful assistant."}])
        chat.turn("What is the capital of France? One word.", max_tokens=16)
        assert "paris" in chat.messages[-1]["content"].lower()
        for text in ("And of Italy?", "And of Spain?"):
            stable = recorded.last_stable
            usage = chat.turn(text, max_tokens=16)
            assert cached(usage) >= stable > 0
