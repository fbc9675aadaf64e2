"""POST /v1/cache/prefetch: what it answers, and that the request that follows finds its state in RAM."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import TinyModel
from tests.engine.served import Talk, ask, served
from tests.server.conftest import Running

PREFETCH = "/v1/cache/prefetch"
OTHER = [{"role": "user", "content": "Something else takes the slot."}]


def test_the_answer_and_the_request_behind_it(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "tools": []}
    found = running.post(PREFETCH, **body).json()
    [request] = running.engine.prefetched
    n = len(request.tokens)
    assert found == {
        "object": "cache.prefetch", "prompt_tokens": n, "boundary": n - 1, "tokens": n - 1, "bytes": 10 * (n - 1),
        "source": "disk", "kept": True, "miss_reason": None, "restore_ms": 1.5,
    }  # fmt: skip
    assert running.engine.requests == [], "nothing is generated"
    running.post("/v1/chat/completions", **body)
    assert running.engine.requests[0].tokens.tolist() == request.tokens.tolist(), "the prompt of the request itself"
    assert running.engine.requests[0].stable == request.stable


def test_refusals(running: Running) -> None:
    assert running.error(PREFETCH, messages=[])["param"] == "messages"
    running.engine.full = True
    answer = running.post(PREFETCH, messages=OTHER)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "3"


def prefetched(http: httpx.Client, messages: list[dict[str, Any]]) -> dict[str, Any]:
    answer = http.post(PREFETCH, json={"messages": messages})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen4exp", "llama"])
def test_from_disk_to_ram_before_the_request_comes(tiny_model: TinyModel, tmp_path: Path, arch: str) -> None:
    model, folder = tiny_model(arch), tmp_path / "cache"
    with served(model, "-c", 4096, "--cache-disk", folder) as first:
        talk = Talk()
        talk.turn(first.http, "First?")
        talk.turn(first.http, "Second?")
    question = [*talk.messages, {"role": "user", "content": "Third?"}]
    copy = shutil.copytree(folder, tmp_path / "copy")
    with served(model, "-c", 4096, "--cache-disk", copy) as control:  # the same restore, by the request itself
        straight = ask(control.http, question)
        assert straight.source == "disk"
    with served(model, "-c", 4096, "--cache-disk", folder) as second:
        if arch != "llama":  # rows may be cut anywhere: the template's first token is worth one
            nothing = prefetched(second.http, OTHER)
            assert (nothing["boundary"], nothing["tokens"], nothing["source"]) == (0, 0, "none")
            assert nothing["miss_reason"] in ("no_checkpoint", "prefix_changed")
        loaded = prefetched(second.http, question)
        assert loaded["source"] == "disk" and loaded["kept"] is True
        assert loaded["tokens"] == loaded["boundary"] == straight.cached and loaded["bytes"] > 0
        again = prefetched(second.http, question)
        assert again["source"] in ("live", "ram") and again["boundary"] == loaded["boundary"]
        assert again["tokens"] == again["bytes"] == 0, "it was there already"
        ask(second.http, OTHER)
        answer = ask(second.http, question)
        assert (answer.source, answer.cached) == ("ram", straight.cached)
        assert answer.exact == straight.exact
        assert "Traceback" not in second.log


@pytest.mark.native
def test_without_a_disk_tier_there_is_nothing_to_load(tiny_model: TinyModel) -> None:
    with served(tiny_model("qwen4exp"), "-c", 2048) as server:
        talk = Talk()
        assert prefetched(server.http, talk.messages + OTHER)["source"] == "none"
        talk.turn(server.http, "First?")
        found = prefetched(server.http, [*talk.messages, {"role": "user", "content": "Second?"}])
        assert found["source"] == "live" and found["boundary"] > 100 and found["tokens"] == 0
