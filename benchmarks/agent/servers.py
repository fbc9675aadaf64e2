"""Servers under test, each a process started and stopped here, behind one small interface.

    gufo          gufo serve; gufo-grid, gufo-stable, …: with that part of the cache left out
    llama         llama-server as it comes, with the same model, threads, slots, context and RAM budget
    llama-best    the same with the flags that serve hybrid models best (LLAMA_BEST says why)
    URL           any OpenAI-compatible server; it is neither started nor restarted

Token prompts go to /completion of llama.cpp's API, which both servers have and which gives the tokens
back; message prompts go to /v1/chat/completions.  Both stream, so that the first token has a time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from benchmarks.agent.http import Http, HttpError
from benchmarks.agent.trace import Ask, Tokens

_START_S, _STOP_S = 120.0, 60.0

LLAMA_BEST = ("--slot-prompt-similarity", "0.9", "--checkpoint-min-step", "256", "--ctx-checkpoints", "64")
"""llama-server's flags for hybrid models, chosen by trying them on (b), (c) and (d) (docs/comparison.md): a prompt
that shares less than nine tenths with a slot does not take the slot over but looks among the saved copies
first.  More and closer checkpoints changed nothing there; they are for chats with long histories."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all servers of one run have in common."""

    model: Path
    n_ctx: int
    """Tokens per slot."""
    n_slots: int
    n_threads: int
    ram_bytes: int
    """Budget of the cache beyond the slots."""
    n_ubatch: int = 512
    disk: bool = False
    more: tuple[str, ...] = ()


@dataclass(slots=True)
class Sample:
    """One request as its client saw it; times in milliseconds, sizes in tokens."""

    workload: str
    server: str
    number: int
    conversation: str
    kind: str
    n_prompt: int = 0
    n_cached: int = 0
    n_prefilled: int = 0
    first_token_ms: float = 0.0
    total_ms: float = 0.0
    reported: dict[str, Any] = field(default_factory=dict)
    """The server's own timings and, from gufo, what its cache did."""
    answer: list[int] = field(default_factory=list)
    text: str = ""
    stops: list[int] | None = None
    """Where passes over the prompt were made to end, in tokens; None: not known, or it ran beside others."""


class Server(Protocol):
    name: str
    http: Http

    def start(self) -> None: ...
    def restart(self, *, kill: bool) -> None: ...
    def stop(self) -> None: ...
    def send(self, ask: Ask, sample: Sample, *, cached: bool = True) -> None:
        """Carry out one request and fill in its sample."""
        ...

    def tokens_of(self, ask: Ask) -> Tokens:
        """The prompt's tokens as this server renders them."""
        ...

    def note_stops(self, sample: Sample) -> None:
        """Fill in ``stops`` of the request that was carried out last, alone."""
        ...

    def memory(self) -> dict[str, int]: ...
    def cpu_s(self) -> float:
        """Processor time since the server was first started, restarts included."""
        ...


class Process:
    """A child that says it is ready over HTTP."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        with log.open("ab") as out:
            self.child = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **(environment or {})})
        self._log = log

    def wait_ready(self, http: Http) -> None:
        limit = time.monotonic() + _START_S
        while time.monotonic() < limit:
            if self.child.poll() is not None:
                break
            try:
                http.get("/health")
                return
            except HttpError:
                time.sleep(0.02)
        tail = self._log.read_text(errors="replace")[-600:]
        self.end(kill=True)
        raise RuntimeError(f"the server did not start:\n{tail}")

    def end(self, *, kill: bool) -> None:
        if self.child.poll() is None:
            os.kill(self.child.pid, signal.SIGKILL if kill else signal.SIGTERM)
            try:
                self.child.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()

    def cpu_s(self) -> float:
        """Processor time of the process so far."""
        times = psutil.Process(self.child.pid).cpu_times()
        return float(times.user + times.system)

    def rss(self) -> int:
        return int(psutil.Process(self.child.pid).memory_info().rss)


class _Local:
    """Start, restart, stop: what gufo and llama-server have in common."""

    name = ""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.folder = Path(tempfile.mkdtemp(prefix="gufo-bench-"))
        self.port = free_port()
        self.http = Http(f"http://127.0.0.1:{self.port}")
        self.starts_s: list[float] = []
        self._process: Process | None = None
        self._cpu_before_s = 0.0

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    def start(self) -> None:
        started = time.perf_counter()
        self._process = Process(self.command(), self.folder / "log", self.environment())
        self._process.wait_ready(self.http)
        self.starts_s.append(time.perf_counter() - started)

    def restart(self, *, kill: bool) -> None:
        assert self._process is not None
        self._cpu_before_s = self.cpu_s()
        self._process.end(kill=kill)
        self.start()

    def cpu_s(self) -> float:
        return self._cpu_before_s + (self._process.cpu_s() if self._process is not None else 0.0)

    def stop(self) -> None:
        """End the process and remove its files; idempotent."""
        if self._process is not None:
            self._process.end(kill=False)
            self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def send(self, ask: Ask, sample: Sample, *, cached: bool = True) -> None:
        if ask.tokens is not None:
            _complete(self.http, ask, sample, cached)
        else:
            _chat(self.http, ask, sample, cached)

    def tokens_of(self, ask: Ask) -> Tokens:
        import numpy as np

        if ask.tokens is not None:
            return ask.tokens
        text = self.http.post("/apply-template", {"messages": list(ask.messages or ())})["prompt"]
        ids = self.http.post("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
        return np.array(ids, np.int32)

    def note_stops(self, sample: Sample) -> None:
        """Not known."""

    def memory(self) -> dict[str, int]:
        disk = sum(f.stat().st_size for f in self.folder.rglob("*") if f.is_file() and f.name != "log")
        return {"rss": self._process.rss() if self._process is not None else 0, "disk": disk}


class Gufo(_Local):
    """gufo serve; ``without``: a part of the cache that is left out (``gufo_gguf.engine.ablation``), or "disk"."""

    def __init__(self, setup: Setup, without: str = "") -> None:
        super().__init__(setup)
        self.name = f"gufo-{without}" if without else "gufo"
        self._without = without

    def command(self) -> list[str]:
        s = self.setup
        command = [sys.executable, "-m", "gufo_gguf.cli.main", "serve", str(s.model), "--port", str(self.port)]
        command += ["-c", str(s.n_ctx), "-j", str(s.n_slots), "-t", str(s.n_threads), "-ub", str(s.n_ubatch)]
        command += ["--cache-ram-bytes", str(s.ram_bytes), *s.more]
        if self._without not in ("", "disk"):
            command += ["--without", self._without]
        disk = s.disk and self._without != "disk"
        return command + (["--cache-disk", str(self.folder / "disk")] if disk else [])

    def environment(self) -> dict[str, str]:
        return {"GUFO_CONFIG": os.devnull}  # the developer's own settings are not what is measured

    def start(self) -> None:
        self._seen = 0
        super().start()

    def note_stops(self, sample: Sample) -> None:
        events = self.http.get(f"/v1/cache/events?since={self._seen}&limit=10000")["data"]
        self._seen = max((event["seq"] for event in events), default=self._seen)
        plans = [event.get("points", []) for event in events if event["kind"] == "plan"]
        sample.stops = plans[-1] if plans else []

    def memory(self) -> dict[str, int]:
        status = self.http.get("/v1/cache")
        ram = status["ram"]
        return {**super().memory(), "retained": ram["unique_bytes"], "whole_copies": ram["whole_bytes"]}


class Llama(_Local):
    """llama-server; ``best``: with LLAMA_BEST, and its slots saved and restored around a clean restart."""

    def __init__(self, setup: Setup, program: Path, *, best: bool) -> None:
        super().__init__(setup)
        self.name = "llama-best" if best else "llama"
        self._program, self._best = program, best
        self.restore_ms = 0.0
        """What the client spent on asking for the slots back, after the last restart."""

    def command(self) -> list[str]:
        s = self.setup
        command = [str(self._program), "-m", str(s.model), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["-c", str(s.n_ctx * s.n_slots), "-np", str(s.n_slots), "-t", str(s.n_threads)]
        command += ["-ub", str(s.n_ubatch), "-fa", "on", "--jinja", "--no-webui", "--slots", *s.more]
        command += ["--cache-ram", str(-(-s.ram_bytes // (1 << 20)))]
        if self._best:
            (self.folder / "slots").mkdir(exist_ok=True)
            command += [*LLAMA_BEST, "--slot-save-path", str(self.folder / "slots")]
        return command

    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self._program.parent), "DYLD_LIBRARY_PATH": str(self._program.parent)}

    def restart(self, *, kill: bool) -> None:
        saved = self._best and not kill  # a client cannot know when a kill comes
        if saved:
            self._slots("save")
        super().restart(kill=kill)
        started = time.perf_counter()
        if saved:
            self._slots("restore")
        self.restore_ms = 1e3 * (time.perf_counter() - started)

    def _slots(self, action: str) -> None:
        for slot in range(self.setup.n_slots):
            try:
                self.http.post(f"/slots/{slot}?action={action}", {"filename": f"slot{slot}.bin"})
            except HttpError as error:  # an empty slot
                if action == "save" and self.setup.n_slots == 1:
                    raise RuntimeError(f"llama-server did not save its slot: {error}") from error


class Url:
    """A server somebody else runs.  Answers come back as text, so the player continues with ids of its own."""

    def __init__(self, url: str, model: str = "default") -> None:
        self.name = url
        self.http = Http(url.rstrip("/").removesuffix("/v1"))
        self._model = model

    def start(self) -> None: ...

    def restart(self, *, kill: bool) -> None:
        raise RuntimeError("a server given by its URL cannot be restarted; leave the restart workloads out")

    def stop(self) -> None: ...

    def send(self, ask: Ask, sample: Sample, *, cached: bool = True) -> None:
        if ask.tokens is not None:
            body = {"prompt": ask.tokens.tolist(), "max_tokens": ask.n_answer, "model": self._model}
            _stream(self.http, "/v1/completions", body, sample)
            sample.answer = [20] * ask.n_answer
        else:
            _chat(self.http, ask, sample, cached)

    def tokens_of(self, ask: Ask) -> Tokens:
        if ask.tokens is None:
            raise RuntimeError("messages cannot be turned into tokens without llama.cpp's endpoints")
        return ask.tokens

    def note_stops(self, sample: Sample) -> None: ...

    def memory(self) -> dict[str, int]:
        return {}

    def cpu_s(self) -> float:
        return 0.0


_GREEDY = {"temperature": 0.0, "ignore_eos": True, "stream": True, "seed": 1}


def _complete(http: Http, ask: Ask, sample: Sample, cached: bool) -> None:
    assert ask.tokens is not None
    body = {**_GREEDY, "prompt": ask.tokens.tolist(), "n_predict": ask.n_answer, "cache_prompt": cached}
    started = time.perf_counter()
    for event in http.stream("/completion", {**body, "return_tokens": True}):
        if event.get("tokens") and not sample.answer:
            sample.first_token_ms = 1e3 * (time.perf_counter() - started)
        sample.answer += event.get("tokens") or []
        sample.text += event.get("content") or ""
        if event.get("stop"):
            _take(sample, event.get("timings") or {}, event.get("gufo"))
    sample.total_ms = 1e3 * (time.perf_counter() - started)
    # Text is held back while a character is incomplete: the tokens may come late, the count never does.
    sample.first_token_ms = sample.first_token_ms or sample.total_ms


def _chat(http: Http, ask: Ask, sample: Sample, cached: bool) -> None:
    body = {**_GREEDY, "messages": list(ask.messages or ()), "max_tokens": ask.n_answer, "cache_prompt": cached}
    _stream(http, "/v1/chat/completions", body, sample)


def _stream(http: Http, path: str, body: dict[str, Any], sample: Sample) -> None:
    started = time.perf_counter()
    for event in http.stream(path, {**body, "stream": True, "stream_options": {"include_usage": True}}):
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = "".join(filter(None, (delta.get("content"), delta.get("reasoning_content"), choice.get("text"))))
            if text and not sample.text:
                sample.first_token_ms = 1e3 * (time.perf_counter() - started)
            sample.text += text
        usage = event.get("usage")
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            sample.n_prompt, sample.n_cached = usage["prompt_tokens"], details.get("cached_tokens") or 0
            sample.n_prefilled = sample.n_prompt - sample.n_cached
        if event.get("timings"):
            _take(sample, event["timings"], (usage or {}).get("gufo"))
    sample.total_ms = 1e3 * (time.perf_counter() - started)
    sample.first_token_ms = sample.first_token_ms or sample.total_ms


def _take(sample: Sample, timings: dict[str, Any], gufo: dict[str, Any] | None) -> None:
    sample.n_cached, sample.n_prefilled = int(timings.get("cache_n") or 0), int(timings.get("prompt_n") or 0)
    sample.n_prompt = sample.n_cached + sample.n_prefilled
    sample.reported = {**timings, **({"gufo": gufo} if gufo else {})}


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
