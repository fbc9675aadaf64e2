"""``gufo demo``: an agent's session against two servers, one with the cache and one without.

Every request goes to both, one after the other, so that neither slows the other down.  The time to
the first token is taken at the client: all of the request but the generation that the server reports.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gufo_gguf.cli.agent_session import TOOLS, Message, Request, Restart, Session, session
from gufo_gguf.cli.client import Client
from gufo_gguf.cli.console import plain_table, print_table
from gufo_gguf.cli.flags import option, variable_of
from gufo_gguf.cli.talk import Figures, figures_from
from gufo_gguf.core.errors import GufoError
from gufo_gguf.models.default import model_path

if TYPE_CHECKING:
    from rich.table import Table

_ANSWER_TOKENS = 32
_START_S, _STOP_S = 120.0, 30.0
_CONTEXT = 12_288
_WIDE = 110
"""Columns of a terminal from which on everything is shown."""
Origins = dict[int, str]
"""Boundaries that checkpoints were left at -> why."""


def demo(
    model: Annotated[
        str | None,
        typer.Argument(help="A GGUF file, or a name: owlet, smollm2.", show_default="owlet", envvar="GUFO_MODEL"),
    ] = None,
    threads: Annotated[int, option("--threads", "-t", min=0, help="0 = physical cores.")] = 0,
    files: Annotated[int, option("--files", min=2, max=4, help="Files that the agent reads.")] = 3,
    lines: Annotated[int, option("--lines", min=20, max=400, help="Lines of each.")] = 80,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline/--no-baseline", help="Play it also with the cache off.", envvar=variable_of("--baseline")
        ),
    ] = True,
) -> None:
    """Play an agent's session, with the cache and without, and show what was reused and why."""
    from rich.console import Console
    from rich.live import Live

    path = model_path(model)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _leave)
    console = Console()
    rows: list[Row] = []
    typer.echo("starting a server with the cache" + (" and one without" if baseline else ""), err=True)
    if console.is_terminal:
        narrow = console.width < _WIDE
        with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:

            def show(row: Row) -> None:
                rows.append(row)
                live.update(table_of(rows, baseline, narrow=narrow), refresh=True)

            play(path, session(files, lines), show, threads=threads, baseline=baseline)
    else:  # the table is printed once, at the end

        def tell(row: Row) -> None:
            rows.append(row)
            typer.echo(f"{len(rows):3} {row.title}", err=True)

        play(path, session(files, lines), tell, threads=threads, baseline=baseline)
        print_table(table_of(rows, baseline), console)
    console.print(summary(rows), soft_wrap=True)


_waiting: list[int] | None = None
"""Signals that came while one has to wait; None: they act at once."""


def _leave(number: int, frame: object) -> None:
    """A signal as an exception: servers are stopped and the folder is removed on the way out."""
    signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt that
    if _waiting is not None:
        _waiting.append(number)
        return
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """For steps that must not be left half done: a process that was started must be known to who ends it."""
    global _waiting
    _waiting = came = []
    try:
        yield
    finally:
        _waiting = None
    for number in came:
        _leave(number, None)


@dataclass(frozen=True, slots=True)
class Row:
    """One request as both servers took it; times in milliseconds."""

    title: str
    figures: Figures | None
    """None: not a request but a restart."""
    why: str = ""
    first_token_ms: float = 0.0
    first_token_cold_ms: float | None = None
    answer: str = ""
    expected: str | None = None


# -- servers -------------------------------------------------------------------------------------
class Server:
    """A ``gufo serve`` in a process of its own."""

    _child: subprocess.Popen[str] | None = None

    def __init__(self, model: Path, log: Path, *flags: object) -> None:
        command = [sys.executable, "-m", "gufo_gguf.cli.main", "serve", str(model), "--port", "0", *map(str, flags)]
        command += ["--config", os.devnull]  # the session is the same whatever file lies here
        self._log = log
        try:
            with _signals_wait(), log.open("ab") as err:
                self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True)
            where = self._address()
        except BaseException:  # nobody else knows of the process yet
            self.stop()
            raise
        if where is not None:
            self.client = Client(where)
            return
        assert self._child is not None
        self._child.wait()
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise GufoError(f"the server did not start: {said[-1] if said else 'it said nothing'}")

    def _address(self) -> str | None:
        """What the server says once it listens; None when it ended instead."""
        assert self._child is not None and self._child.stdout is not None
        for line in self._child.stdout:
            at = line.find("http://")
            if at >= 0:
                return line[at:].split()[0]
        return None

    def stop(self) -> None:
        """SIGTERM, as a service manager would; idempotent."""
        if self._child is None:
            return
        if self._child.poll() is None:
            os.kill(self._child.pid, signal.SIGTERM)
            try:
                self._child.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()


@dataclass(frozen=True, slots=True)
class Reply:
    message: Message
    figures: Figures
    origins: Origins
    """Of the checkpoints that this request left."""
    first_token_ms: float


def ask(client: Client, messages: list[Message]) -> Reply:
    """A greedy answer.  GufoError when the server fails or gives no figures."""
    body = {
        "model": "any", "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": _ANSWER_TOKENS,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer: Message = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    started = time.perf_counter()
    for event in client.stream("/v1/chat/completions", body):
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            answer["content"] += delta.get("content") or ""
            _join(calls, delta.get("tool_calls") or ())
        usage, timings = event.get("usage") or usage, event.get("timings") or timings
    took_ms = 1e3 * (time.perf_counter() - started)
    figures = figures_from(usage, timings)
    if figures is None:
        raise GufoError("the server gave no usage with its answer")
    if calls:
        answer |= {"content": answer["content"] or None, "tool_calls": calls}
    captured = (usage.get("gufo") or {}).get("captured") or ()
    origins = {c["boundary"]: c["origin"] for c in captured}
    return Reply(answer, figures, origins, max(0.0, took_ms - figures.generated_ms))


def _join(calls: list[dict[str, Any]], deltas: Any) -> None:
    """Add the pieces of tool calls in a stream to what is there of them."""
    for delta in deltas:
        while len(calls) <= delta["index"]:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call, function = calls[delta["index"]], delta.get("function") or {}
        call["id"] = delta.get("id") or call["id"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""


# -- the session ---------------------------------------------------------------------------------
@contextmanager
def _servers(model: Path, threads: int, baseline: bool) -> Iterator[tuple[Callable[[], Server], Server | None]]:
    """(start the one with the cache, the one without)."""
    common = ("-t", threads, "-c", _CONTEXT, "-ub", 256)
    with tempfile.TemporaryDirectory(prefix="gufo-demo-") as folder:
        log, disk = Path(folder, "log"), Path(folder, "cache")
        started: list[Server] = []

        def start(*flags: object) -> Server:
            started.append(Server(model, log, *common, *flags))
            return started[-1]

        try:
            cold = start("--no-cache") if baseline else None
            yield (lambda: start("--cache-disk", disk)), cold
        finally:
            for server in started:
                server.stop()


def play(model: Path, script: Session, show: Callable[[Row], None], *, threads: int = 0, baseline: bool = True) -> None:
    """Carry out a session; ``show`` gets each row as soon as it is known.  GufoError when a server fails."""
    origins: Origins = {}
    with _servers(model, threads, baseline) as (start, cold):
        warm = start()
        step = next(script)
        while True:
            answer: Message = {}
            if isinstance(step, Restart):
                warm.stop()
                warm = start()
                show(Row(step.title, None))
            else:
                reply = ask(warm.client, step.messages)
                cold_ms = None if cold is None else ask(cold.client, step.messages).first_token_ms
                show(_row(step, reply, why(reply.figures, origins), cold_ms))
                origins |= reply.origins
                answer = reply.message
            try:
                step = script.send(answer)
            except StopIteration:
                return


def _row(step: Request, reply: Reply, reason: str, cold_ms: float | None) -> Row:
    calls = [call["function"] for call in reply.message.get("tool_calls") or ()]
    text = " ".join(f"{f['name']}({f['arguments']})" for f in calls) or reply.message["content"]
    words = " ".join(str(text).split())
    return Row(step.title, reply.figures, reason, reply.first_token_ms, cold_ms, words, step.expected)


_SOURCES = {
    "live": "the slot still held it",
    "ram": "checkpoint in RAM",
    "disk": "checkpoint on disk",
}
_ORIGINS = {
    "prompt": "end of what the next turn sends again",
    "retry": "end of the same prompt",
    "reused_end": "end of an earlier reuse",
    "grid": "grid",
    "system": "end of tools and system prompt",
    "learned": "where conversations parted",
    "parting": "where another conversation took the slot",
}
_MISSES = {
    "no_checkpoint": "nothing known starts like this",
    "prefix_changed": "known, but parts before any checkpoint",
    "evicted": "was evicted",
}


def why(figures: Figures, origins: Origins) -> str:
    """In words: where the reused tokens came from, or why there were none."""
    if not figures.cached_n:
        return _MISSES.get(figures.miss_reason or "", (figures.miss_reason or "").replace("_", " "))
    words = _SOURCES.get(figures.source, figures.source)
    origin = origins.get(figures.cached_n)
    return words if origin is None or figures.source == "live" else f"{words}: {_ORIGINS.get(origin, origin)}"


# -- what is shown -------------------------------------------------------------------------------
def table_of(rows: list[Row], baseline: bool, *, narrow: bool = False) -> Table:
    """``narrow``: without prompt and answer, so that the rest stays readable on 80 columns."""
    times = ["first token>", *(["cache off>"] if baseline else [])]
    table = plain_table("request", *([] if narrow else ["prompt>"]), "reused>", "prefilled>", *times, "why")
    for column in table.columns[1:-1]:
        column.no_wrap = True
    if not narrow:
        table.add_column("answer", overflow="fold")
    for row in rows:
        cells = _cells(row, baseline)
        table.add_row(*([cells[0], *cells[2:-1]] if narrow else cells))
    return table


def _cells(row: Row, baseline: bool) -> list[str]:
    from rich.markup import escape

    f = row.figures
    if f is None:
        return [f"[bold]{escape(row.title)}[/]"]
    answer = escape(row.answer[:40])
    if row.expected is not None:
        answer = f"[{'green' if row.answer == row.expected else 'red'}]{answer}[/]"
    counts = [f"{n:,}" for n in (f.prompt_n, f.cached_n, f.prompt_n - f.cached_n)]
    times = [_ms(row.first_token_ms), *([_ms(row.first_token_cold_ms or 0.0)] if baseline else [])]
    return [escape(row.title), *counts, *times, escape(row.why), answer]


def _ms(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1e3:.2f} s"


def summary(rows: list[Row]) -> str:
    """Totals: tokens, time to first tokens, facts."""
    asked = [(row, row.figures) for row in rows if row.figures is not None]
    prompt, cached = (sum(getattr(f, name) for _, f in asked) for name in ("prompt_n", "cached_n"))
    words = f"{prompt:,} prompt tokens, {cached:,} reused, {prompt - cached:,} prefilled"
    warm = sum(row.first_token_ms for row, _ in asked)
    words += f"; waiting for first tokens {_ms(warm)}"
    cold = [row.first_token_cold_ms for row, _ in asked if row.first_token_cold_ms is not None]
    if cold:
        words += f", with the cache off {_ms(sum(cold))}"
    facts = [row.answer == row.expected for row, _ in asked if row.expected is not None]
    return f"{words}; {sum(facts)} of {len(facts)} facts given back"
