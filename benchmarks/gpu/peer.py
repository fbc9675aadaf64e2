"""The article's conversation asked of llama-server, from the same libraries, with its defaults.

    python -m benchmarks.gpu.peer [--server FOLDER/llama-server] [--tokens 95439] [--model FILE]

One slot, its own checkpoints and its own --cache-ram; for the row after a restart its slot save and
restore, called by hand as its users must.  Times are the client's, from request to answer of one
token: what llama-server does before it starts its own clock (loading a prompt from RAM) counts.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common import median, report
from benchmarks.gpu.load import N_WARM, arguments, edited, edits, place, text
from gufo_gguf.core import env

_START_S = 180
_DECODE = 64


class Server:
    """One llama-server process and a client of it."""

    def __init__(self, program: Path, model: Path, n_ctx: int, slots: Path, log: Path) -> None:
        port = 18_000 + os.getpid() % 1000
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600)
        command = [program, "--model", model, "--ctx-size", n_ctx, "--parallel", 1, "--slot-save-path", slots]
        command += ["--port", port, "--no-webui"]
        self._log = log.open("ab")
        self.process = subprocess.Popen([str(part) for part in command], stdout=self._log, stderr=self._log)

    def wait(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise RuntimeError(f"llama-server did not start; see {self._log.name}")

    def ask(self, tokens: list[int], n: int = 1) -> tuple[float, dict[str, Any]]:
        """(seconds as the client sees them, llama-server's own timings)."""
        started = time.perf_counter()
        answer = self.http.post(
            "/completion", json={"prompt": tokens, "n_predict": n, "temperature": 0, "ignore_eos": n > 1}
        )
        answer.raise_for_status()
        return time.perf_counter() - started, answer.json()["timings"]

    def slot(self, action: str) -> tuple[float, dict[str, Any]]:
        started = time.perf_counter()
        answer = self.http.post(f"/slots/0?action={action}", json={"filename": "slot.bin"})
        answer.raise_for_status()
        return time.perf_counter() - started, answer.json()

    def rss(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


@contextmanager
def server(program: Path, model: Path, n_ctx: int, folder: Path) -> Iterator[Server]:
    running = Server(program, model, n_ctx, folder, folder / "server.log")
    try:
        running.wait()
        running.ask(text(99, N_WARM))
        yield running
    except Exception:
        print((folder / "server.log").read_text(errors="replace")[-3000:])
        raise
    finally:
        running.close()


def conversation(program: Path, model: Path, n: int, folder: Path) -> tuple[list[str], dict[str, Any]]:
    lines: list[str] = []
    data: dict[str, Any] = {}
    base = text(1, n)
    turn2 = base + text(2, 60)
    turn3 = turn2 + text(4, 60)

    def say(line: str) -> None:
        lines.append(line)
        print("  ... " + line, flush=True)

    def row(name: str, tokens: list[int], more: str = "", before_s: float = 0.0) -> dict[str, Any]:
        seconds, timings = running.ask(tokens)
        data[name] = {"seconds": seconds, "before_s": before_s, **timings}
        say(
            f"{name:36s} {seconds + before_s:8.3f} s   {timings['cache_n']:6d} reused "
            f"{timings['prompt_n']:6d} prefilled   (its own clock {timings['prompt_ms'] / 1e3:.3f} s){more}"
        )
        return timings

    with server(program, model, n + 4096, folder) as running:
        at_start = running.rss()
        row("cold", base)
        after_cold = running.rss()
        row("live, next turn", turn2)
        row("another conversation", text(3, 4000))
        row("RAM, slot was overwritten", turn3)
        grown = [(n_bytes - at_start) / 1e9 for n_bytes in (after_cold, running.rss())]
        say(f"host memory: {grown[0]:.2f} GB after cold, {grown[1]:.2f} GB now")
        data["decode"] = _decode_rate(running, turn3)
        say(f"decode {data['decode']:.1f} tok/s")
        save_s, saved = running.slot("save")
        say(f"slot save {save_s:.2f} s, {saved['n_written'] / 1e9:.2f} GB")
        for name, at in edits(n).items():
            timings = row(name, edited(base, at))
            lines[-1] += f"  {max(0, at - timings['cache_n'])} unchanged tokens recomputed"
    with server(program, model, n + 4096, folder) as running:
        restore_s, restored = running.slot("restore")
        say(f"slot restore {restore_s:.2f} s, {restored['n_read'] / 1e9:.2f} GB")
        row("slot file, after a restart", turn3, f"  with the restore's {restore_s:.2f} s", before_s=restore_s)
    data |= {"save_s": save_s, "restore_s": restore_s, "file_bytes": saved["n_written"]}
    return lines, data


def _decode_rate(running: Server, tokens: list[int]) -> float:
    rates = []
    for i in range(3):
        _, timings = running.ask(tokens + text(50 + i, 8), n=_DECODE)
        rates.append(1e3 * (timings["predicted_n"] - 1) / timings["predicted_ms"])
    return median(rates)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--server", type=Path, help="default: beside the native library (`make tools` builds it)")
    args = parser.parse_args()
    program = args.server or Path(env.native_dir() or ".") / "llama-server"
    with place(args) as (path, folder):
        report("gpu-peer", *conversation(program, path, args.tokens, folder))


if __name__ == "__main__":
    main()
