"""The article's conversation over HTTP, asked of `gufo serve` and of llama-server from the same libraries.

    python -m benchmarks.gpu.over_http [--servers gufo,llama-server] [--tokens 95439] [--model FILE]

One slot each.  llama-server with its defaults: its checkpoints and its --cache-ram; for the row after
a restart its slot save and restore, called by hand as its users must.  Times are the client's, from
request to answer of one token: what a server does before it starts its own clock (llama-server
loading a prompt from RAM) counts.  `gufo-off` is `gufo serve --no-cache`: a cold prompt, and decoding.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import Table, report
from benchmarks.gpu.load import N_WARM, arguments, edited, edits, place, text
from gufo_gguf.core import env

_START_S = 180
_N_DECODE = 257
SERVERS = ("gufo", "gufo-off", "llama-server")


@dataclass(frozen=True, slots=True)
class Kind:
    """How a server is started; ``by_hand``: what outlives it must be saved and restored by the client."""

    name: str
    command: list[str]
    by_hand: bool


def kind(name: str, model: Path, n_ctx: int, folder: Path, program: Path) -> Kind:
    if name == "llama-server":
        more = ["--parallel", "1", "--slot-save-path", str(folder), "--no-webui"]
        return Kind(name, [str(program), "--model", str(model), "--ctx-size", str(n_ctx), *more], True)
    cache = ["--no-cache"]
    if name == "gufo":
        disk = ["--cache-disk", str(folder / "cache"), "--cache-disk-bytes", "32G"]
        cache = ["--cache-ram-bytes", "24G", *disk]
    serve = [sys.executable, "-m", "gufo_gguf.cli.main", "serve", str(model)]
    return Kind(name, [*serve, "--ctx-size", str(n_ctx), "--sessions", "1", *cache], False)


class Server:
    """One server process and a client of it."""

    def __init__(self, command: list[str], log: Path) -> None:
        port = 18_000 + os.getpid() % 1000
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600)
        self._log = log.open("ab")
        self.process = subprocess.Popen([*command, "--port", str(port)], stdout=self._log, stderr=self._log)

    def wait(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise RuntimeError("the server did not start")

    def ask(self, tokens: list[int], n: int = 1) -> tuple[float, dict[str, Any]]:
        """(seconds as the client sees them, the answer's object)."""
        body = {"prompt": tokens, "n_predict": n, "temperature": 0, "ignore_eos": n > 1}
        started = time.perf_counter()
        answer = self.http.post("/completion", json=body)
        seconds = time.perf_counter() - started
        answer.raise_for_status()
        return seconds, answer.json()

    def slot(self, action: str) -> tuple[float, dict[str, Any]]:
        """llama-server's saving and restoring of slot 0."""
        started = time.perf_counter()
        answer = self.http.post(f"/slots/0?action={action}", json={"filename": "slot.bin"})
        answer.raise_for_status()
        return time.perf_counter() - started, answer.json()

    def settle(self, timeout_s: float = 120) -> None:
        """Wait until our server has written to disk what it meant to."""
        deadline = time.monotonic() + timeout_s
        while self.http.get("/v1/cache").json()["disk"]["waiting"] and time.monotonic() < deadline:
            time.sleep(0.2)

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


@contextmanager
def running(which: Kind, folder: Path) -> Iterator[Server]:
    log = folder / f"{which.name}.log"
    server = Server(which.command, log)
    try:
        server.wait()
        server.ask(text(99, N_WARM))
        yield server
    except Exception:
        print(log.read_text(errors="replace")[-3000:])
        raise
    finally:
        server.close()


class Rows(Table):
    def row(
        self, server: Server, name: str, tokens: list[int], changed: int | None = None, before_s: float = 0
    ) -> None:
        """One question; ``changed``: where it differs from what was asked, ``before_s``: spent before it."""
        seconds, answer = server.ask(tokens)
        t, more = answer["timings"], ""
        self.data[name] = {"seconds": seconds, "before_s": before_s, **t, "gufo": answer.get("gufo")}
        if changed is not None:
            more += f"  {max(0, changed - t['cache_n'])} unchanged tokens recomputed"
        if before_s:
            more += f"  with {before_s:.2f} s for restoring the slot"
        self.say(
            f"{name:36s} {seconds + before_s:8.3f} s   {t['cache_n']:6d} reused {t['prompt_n']:6d} prefilled   "
            f"(its own clock {t['prompt_ms'] / 1e3:.3f} s){more}"
        )

    def decode(self, server: Server, tokens: list[int]) -> None:
        _, answer = server.ask(tokens, n=_N_DECODE)
        t = answer["timings"]
        self.data["decode"] = 1e3 * (t["predicted_n"] - 1) / t["predicted_ms"]
        self.say(f"decode of {_N_DECODE - 1} tokens at {len(tokens)}: {self.data['decode']:.1f} tok/s")


def conversation(which: Kind, n: int, folder: Path) -> Rows:
    table, base = Rows(), text(1, n)
    turn2 = base + text(2, 60)
    turn3 = turn2 + text(4, 60)
    with running(which, folder) as server:
        if which.name == "gufo-off":
            table.row(server, "cold", base)
            table.decode(server, base)  # cold again: nothing is reused
            return table
        table.row(server, "cold", base)
        table.row(server, "live, next turn", turn2)
        table.row(server, "another conversation", text(3, 4000))
        table.row(server, "RAM, slot was overwritten", turn3)
        table.decode(server, turn3 + text(5, 8))
        saved: dict[str, Any] = {}
        if which.by_hand:
            seconds, saved = server.slot("save")
            table.say(f"slot save {seconds:.2f} s, {saved['n_written'] / 1e9:.2f} GB")
        for name, at in edits(n).items():
            table.row(server, name, edited(base, at), changed=at)
        if not which.by_hand:
            server.settle()
            table.data["cache"] = server.http.get("/v1/cache").json()
    with running(which, folder) as server:
        seconds = server.slot("restore")[0] if which.by_hand else 0.0
        table.row(server, "disk, after a restart", turn3, before_s=seconds)
    return table


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--llama-server", type=Path, help="default: beside the native library (`make tools` builds it)")
    args = parser.parse_args()
    program = args.llama_server or Path(env.native_dir() or ".") / "llama-server"
    with place(args) as (path, folder):
        for name in args.servers.split(","):
            print(name, flush=True)
            table = conversation(kind(name, path, args.tokens + 4096, folder, program), args.tokens, folder)
            report(f"gpu-http-{name}", table.lines, table.data)


if __name__ == "__main__":
    main()
