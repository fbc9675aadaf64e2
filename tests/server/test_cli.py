"""``gufo serve`` as a process: what it prints, how it fails, how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import typer
from typer.testing import CliRunner

from gufo_gguf.cli.flags import read_keys
from gufo_gguf.cli.main import app
from gufo_gguf.core.errors import ConfigError
from tests.conftest import TinyModel


def gufo(*args: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gufo_gguf.cli.main", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def assert_one_clear_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("gufo: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    for word in words:
        assert word in lines[0]


def test_other_commands_do_not_load_the_http_server() -> None:
    code = "import sys, gufo_gguf.cli.main; sys.exit(bool({'fastapi', 'uvicorn', 'pydantic'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_flag_is_there() -> None:
    command = typer.main.get_command(app)
    names = {name for p in command.commands["serve"].params for name in p.opts}  # type: ignore[attr-defined]
    flags = "--host --port --ctx-size -c --sessions -j --threads --batch-size --ubatch-size --n-gpu-layers"
    flags += " --cache-type-k --cache-type-v --seed --alias --no-cache --cache-ram-bytes --cache-log --api-key"
    flags += " --swa-full --chat-template-file"
    assert set(flags.split()) <= names


def test_wrong_flags_are_usage_errors() -> None:
    runner = CliRunner()
    for args in (["--port", "99999"], ["--sessions", "0"], ["--no-such-flag"], ["--temp", "-1"]):
        result = runner.invoke(app, ["serve", "m.gguf", *args])
        assert result.exit_code == 2 and "Traceback" not in result.output


def test_keys_from_flags_and_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-c\n\n  sk-a \n", encoding="utf-8")
    assert read_keys(["sk-a,sk-b"], file) == ("sk-a", "sk-b", "sk-c")
    assert read_keys([], None) == ()
    with pytest.raises(ConfigError, match="--api-key-file"):
        read_keys([], tmp_path / "missing")
    file.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no key"):
        read_keys([], file)


def test_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert_one_clear_line(gufo("serve", "m.gguf", "--port", taken.getsockname()[1]), "cannot listen", "--port")


def test_unreadable_template_is_one_line(tmp_path: Path) -> None:
    done = gufo("serve", "m.gguf", "--port", 0, "--chat-template-file", tmp_path / "none.jinja")
    assert_one_clear_line(done, "--chat-template-file")


@pytest.mark.native
def test_files_that_are_no_models(tmp_path: Path, tiny_model: TinyModel) -> None:
    assert_one_clear_line(gufo("serve", tmp_path / "none.gguf", "--port", 0), "none.gguf")
    text = tmp_path / "text.gguf"
    text.write_bytes(b"hello, this is no model")
    assert_one_clear_line(gufo("serve", text, "--port", 0), "text.gguf", "GGUF")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_model("llama").read_bytes()[:200_000])
    assert_one_clear_line(gufo("serve", cut, "--port", 0), "cut.gguf")


def test_words_that_requests_would_be_refused_for_are_refused_at_the_start() -> None:
    assert_one_clear_line(gufo("serve", "m.gguf", "--port", 0, "--reasoning-format", "maybe"), "--reasoning-format")
    assert_one_clear_line(gufo("serve", "m.gguf", "--port", 0, "--reasoning", "maybe"), "--reasoning")


def test_context_beyond_counting_is_one_line() -> None:
    assert_one_clear_line(gufo("serve", "m.gguf", "--port", 0, "-c", 2_000_000_000, "-j", 64), "--ctx-size")


@pytest.mark.native
def test_settings_the_engine_refuses(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    assert_one_clear_line(gufo("serve", model, "--port", 0, "--cache-type-k", "f99"), "--cache-type-k", "f99")


class Process:
    """A running ``gufo serve``."""

    def __init__(self, *args: object) -> None:
        command = [sys.executable, "-m", "gufo_gguf.cli.main", "serve", *map(str, args)]
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=self.err.extend, args=(self._child.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self.out.append(line)
            found = re.search(r"http://\S+", line)
            if found:
                self.url = found.group()
                return
        raise AssertionError(f"it ended: {''.join(self.err)}")

    def signal(self, number: int) -> None:
        os.kill(self._child.pid, number)

    def wait(self) -> int:
        code = self._child.wait(60)
        assert self._child.stdout is not None
        self.out += self._child.stdout.readlines()
        for reader in self._readers:
            reader.join(10)
        return code

    def kill(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait(10)


@pytest.fixture
def process(tiny_model: TinyModel) -> Iterator[Process]:
    made = Process(
        tiny_model("qwen4exp"), "--port", 0, "-c", 2048, "-t", 1, "--alias", "tiny", "--api-key", "sk-walrus"
    )
    yield made
    made.kill()


@pytest.mark.native
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_address_is_printed_last_and_a_signal_ends_it(process: Process, number: int) -> None:
    headers = {"Authorization": "Bearer sk-walrus"}
    assert httpx.get(process.url + "/health").json() == {"status": "ok"}
    assert httpx.get(process.url + "/v1/models", headers=headers).json()["data"][0]["id"] == "tiny"
    body = {"prompt": "the code word is narwhal", "max_tokens": 4}
    assert httpx.post(process.url + "/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
    process.signal(number)
    assert process.wait() == 0
    assert process.out[-1].strip().endswith(process.url)
    sizes = (
        r"tiny: \d sessions? of 2,048 tokens; the cache may take .* of RAM, nothing outlives a stop \(--cache-disk\)"
    )
    assert re.fullmatch(sizes, process.out[-2].strip())
    logs = "".join(process.err)
    assert "Traceback" not in logs
    assert "narwhal" not in logs and "walrus" not in logs
    assert "stopping: nothing runs" in logs


@pytest.mark.native
def test_signal_ends_open_streams_within_bounds(process: Process) -> None:
    headers = {"Authorization": "Bearer sk-walrus"}
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "ignore_eos": True, "max_tokens": -1}
    with httpx.stream("POST", process.url + "/v1/chat/completions", json=body, headers=headers, timeout=60) as stream:
        texts = stream.iter_text()
        next(texts)
        process.signal(signal.SIGTERM)
        process.signal(signal.SIGTERM)  # a second one does not wait for the answer
        rest = "".join(texts)
    assert process.wait() == 0
    assert "[DONE]" in rest
    assert "stopping: 1 request is under way and may take 5 s more" in "".join(process.err)
