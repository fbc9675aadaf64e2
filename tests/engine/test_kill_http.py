"""kill -9 of a server with a real model, again and again on one folder: the next one answers right.

Hundreds of kills without a model are in ``tests/store``, and in the simulation; here the process, the
model, the writer's thread and the file system are the real ones.
"""

from __future__ import annotations

import contextlib
import random
import threading
from pathlib import Path

import httpx
import pytest

from gufo_gguf.store.browse import open_for_reading
from gufo_gguf.store.check import check_store
from tests.conftest import TinyModel
from tests.engine.served import Talk, ask, distance, rounding, served

pytestmark = [pytest.mark.native, pytest.mark.slow]

N_KILLS = 12


def ask_until_killed(http: httpx.Client, talk: Talk, text: str) -> threading.Thread:
    """A long answer that its client will not keep: decoded text, read again in larger passes, rounds
    differently enough on random weights to drown what this test looks for."""

    def run() -> None:
        with contextlib.suppress(httpx.HTTPError):  # the server is gone
            ask(http, [*talk.messages, {"role": "user", "content": text}], max_tokens=200)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_dozen_kills(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Every answer after a kill is that of a server that was never killed, to the last bit where both went
    on from the same boundary; and it is near a cold one."""
    rng = random.Random(1)
    model, folder = tiny_model("qwen4exp"), tmp_path / "cache"
    near = rounding(model)
    talks = [Talk(f"You are assistant number {i}. " * 40) for i in range(2)]
    from_disk = n_exact = 0
    with served(model, "-c", 4096, "-j", 1, "--without", "parting") as never_killed:
        for round_ in range(N_KILLS):
            size, spacing = rng.choice([2048, 4096]), rng.choice([1, 64])
            flags = ("-c", size, "-j", rng.randint(1, 2), "--cache-disk-spacing", spacing)
            with served(model, *flags, "--cache-disk", folder) as server:
                replies = []
                for talk in talks:
                    reply = talk.turn(server.http, f"Question {round_}?")
                    asked = talk.messages[:-1]
                    control = ask(never_killed.http, asked)
                    if control.cached == reply.cached:
                        assert reply.exact == control.exact
                        n_exact += 1
                    assert distance(reply, ask(server.http, asked, cache_prompt=False)) < near
                    from_disk += reply.source == "disk"
                    replies.append(reply)
                assert replies[0].exact != replies[1].exact, "another conversation's state would not be noticed"
                assert server.http.get("/v1/cache/check").json()["problems"] == []
                thread = ask_until_killed(server.http, rng.choice(talks), f"Killed {round_}?")
                thread.join(rng.uniform(0, 1.5))  # somewhere in the prefill, the answer, the write, or after all
                log = server.kill()
                thread.join()
                assert "Traceback" not in log
            fs = open_for_reading(str(folder))
            report = check_store(fs)
            fs.shut()
            assert not report.damage and not report.lost
    assert from_disk >= N_KILLS, "the folder was hardly used"
    assert n_exact >= N_KILLS, "hardly an answer was compared to the last bit"
