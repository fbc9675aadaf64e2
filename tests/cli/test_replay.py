"""``gufo cache replay`` on logs of the real manager's events, several runs in a file, and broken ones."""

from __future__ import annotations

from collections import Counter
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from gufo_gguf.cache.events import CacheEvent, EventKind, EventLog, encode
from gufo_gguf.cache.replay import Replay
from gufo_gguf.cache.types import Origin
from gufo_gguf.cli.main import app
from gufo_gguf.cli.replay import table_of
from gufo_gguf.core.errors import GufoError


def gufo(*args: object) -> Result:
    return CliRunner().invoke(app, ["cache", "replay", *map(str, args)], env={"COLUMNS": "160"})


def run_of(first: int = 1) -> list[str]:
    """Two checkpoints of one conversation; the first is removed for a third, of another."""
    lines: list[str] = []
    log = EventLog(sinks=[lambda event: lines.append(encode(event) + "\n")])
    log.request = f"r{first}"
    log.emit(EventKind.PLAN, boundary=0, points=(2048, 4096), total_bytes=0)
    log.emit(EventKind.ADMIT, checkpoint=1, boundary=2048, origin=Origin.GRID, n_bytes=1000, total_bytes=1000)
    log.emit(
        EventKind.ADMIT, checkpoint=2, boundary=4096, origin=Origin.PROMPT, parent=1, n_bytes=500, total_bytes=1500
    )
    log.request = f"s{first}"
    log.emit(EventKind.REMOVE, checkpoint=1, boundary=2048, n_bytes=700, total_bytes=800, reason="covered")
    log.emit(EventKind.ADMIT, checkpoint=3, boundary=512, origin=Origin.PROMPT, n_bytes=600, total_bytes=1400)
    return lines


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "cache.jsonl"
    path.write_text("".join(run_of()), encoding="utf-8")
    return path


def test_the_set_at_the_end_and_at_a_moment(log: Path) -> None:
    end = gufo(log)
    assert end.exit_code == 0 and "after event 5 of 5: 2 checkpoints, 1.37 KiB unique" in end.output
    rows = [line.split() for line in end.output.splitlines() if line.strip()[:1].isdigit()]
    assert [row[:3] for row in rows] == [["2", "4,096", "prompt"], ["3", "512", "prompt"]]
    moment = gufo(log, "--seq", 2)
    assert "after event 2 of 5: 1 checkpoint, 1000 B" in moment.output.replace("0.98 KiB", "1000 B")


def test_the_table_fits_a_terminal_and_loses_nothing_in_a_narrow_one() -> None:
    events: list[CacheEvent] = []
    log = EventLog(sinks=[events.append])
    for _ in range(9_990):
        log.emit(EventKind.PLAN, boundary=0)
    log.emit(
        EventKind.ADMIT, checkpoint=12_345, boundary=131_072, origin=Origin.REUSED_END, parent=12_344,
        n_bytes=2_345_678_901, total_bytes=2_345_678_901,
    )  # fmt: skip
    table = table_of(Replay(events).retained())
    words = ["12345", "131,072", "reused_end", "12344", "2.18 GiB", "9991"]
    for width in (80, 24):
        out = StringIO()
        Console(file=out, width=width, force_terminal=True, color_system=None).print(table)
        lines = out.getvalue().splitlines()
        assert all(len(line) <= width for line in lines) and "…" not in out.getvalue()
        if width == 80:
            assert any(all(word in line for word in words) for line in lines), "a row on a line"
        else:
            assert Counter("".join(words)) <= Counter(out.getvalue())


def test_why_a_boundary_is_gone(log: Path) -> None:
    gone = gufo(log, "--why", 2048, "--checkpoint", 2)
    assert gone.exit_code == 0
    assert "event 4 removed checkpoint 1 (covered)" in gone.output and "made room for 512" in gone.output
    there = gufo(log, "--why", 2048, "--checkpoint", 2, "--seq", 3)
    assert "was there: checkpoint 1" in there.output
    unplanned = gufo(log, "--why", 3000, "--checkpoint", 2)
    assert "computed past it and planned 2,048, 4,096" in unplanned.output


def test_why_wants_a_conversation_when_there_are_several(log: Path) -> None:
    result = gufo(log, "--why", 2048)
    assert isinstance(result.exception, GufoError)
    said = str(result.exception)
    assert "2 conversations" in said
    assert "--checkpoint 2: up to 4,096 tokens" in said and "--checkpoint 3: up to 512 tokens" in said
    assert "checkpoint 1:" not in said, "it is part of the conversation of checkpoint 2"
    only = gufo(log, "--why", 2048, "--seq", 4)
    assert only.exit_code == 0 and "event 4 removed checkpoint 1" in only.output, "one conversation needs no name"


def test_runs_of_one_file_and_a_line_cut_by_a_crash(log: Path) -> None:
    lines = run_of(2)
    with log.open("a", encoding="utf-8") as file:
        file.write(lines[0] + lines[1] + lines[2][:20] + "\n" + "".join(run_of(3)[:3]))
    last = gufo(log)
    assert last.exit_code == 0
    assert "line 8:" in last.output and "run 3 of 3" in last.output and "after event 3 of 3" in last.output
    assert "after event 2 of 2" in gufo(log, "--run", 2).output
    assert "after event 5 of 5" in gufo(log, "--run", 1).output
    beyond = gufo(log, "--run", 4)
    assert isinstance(beyond.exception, GufoError) and "runs 1 to 3" in str(beyond.exception)


def test_a_log_that_contradicts_itself_fails(log: Path) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(encode(CacheEvent(6, EventKind.REMOVE, checkpoint=9, n_bytes=1, total_bytes=7)) + "\n")
    result = gufo(log)
    assert result.exit_code == 1 and "checkpoint 9, which is not there" in result.output


def test_files_that_are_no_logs(tmp_path: Path) -> None:
    for name, text in (("empty", ""), ("text", "hello\n"), ("binary", "\0\1\2")):
        (tmp_path / name).write_text(text, encoding="utf-8")
        result = gufo(tmp_path / name)
        assert isinstance(result.exception, GufoError) and "no events" in str(result.exception)
    missing = gufo(tmp_path / "missing")
    assert isinstance(missing.exception, GufoError) and "missing" in str(missing.exception)
    alone = gufo(tmp_path / "text", "--checkpoint", 1)
    assert isinstance(alone.exception, GufoError) and "--why" in str(alone.exception)
