"""``gufo demo``: the session it plays, what its table says, and a short run against real servers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from gufo_gguf.cache.types import Origin
from gufo_gguf.cli.agent_session import NOTES, Request, Restart, session
from gufo_gguf.cli.demo import _ORIGINS, Row, play, summary, table_of, why
from gufo_gguf.cli.talk import Figures
from gufo_gguf.core.errors import GufoError
from gufo_gguf.models.default import owlet


def figures(prompt_n: int, cached_n: int, source: str, miss: str | None = None) -> Figures:
    return Figures(prompt_n, cached_n, source, miss, 1.0, 50.0, 4, 20.0, ())


def played(answer: dict[str, Any]) -> list[Request | Restart]:
    """All steps of a short session in which every answer is the same."""
    script, steps = session(2, 20, 1), []
    step: Request | Restart = next(script)
    while True:
        steps.append(step)
        try:
            step = script.send(answer)
        except StopIteration:
            return steps


def test_every_checkpoint_that_a_client_can_meet_has_words() -> None:
    assert set(_ORIGINS) == {str(origin) for origin in Origin} - {"frontier"}, "that one is the Python API's"


def test_the_session_is_one_conversation_an_edit_and_two_subagents() -> None:
    steps = played({"role": "assistant", "content": "Hm."})
    asked = [s for s in steps if isinstance(s, Request)]
    assert sum(isinstance(s, Restart) for s in steps) == 1
    for request in asked:
        assert request.messages[0] == asked[0].messages[0], "all have one system prompt"
        assert request.messages[-1]["role"] in ("user", "tool")
    main = [s for s in asked if "subagent" not in s.title]
    edit = next(i for i, s in enumerate(main) if "edit" in s.title)
    for before, after in pairwise(main[:edit]):
        assert after.messages[: len(before.messages)] == before.messages
    assert main[edit].messages[:-1] == main[edit - 1].messages[: len(main[edit].messages) - 1]
    for request in asked:
        if request.expected is not None:
            assert request.expected in "".join(str(m["content"]) for m in request.messages), "it was read before"


def test_the_script_calls_the_tool_when_the_model_does_not() -> None:
    result = played({"role": "assistant", "content": "Hm."})[1]
    assert isinstance(result, Request)
    assert result.messages[-2]["tool_calls"][0]["function"]["name"] == "read_file"
    own = {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": {"name": "f"}}]}
    result = played(own)[1]
    assert isinstance(result, Request)
    assert result.messages[-2] is own and result.messages[-1]["tool_call_id"] == "x"


def test_files_are_this_packages_own_with_the_note_inside() -> None:
    for note in NOTES:
        text = note.text(40)
        assert note.value in text and text.count("\n") == 40
        assert note.value not in (Path(__file__).parents[2] / "gufo_gguf" / note.path).read_text(encoding="utf-8")


def test_why_in_words() -> None:
    origins = {900: "learned"}
    assert why(figures(1000, 900, "ram"), origins) == "checkpoint in RAM: where conversations parted"
    assert why(figures(1000, 900, "live"), origins) == "the slot still held it"
    assert why(figures(1000, 0, "none", "no_checkpoint"), origins) == "nothing known starts like this"
    assert why(figures(1000, 0, "none", "identity"), origins) == "identity"


def test_table_and_summary() -> None:
    rows = [
        Row("first", figures(1000, 0, "none"), "new", 900.0, 950.0, "[red]ok", None),
        Row("restart", None),
        Row("again", figures(1100, 1000, "disk"), "checkpoint", 90.0, 1100.0, "kea", "kea"),
        Row("wrong", figures(1200, 1100, "ram"), "checkpoint", 90.0, 1200.0, "owl", "kea"),
    ]
    out = StringIO()
    Console(file=out, width=200).print(table_of(rows, True))
    lines = out.getvalue().splitlines()
    again = next(line for line in lines if "again" in line)
    assert re.split("  +", again.strip()) == ["again", "1,100", "1,000", "100", "90 ms", "1.10 s", "checkpoint", "kea"]
    assert any("[red]ok" in line for line in lines), "an answer is no markup"
    narrow = StringIO()
    Console(file=narrow, width=80).print(table_of(rows, True, narrow=True))
    again = next(line for line in narrow.getvalue().splitlines() if "again" in line)
    assert re.split("  +", again.strip()) == ["again", "1,000", "100", "90 ms", "1.10 s", "checkpoint"]
    assert "3,300 prompt tokens, 2,100 reused, 1,200 prefilled" in summary(rows)
    assert "1 of 2 facts" in summary(rows) and "cache off 3.25 s" in summary(rows)


@pytest.mark.native
def test_a_server_that_cannot_start_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"no model")
    with pytest.raises(GufoError, match=r"did not start: gufo: .*m\.gguf"):
        play(tmp_path / "m.gguf", session(2, 20, 1), print, baseline=False)


@pytest.mark.native
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("after", ["starting", "forked", "1 "])
def test_a_signal_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, after: str) -> None:
    """Told to end while a server loads, as soon as its process exists, and while the session runs."""
    command = [sys.executable, "-m", "gufo_gguf.cli.main", "demo", "--no-baseline", "--threads", "1"]
    child = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        # a shell that runs a test in the background has it ignore SIGINT, and children inherit that
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    assert child.stderr is not None
    if after == "forked":
        while not psutil.Process(child.pid).children():
            time.sleep(0.0005)
    for line in child.stderr:
        if after == "forked" or line.strip().startswith(after.strip()):
            break
    started = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(number)
    child.stderr.read()
    assert child.wait(60) == (130 if number == signal.SIGINT else 128 + number)
    assert list(tmp_path.iterdir()) == []
    assert not [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.native
@pytest.mark.slow
def test_a_short_session() -> None:
    rows: list[Row] = []
    play(owlet(), session(2, 20, 3), rows.append, threads=1)
    asked = [row for row in rows if row.figures is not None]
    assert len(asked) == len(rows) - 1
    assert all(row.answer == row.expected for row in asked if row.expected is not None)
    by_title = {row.title: row.figures for row in asked if row.figures is not None}
    after = by_title["question after the restart"]
    assert after.source == "disk" and after.cached_n > 0.8 * after.prompt_n
    second = by_title["subagent 2: same system prompt and tools"]
    assert second.source == "ram" and second.cached_n > 0.9 * second.prompt_n
    for row in asked[1:]:
        assert row.figures is not None and row.first_token_cold_ms is not None
        assert row.figures.cached_n > 0
