"""Timed streams: N requests at the same moment, each piece of each answer with the time it came."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np

from benchmarks.agent.http import Http
from benchmarks.agent.trace import HIGH_ID, LOW_ID


@dataclass(slots=True)
class Stream:
    """One streamed answer; seconds on the clock of ``time.perf_counter``."""

    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    """One entry per token that came; tokens of one event share a time.  llama-server leaves out those that
    end inside a character, so there may be fewer than ``n_answer``."""
    n_answer: int = 0
    """Generated tokens, as the server counted them."""
    n_prompt: int = 0
    n_cached: int = 0

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.token_s[0] - self.sent_s


def prompt(seed: int, n: int) -> list[int]:
    """n token ids that no other seed shares."""
    return [int(t) for t in np.random.default_rng(seed).integers(LOW_ID, HIGH_ID, n)]


def ask(http: Http, tokens: list[int], n_answer: int) -> Stream:
    """A greedy answer of n_answer tokens, streamed."""
    stream = Stream()
    body = {"prompt": tokens, "n_predict": n_answer, "temperature": 0.0, "ignore_eos": True, "stream": True}
    stream.sent_s = time.perf_counter()
    for event in http.stream("/completion", {**body, "return_tokens": True}):
        now = time.perf_counter()
        stream.token_s += [now] * len(event.get("tokens") or ())
        if event.get("stop"):
            timings = event["timings"]
            stream.n_prompt, stream.n_cached = int(timings["prompt_n"]), int(timings["cache_n"])
            stream.n_answer = int(timings["predicted_n"])
            stream.token_s = stream.token_s or [now]
    if stream.n_answer != n_answer:
        raise RuntimeError(f"{stream.n_answer} tokens were generated, {n_answer} were asked for")
    return stream


def together(http: Http, prompts: list[list[int]], n_answer: int) -> list[Stream]:
    """One thread per prompt, all sent at once."""
    found: list[Stream | Exception] = [RuntimeError("not run")] * len(prompts)

    def one(i: int) -> None:
        try:
            found[i] = ask(http, prompts[i], n_answer)
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    streams = []
    for got in found:
        if isinstance(got, Exception):
            raise got
        streams.append(got)
    return streams


def decode_rate(streams: list[Stream]) -> float:
    """Tokens per second of all streams while every one of them was generating."""
    begin, end = max(s.token_s[0] for s in streams), min(s.token_s[-1] for s in streams)
    if end <= begin:
        raise ValueError("the streams never generated at the same time; ask for longer answers")
    seen = (sum(begin < t <= end for t in s.token_s) * s.n_answer / len(s.token_s) for s in streams)
    return sum(seen) / (end - begin)
