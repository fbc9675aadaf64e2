"""The attacks of ``attacks.py`` on real models: no failure of the server, and nobody else notices."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from gufo_gguf.backend.llama import LlamaOptions
from gufo_gguf.engine.engine import Engine, EngineOptions
from gufo_gguf.server.settings import ServerSettings
from tests.conftest import tiny_model_path
from tests.server.attacks import Attack, attacks
from tests.server.conftest import Running, running_server
from tests.server.test_streams import eventually

pytestmark = [pytest.mark.native, pytest.mark.slow]

FINE = {501, 503, 504}
CANARY = {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0, "cache_prompt": False}


@pytest.fixture(scope="module", params=["qwen4exp", pytest.param("llama", marks=pytest.mark.long)])
def victim(request: pytest.FixtureRequest) -> Iterator[Running]:
    llama = LlamaOptions(n_ctx=512, n_slots=2, n_batch=256, n_ubatch=64, n_threads=1)
    engine = Engine.load(tiny_model_path(request.param), EngineOptions(llama=llama, cache_ram_bytes=64 << 20))
    with running_server(engine, ServerSettings(port=0, drain_s=0.2)) as running:
        yield running


def canary(running: Running) -> str:
    reply = running.http.post("/completion", json=CANARY, timeout=60)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["content"])


def settled(running: Running) -> bool:
    engine = running.engine
    return eventually(lambda: not any(s["is_processing"] for s in engine.slots())) and engine.check() == []


def wrongs(running: Running, attack: Attack) -> list[str]:
    """What is wrong with the answers to an attack, whole and as a stream."""
    found = []
    streams = attack.path.startswith(("/completion", "/v1/")) and isinstance(attack.body, dict)
    for body in (attack.body, {**attack.body, "stream": True}) if streams else (attack.body,):
        sent = Attack(attack.name, attack.path, body)
        try:
            reply = running.http.post(
                sent.path, content=sent.content, headers={"content-type": "application/json"}, timeout=60
            )
        except httpx.HTTPError as error:
            found.append(f"{sent.path} {sent.name}: {error!r}")
            continue
        if reply.status_code >= 500 and reply.status_code not in FINE:
            found.append(f"{sent.path} {sent.name}: {reply.status_code} {reply.text[:200]}")
        elif '"server_error"' in reply.text or '"internal_error"' in reply.text:
            found.append(f"{sent.path} {sent.name}: {reply.text[-300:]}")
    return found


def test_attacks(victim: Running) -> None:
    before = canary(victim)
    info = victim.engine.info
    found: list[str] = []
    n_sent = 0
    for attack in attacks(info.n_ctx, info.n_vocab):
        found += wrongs(victim, attack)
        n_sent += 1
        if n_sent % 50 == 0:
            assert canary(victim) == before, f"after {attack.name}"
            assert settled(victim), f"after {attack.name}"
    assert n_sent > 800
    assert canary(victim) == before and settled(victim)
    assert found == []
