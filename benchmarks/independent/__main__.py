"""Two benchmarks that others wrote, against both servers:

    python -m benchmarks.independent [--tools DIR] [--model NAME] [--context N] [--contexts K]

llama-benchy     prefill and generation at several depths, with its own prefix-caching measurement
cache-pressure   how many of K unique contexts a cache still has after all K were sent, newest first

Both come from the Python package index; they want a newer set of libraries than this project, so they are
installed on their own (``python -m venv DIR && DIR/bin/pip install llama-benchy==0.4.0 cache-pressure==0.6.3``).
What they print is kept as it is: their figures, with their definitions.  Neither reaches the network: the
text that llama-benchy would download, and a tokenizer, are served from here.
"""

from __future__ import annotations

import argparse
import http.server
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.agent.chat import prose
from benchmarks.agent.servers import Gufo, Llama, Setup
from benchmarks.common import one_line, report
from benchmarks.models import bench_model, find_program, state_of

_TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "owlet" / "tokenizer.json"
_CONFIG = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}'
_LIMIT_S = 3600


@contextmanager
def text_server() -> Iterator[str]:
    """The address of a long text of seeded words."""
    text = prose(0, "book", 600_000).encode()

    class Book(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Book)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/book.txt"
    finally:
        server.shutdown()


def run(command: list[str], folder: Path) -> list[str]:
    """What a tool printed; its own failure is shown, not raised."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HOME": str(folder), "COLUMNS": "160"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_LIMIT_S, env={**os.environ, **offline}, check=False
    )
    lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode:
        lines += [f"failed with status {done.returncode}:", *done.stderr.strip().splitlines()[-5:]]
    return lines


def llama_benchy(program: Path, url: str, folder: Path) -> list[str]:
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    shutil.copy(_TOKENIZER, tokenizer / "tokenizer.json")
    (tokenizer / "tokenizer_config.json").write_text(_CONFIG)
    with text_server() as book:
        command = [str(program), "--base-url", f"{url}/v1", "--model", "default", "--tokenizer", str(tokenizer)]
        command += ["--book-url", book, "--pp", "512", "--tg", "32", "--exact-tg", "--depth", "0", "2048"]
        command += ["--runs", "3", "--enable-prefix-caching", "--skip-coherence", "--latency-mode", "none"]
        return run(command, folder)


def cache_pressure(program: Path, url: str, folder: Path, context: int, contexts: int) -> list[str]:
    command = [str(program), "--base-url", f"{url}/v1", "--model", "default", "--context-tokens", str(context)]
    command += ["--kv-size", str(context * contexts), "--num-contexts", str(contexts)]
    return run([*command, "--output", str(folder / "pressure.json")], folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, help="folder with the two programs; default: PATH")
    parser.add_argument("--model", default="qwen4exp")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=1500, help="tokens of each context of cache-pressure")
    parser.add_argument("--contexts", type=int, default=12, help="how many; half of them fit the budget")
    args = parser.parse_args(arguments)
    where = None if args.tools is None else str(args.tools)
    programs = {name: shutil.which(name, path=where) for name in ("llama-benchy", "cache-pressure")}
    missing = [name for name, path in programs.items() if path is None]
    if missing:
        print(f"{' and '.join(missing)} not found; see --help", file=sys.stderr)
        return 1
    model = bench_model(args.model)
    budget = args.contexts // 2 * state_of(model).whole(args.context + 64)
    setup = Setup(model, 8192, 1, args.threads, budget)
    peers = [lambda best=best: Llama(setup, find_program("llama-server"), best=best) for best in (False, True)]
    lines: list[str] = []
    for make in (lambda: Gufo(setup), *peers):
        for tool, program in programs.items():
            server = make()
            with tempfile.TemporaryDirectory() as temporary:
                try:
                    server.start()
                    url, folder = server.http.base, Path(temporary)
                    if tool == "llama-benchy":
                        said = llama_benchy(Path(str(program)), url, folder)
                    else:
                        said = cache_pressure(Path(str(program)), url, folder, args.context, args.contexts)
                finally:
                    server.stop()
            lines += [f"-- {tool}, {server.name}", *said]
    report("independent", lines, {"model": model.stem, "budget_bytes": budget, "said": lines})
    return 0


if __name__ == "__main__":
    sys.exit(one_line(main))
