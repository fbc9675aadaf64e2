"""``gufo serve`` as a process, and in-process servers, for tests that talk HTTP and restart.

Answers are compared by their text and by the log-probabilities of every generated token and its
alternatives: on random weights those change with any byte of the state.
"""

from __future__ import annotations

import functools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gufo_gguf.store.browse import browse, open_for_reading

SYSTEM = "You answer in few words, and never about the weather. " * 30
COMMON = ("--port", "0", "-t", "1", "-b", "256", "-ub", "64", "--cache-ram-bytes", "64M")


@dataclass(frozen=True)
class Reply:
    """One answer, and everything about it that must repeat exactly."""

    text: str
    logprobs: tuple[tuple[Any, ...], ...]
    usage: dict[str, Any]
    tokens: tuple[tuple[int, tuple[Any, ...]], ...] = ()
    """(token id, (its log-probability, (id, log-probability) of the likeliest …)) of each generated token."""
    message: dict[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> tuple[str, tuple[tuple[Any, ...], ...]]:
        return self.text, self.logprobs

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def source(self) -> str:
        return str(self.usage["gufo"]["reuse_source"])

    @property
    def miss(self) -> str | None:
        reason: str | None = self.usage["gufo"]["miss_reason"]
        return reason

    @property
    def boundaries(self) -> list[int]:
        """Where it left checkpoints."""
        return [c["boundary"] for c in self.usage["gufo"]["captured"]]


def ask(http: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> Reply:
    """A greedy answer of exactly max_tokens tokens."""
    body = {
        "messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": True,
        "top_logprobs": 3, **fields,
    }  # fmt: skip
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    choice = found["choices"][0]
    shown = (choice["logprobs"] or {}).get("content") or []
    logprobs = tuple(
        (p["token"], p["logprob"], *((t["token"], t["logprob"]) for t in p["top_logprobs"])) for p in shown
    )
    message = choice["message"]
    text = (message.get("reasoning_content") or "") + (message.get("content") or "")
    assert logprobs, "nothing to compare"
    tokens = tuple((p["id"], (p["logprob"], *((t["id"], t["logprob"]) for t in p["top_logprobs"]))) for p in shown)
    return Reply(text, logprobs, found["usage"], tokens, message)


@dataclass
class Talk:
    """A conversation as a client keeps it."""

    system: str = SYSTEM
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = self.messages or [{"role": "system", "content": self.system}]

    def turn(self, http: httpx.Client, text: str, **fields: Any) -> Reply:
        self.messages.append({"role": "user", "content": text})
        reply = ask(http, self.messages, **fields)
        self.messages.append({"role": "assistant", "content": reply.text})
        return reply


class Served:
    """A running ``gufo serve``."""

    def __init__(self, model: Path, *args: object) -> None:
        command = [sys.executable, "-m", "gufo_gguf.cli.main", "serve", str(model), *COMMON, *map(str, args)]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._err: list[str] = []
        self._reader = threading.Thread(target=self._err.extend, args=(self.child.stderr,), daemon=True)
        self._reader.start()
        assert self.child.stdout is not None
        for line in self.child.stdout:
            found = re.search(r"http://\S+", line)
            if found:
                self.http = httpx.Client(base_url=found.group(), timeout=120)
                return
        self._reader.join(10)
        raise AssertionError(f"it ended: {self.log}")

    @property
    def log(self) -> str:
        return "".join(self._err)

    def cache(self) -> dict[str, Any]:
        status: dict[str, Any] = self.http.get("/v1/cache").json()
        return status

    def stop(self) -> str:
        """SIGTERM; the log."""
        return self._end(signal.SIGTERM, 0)

    def kill(self) -> str:
        """SIGKILL; the log."""
        return self._end(signal.SIGKILL, -signal.SIGKILL)

    def _end(self, number: int, status: int) -> str:
        os.kill(self.child.pid, number)
        assert self.child.wait(60) == status, self.log
        self._reader.join(10)
        self.http.close()
        return self.log

    def discard(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait(10)


@contextmanager
def served(model: Path, *args: object) -> Iterator[Served]:
    server = Served(model, *args)
    try:
        yield server
        if server.child.poll() is None:
            server.stop()
    finally:
        server.discard()


def on_disk(folder: Path) -> list[int]:
    """Boundaries of the checkpoints in a folder, in use or not, ascending."""
    fs = open_for_reading(str(folder))
    try:
        return sorted(record.n_tokens for record in browse(fs).records)
    finally:
        fs.shut()


def wait_until_written(http: httpx.Client, n: int = 1) -> None:
    """Until the server says that n checkpoints are durable and nothing waits."""
    for _ in range(600):
        disk = http.get("/v1/cache").json()["disk"]
        if disk["checkpoints"] >= n and disk["waiting"] == 0:
            return
        time.sleep(0.1)
    raise AssertionError(f"not written: {disk}")


# -- cold controls -------------------------------------------------------------------------------
def distance(a: Reply, b: Reply) -> float:
    """How far the log-probability of a's first token is from b's; infinite where it is none of b's likeliest.

    Only the first is a function of the prompt's state alone: the next ones follow what was chosen, and a
    model of random weights that picks experts turns a near tie into another text.
    """
    (token, logprob, *_), (other, *alternatives) = a.logprobs[0], b.logprobs[0]
    theirs = dict([(other, alternatives[0]), *alternatives[1:]])
    return abs(logprob - theirs.get(token, -math.inf))


@functools.cache
def rounding(model: Path) -> float:
    """Twice how far cold answers part when only the size of their passes differs; at least 0.05.

    A warm answer is computed in other passes than a cold one, the last of a few tokens, for which there are
    other kernels.  On random weights that moves log-probabilities by hundredths to tenths.
    """
    talks = [Talk(f"You are assistant number {i}. " * 40) for i in range(12)]
    by_size: list[list[Reply]] = []
    for n in (64, 4):
        with served(model, "-c", 2048, "-b", n, "-ub", n) as server:
            questions = ([*talk.messages, {"role": "user", "content": "Question?"}] for talk in talks)
            by_size.append([ask(server.http, question, cache_prompt=False) for question in questions])
    return max(0.05, 2 * max(distance(a, b) for a, b in zip(*by_size, strict=True)))
