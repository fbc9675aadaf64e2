"""Time limits and the sampler's own chances, on a real model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import tiny_model_path
from tests.server.conftest import Running
from tests.server.test_native import CHAT, Recorded, cached, native_server, stream_chat
from tests.server.test_streams import eventually

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def one_slot() -> Iterator[tuple[Running, Recorded]]:
    yield from native_server(tiny_model_path("qwen4exp"), 1)


def test_a_time_limit_frees_the_slot_and_keeps_what_was_computed(one_slot: tuple[Running, Recorded]) -> None:
    running, recorded = one_slot
    messages = [{"role": "system", "content": "Limit. " * 60}, {"role": "user", "content": "Tell a long story."}]
    body = {"messages": messages, "max_tokens": 3000, "ignore_eos": True, "timeout": 1.0}
    answer = running.http.post(CHAT, json=body)
    assert answer.status_code == 504 and answer.json()["error"]["type"] == "timeout_error"
    assert eventually(lambda: not any(s["is_processing"] for s in running.engine.slots())), "the slot is free again"
    usage, _ = stream_chat(running, messages)
    assert cached(usage) >= recorded.last_stable > 100
    assert running.engine.check() == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("n_predict", [0, 1])
def test_answers_that_are_there_at_once_do_not_hold_up_those_behind_them(
    one_slot: tuple[Running, Recorded], n_predict: int
) -> None:
    """A prompt that was wholly kept, and nothing to generate from it: no pass runs, and the slot is free again."""
    running, _ = one_slot
    body = {"prompt": [[5, 6, 7, 8 + i] for i in range(8)], "n_predict": n_predict}
    for _ in range(3):
        found = running.http.post("/completion", json=body).json()
        assert len(found) == 8 and all(entry["tokens_predicted"] == n_predict for entry in found)
    assert [entry["timings"]["prompt_n"] for entry in found] == [0] * 8, "or this shows nothing"
    assert eventually(lambda: len(running.server.uvicorn.state.active) == 0)


def test_chances_after_the_sampler_are_those_of_its_chain(one_slot: tuple[Running, Recorded]) -> None:
    running, _ = one_slot
    body = {"prompt": "Once upon a time", "n_predict": 4, "n_probs": 40, "post_sampling_probs": True, "seed": 5}

    def shown(**fields: object) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = running.http.post("/completion", json={**body, **fields}).json()[
            "completion_probabilities"
        ]
        return found

    for entry in shown(temperature=0.8, top_k=5, top_p=1, min_p=0):
        chances = [top["prob"] for top in entry["top_probs"]]
        assert len(chances) == 5 and abs(sum(chances) - 1) < 1e-4 and chances == sorted(chances, reverse=True)
        assert entry["prob"] in chances, "what was drawn was left by the chain"
    greedy = shown(temperature=0)
    assert [entry["id"] for entry in greedy] == [entry["top_probs"][0]["id"] for entry in greedy]
