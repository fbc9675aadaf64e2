"""kill -9 of a server with a real model, again and again on one folder: the next one answers right.

Hundreds of kills without a model are in ``tests/store``, and in the simulation; here the process, the
model, the writer's thread and the file system are the real ones.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
from pathlib import Path

import httpx
import pytest

from gufo_gguf.store.browse import open_for_reading
from gufo_gguf.store.check import check_store
from tests.conftest import TinyModel
from tests.engine.served import Reply, Talk, ask, served

pytestmark = [pytest.mark.native, pytest.mark.slow]

N_KILLS = 12


def distance(a: Reply, b: Reply) -> float:
    """Largest difference of a token's log-probability, up to where the texts part; infinite where a's
    token is none of b's likeliest."""
    worst = 0.0
    for (token, logprob, *_), (other, *alternatives) in zip(a.logprobs, b.logprobs, strict=True):
        theirs = dict([(other, alternatives[0]), *alternatives[1:]])
        worst = max(worst, abs(logprob - theirs.get(token, -math.inf)))
        if token != other:
            break
    return worst


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
    rng = random.Random(1)
    folder = tmp_path / "cache"
    talks = [Talk(f"You are assistant number {i}. " * 40) for i in range(2)]
    from_disk = 0
    for round_ in range(N_KILLS):
        flags = ("-c", rng.choice([2048, 4096]), "-j", rng.randint(1, 2), "--cache-disk-spacing", rng.choice([1, 64]))
        with served(tiny_model("qwen4exp"), *flags, "--cache-disk", folder) as server:
            replies = []
            for talk in talks:
                replies.append(talk.turn(server.http, f"Question {round_}?"))
                cold = ask(server.http, talk.messages[:-1], cache_prompt=False)
                assert distance(replies[-1], cold) < 0.25  # a device rounds more than a CPU
                from_disk += replies[-1].source == "disk"
            assert distance(*replies) > 0.5, "another conversation's state would not be noticed"
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
