"""Play a workload against a server: send, time, keep every sample; and look at memory after each step.

Requests of one step are sent at the same moment, each by a thread.  Pauses are shortened by
``pace`` (0 = none): what matters is that background work gets the time it gets between real turns,
relative to the work, not that the benchmark sleeps for hours.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from benchmarks.agent.oracle import Played
from benchmarks.agent.servers import Sample, Server
from benchmarks.agent.trace import Answers, Ask, Restart, Sizes, Text, Tokens, Workload

_LONGEST_PAUSE_S = 2.0


@dataclass(slots=True)
class Run:
    """One workload on one server."""

    workload: str
    server: str
    samples: list[Sample] = field(default_factory=list)
    trace: list[Played] = field(default_factory=list)
    """What was really asked and answered: the oracles work on this."""
    memory: list[dict[str, int]] = field(default_factory=list)
    wall_s: float = 0.0
    """Of the requests alone, pauses and restarts left out."""
    cpu_s: float = 0.0
    """Processor time of the server from its first request on, looks at its memory left out: what a busy
    machine does not change."""
    restart_s: float = 0.0

    @property
    def prefilled(self) -> int:
        return sum(s.n_prefilled for s in self.samples)


def play(workload: Workload, sizes: Sizes, server: Server, pace: float = 0.01, *, scripted: bool = False) -> Run:
    """The server must be running and fresh; it is left running.

    ``scripted``: the history goes on with drawn answers instead of the server's.  llama-server's stream leaves
    out the ids of characters that are not complete, so with a real vocabulary its answers cannot be sent back.
    """
    run = Run(workload.name, server.name)
    script = workload.script(sizes)
    step = next(script)
    cpu_before_s = server.cpu_s()
    with ThreadPoolExecutor(max_workers=16) as pool:
        while True:
            answers: Answers = []
            if isinstance(step, Restart):
                started = time.perf_counter()
                server.restart(kill=step.kill)
                run.restart_s += time.perf_counter() - started
            else:
                answers = _send(step, server, run, pool, pace, None if not scripted else Text(sizes.seed))
            try:
                step = script.send(answers)
            except StopIteration:
                run.cpu_s += server.cpu_s() - cpu_before_s
                return run


def _send(
    asks: tuple[Ask, ...], server: Server, run: Run, pool: ThreadPoolExecutor, pace: float, script: Text | None
) -> Answers:
    prompts = [server.tokens_of(ask) for ask in asks]
    time.sleep(min(_LONGEST_PAUSE_S, pace * max(ask.idle_s for ask in asks)))
    first = len(run.samples)
    samples = [
        Sample(run.workload, run.server, first + i, ask.conversation, ask.kind) for i, ask in enumerate(asks)
    ]  # fmt: skip
    started = time.perf_counter()
    for done in [pool.submit(server.send, ask, sample) for ask, sample in zip(asks, samples, strict=True)]:
        done.result()
    run.wall_s += time.perf_counter() - started
    answers: list[Tokens] = []
    for ask, prompt, sample in zip(asks, prompts, samples, strict=True):
        _check(ask, prompt, sample, all_ids=script is None)
        answer = np.array(sample.answer, np.int32)
        run.trace.append(Played(prompt, answer))
        answers.append(answer if script is None else script.draw(f"answer {sample.number}", ask.n_answer))
    run.samples += samples
    before_s = server.cpu_s()
    run.memory.append(server.memory())
    if len(samples) == 1:
        server.note_stops(samples[0])
    run.cpu_s -= server.cpu_s() - before_s
    return answers


def _check(ask: Ask, prompt: Tokens, sample: Sample, *, all_ids: bool) -> None:
    """A figure is worth something only if the server did what was asked."""
    if sample.n_prompt != len(prompt):
        raise RuntimeError(f"{sample.server}: counts {sample.n_prompt} prompt tokens, {len(prompt)} were sent")
    n = len(sample.answer) if all_ids else sample.reported.get("predicted_n", ask.n_answer)
    if ask.tokens is not None and n != ask.n_answer:
        raise RuntimeError(f"{sample.server}: {n} tokens answered, {ask.n_answer} were asked for (--scripted?)")
