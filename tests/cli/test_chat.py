"""``gufo chat`` against a server and with a model of its own, driven as a pipe and as a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from gufo_gguf.cli.main import app
from gufo_gguf.cli.talk import Figures, cache_line, figures_from
from gufo_gguf.core.errors import GufoError
from gufo_gguf.server.settings import ServerSettings
from tests.conftest import TinyModel
from tests.server.conftest import Running, running_server
from tests.server.standin import StandinEngine


def test_the_line_under_an_answer() -> None:
    warm = Figures(5200, 5000, "ram", None, 12.4, 830.0, 40, 800.0, (5100, 5200))
    assert cache_line(warm) == (
        "5,200 prompt tokens · 5,000 from ram in 12 ms · 200 computed in 830 ms · kept at 5,100, 5,200"
        " · 40 generated at 50.0/s"
    )
    cold = Figures(5200, 0, "none", "prefix_changed", 0.0, 12_345.0, 0, 0.0, ())
    assert cache_line(cold) == (
        "5,200 prompt tokens · none reused (prefix changed) · 5,200 computed in 12.3 s · 0 generated"
    )


def test_figures_of_a_server_that_says_little() -> None:
    assert figures_from({}, {}) is None
    found = figures_from({"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": None}, {})
    assert found is not None and (found.prompt_n, found.cached_n, found.captured) == (9, 0, ())


@pytest.fixture
def server() -> Iterator[Running]:
    engine = StandinEngine(script=lambda request: ["<think>hm", "</think>", "You said ", f"{len(request.tokens)}."])
    with running_server(engine, ServerSettings(port=0, drain_s=0.2)) as running:
        yield running


def pipe(server: Running, text: str, *args: str) -> Result:
    return CliRunner().invoke(app, ["chat", "--url", server.url, *args], input=text)


def prompts(server: Running) -> list[str]:
    return [server.engine.vocab.detokenize(r.tokens.tolist()).decode() for r in server.engine.requests]


def test_each_line_is_a_turn_of_one_conversation(server: Running) -> None:
    result = pipe(server, "one\ntwo \\\nlines\n", "--system", "be brief", "--temp", "0", "-n", "9")
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r"You said \d+\.\nYou said \d+\.\n", result.output), "answers alone, no reasoning"
    first, second = prompts(server)
    assert "be brief" in first and "one" in first and "two" not in first
    assert "one" in second and "You said" in second and "two \nlines" in second
    assert server.engine.requests[0].max_tokens == 9 and server.engine.requests[0].sampling.temperature == 0


def test_commands(server: Running) -> None:
    result = pipe(
        server,
        "one\n/undo\ntwo\n/retry\n/edit three\n/keep\nfour\n/back\nfive\n/nonsense\n/undo\n/undo\n/help\n/quit\nsix\n",
    )
    assert result.exit_code == 0, result.output
    asked = [re.findall(r"user\n(\w+)<", text) for text in prompts(server)]
    assert asked == [["one"], ["two"], ["two"], ["three"], ["three", "four"], ["three", "five"]]
    for words in ("taken back", "remembered", "back", "no /nonsense", "nothing to take back", "Ctrl-D"):
        assert words in result.output


def test_failures_are_one_clear_error(server: Running) -> None:
    both = CliRunner().invoke(app, ["chat", "m.gguf", "--url", server.url])
    assert isinstance(both.exception, GufoError) and "not both" in str(both.exception)
    server.engine.full = True
    full = pipe(server, "hello\n")
    assert isinstance(full.exception, GufoError) and "503" in str(full.exception)


def in_terminal(*args: object, keys: str) -> str:
    """What a person sees: the command on a pseudo-terminal, keys typed at each prompt."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "gufo_gguf.cli.main", "chat", *map(str, args)]
    child = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "dumb", "COLUMNS": "200"}
    )
    os.close(slave)
    seen, lines = "", iter(keys.splitlines())
    prompts_seen = 0
    try:
        while True:
            try:
                data = os.read(master, 4096)
            except OSError:
                break
            if not data:
                break
            seen += data.decode("utf-8", "replace")
            if seen.count("> ") > prompts_seen:
                prompts_seen = seen.count("> ")
                line = next(lines, None)
                os.write(master, b"\x04" if line is None else (line + "\n").encode())
        assert child.wait(60) == 0, seen
    finally:
        os.close(master)
        if child.poll() is None:
            child.kill()
            child.wait(10)
    return seen


def test_a_person_sees_the_cache_under_each_answer(server: Running) -> None:
    seen = in_terminal("--url", server.url, keys="one\ntwo")
    assert "standin: /help" in seen and len(re.findall(r"\d+ prompt tokens · ", seen)) == 2
    assert re.search(r"· [\d,]+ from ram", seen), seen


@pytest.mark.native
def test_a_model_of_its_own(tiny_model: TinyModel) -> None:
    command = [sys.executable, "-m", "gufo_gguf.cli.main", "chat", str(tiny_model("qwen4exp")), "-c", "1024", "-t", "1"]
    command += ["-n", "6", "--temp", "0", "--cache-ram-bytes", "32M", "--system", "You are terse. " * 20]
    text = "Hello?\n/keep\nAnd then?\n/back\nAnd then?\n/cache\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"kept [\d,]+ of [\d,]+ tokens\n", done.stdout), done.stdout
    assert re.search(r"tokens  frontier ", done.stdout) and "RAM " in done.stdout
    first, second = done.stdout.split("tokens\n", 1)[1].split("back\n")
    assert second.startswith(first), "the same place, greedily, gives the same answer"
