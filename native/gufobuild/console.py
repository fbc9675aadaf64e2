"""What a person sees of long commands: numbered steps, one moving line, and the log when it fails.

The full output goes to a log file; printing 300 compiler lines would bury the one that matters.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from .errors import BuildError

LOG_TAIL_LINES = 60
_REPEAT_S = 10.0
"""Without a terminal a progress line is printed this often, not at every change."""


STEPS = 7
"""Of a first `make`: 1 to 3 make the environment (venv.py), 4 to 7 the libraries (native.py)."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def step(number: int, text: str) -> None:
    """Announce a step of the one count that both commands share; finished ones are not announced again."""
    assert 1 <= number <= STEPS
    say(f"[{number}/{STEPS}] {text}")


class Progress:
    """One line that moves on a terminal, and appears now and then in a log."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._tty = self._stream.isatty()
        self._start = time.monotonic()
        self._last = self._start
        self._width = 0

    def update(self, text: str) -> None:
        now = time.monotonic()
        elapsed = int(now - self._start)
        if self._tty:
            line = f"    {self._label}: {text}  {elapsed // 60}:{elapsed % 60:02d}"[: _columns() - 1]
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        elif now - self._last >= _REPEAT_S:
            self._last = now
            self._stream.write(f"    {self._label}: {text}  {elapsed // 60}:{elapsed % 60:02d}\n")
        self._stream.flush()

    def clear(self) -> None:
        if self._tty and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 100


def run_logged(
    command: Sequence[str],
    log: Path,
    label: str,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    summarize: Callable[[str], str | None] = lambda line: None,
    rewrite: Callable[[str], str] = lambda line: line,
    pass_fds: Sequence[int] = (),
    advice: str = "",
) -> None:
    """Run a command with its output appended to ``log``; BuildError with the log's end when it fails.

    ``summarize`` turns an output line into the text of the progress line, None = not interesting;
    ``rewrite`` is applied to every line first.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    progress = Progress(label)
    tail: list[str] = []
    try:
        with log.open("a", encoding="utf-8", buffering=1) as sink:
            sink.write(f"$ {' '.join(command)}\n")
            sink.flush()
            child = subprocess.Popen(
                command,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=tuple(pass_fds),
            )
            assert child.stdout is not None
            try:
                for raw in child.stdout:
                    line = rewrite(raw)
                    sink.write(line)
                    tail = [*tail[-(LOG_TAIL_LINES - 1) :], line]
                    text = summarize(line)
                    if text is not None:
                        progress.update(text)
                status = child.wait()
            except BaseException:
                child.terminate()
                child.wait()
                raise
    except FileNotFoundError as error:
        raise BuildError(f"cannot run {command[0]}: {error.strerror}") from error
    finally:
        progress.clear()
    if status != 0:
        shown = "".join(tail).rstrip()
        hint = f"\n{advice}" if advice else ""
        raise BuildError(f"{shown}\n\n{label} failed (exit status {status}); the whole output is in {log}{hint}")
