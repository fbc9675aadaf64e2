"""``gufo cache replay``: what was retained at a moment, and why a boundary was or was not there.

A log is appended to, so one file may hold several runs of a server, each counting from 1; a line
that a crash cut off ends a run.  One run is replayed, the last by default.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gufo_gguf.cache.events import CacheEvent, EventKind, decode
from gufo_gguf.cache.replay import Replay, Retained
from gufo_gguf.cli.console import plain_table, print_table
from gufo_gguf.cli.sizes import count, show_bytes
from gufo_gguf.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN = 20
"""Conversations that an error lists, the newest."""


def replay(
    file: Annotated[Path, typer.Argument(help="A log that --cache-log wrote.")],
    seq: Annotated[int | None, typer.Option(min=0, help="Right after this event; the last by default.")] = None,
    why: Annotated[int | None, typer.Option(metavar="BOUNDARY", help="Explain this restore point (tokens).")] = None,
    checkpoint: Annotated[int | None, typer.Option(help="Any checkpoint of the conversation in question.")] = None,
    run: Annotated[int | None, typer.Option(help="Which run of the server; the last by default.")] = None,
) -> None:
    """Rebuild the retained set from a decision log; status 1 when the log contradicts itself."""
    if checkpoint is not None and why is None:
        raise ConfigError("--checkpoint says which conversation --why is about; give --why BOUNDARY too")
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            runs, bad = split_runs(lines)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    if not runs:
        raise ConfigError(f"{file} holds no events; name a file that --cache-log wrote")
    for number, problem in bad:
        typer.echo(f"{file}, line {number}: {problem}", err=True)
    if run is not None and not 1 <= run <= len(runs):
        raise ConfigError(f"--run {run}: {file} holds runs 1 to {len(runs)}")
    chosen = len(runs) if run is None else run
    log = Replay(runs[chosen - 1])
    if len(runs) > 1:
        typer.echo(f"run {chosen} of {len(runs)}")
    if why is not None:
        if checkpoint is None:
            _refuse_several(log, seq)
        explanation = log.explain(why, checkpoint=checkpoint, seq=seq)
        typer.echo(str(explanation))
        for event in explanation.events:
            typer.echo(f"  {_line(event)}")
    else:
        _show(log, seq)
    for fault in log.faults:
        typer.echo(f"the log contradicts itself: {fault}")
    if log.faults:
        raise typer.Exit(1)


def conversations(log: Replay, seq: int | None = None) -> list[CacheEvent]:
    """The admission of each conversation's deepest checkpoint, until ``seq``; branches count apart."""
    admitted: dict[int, CacheEvent] = {}
    for event in log.events:
        if event.kind is EventKind.ADMIT and event.checkpoint is not None and (seq is None or event.seq <= seq):
            admitted[event.checkpoint] = event
    ends: list[CacheEvent] = []
    covered: set[int] = set()
    for number, event in sorted(admitted.items(), key=lambda item: (-item[1].boundary, item[0])):
        if number not in covered:
            ends.append(event)
            covered |= log.lineage(number)
    return sorted(ends, key=lambda e: e.seq)


def _refuse_several(log: Replay, seq: int | None) -> None:
    """One boundary lies in every conversation that is long enough; which one is meant must be said."""
    found = conversations(log, seq)
    if len(found) > 1:
        shown = "\n".join(f"  --checkpoint {e.checkpoint}: up to {e.boundary:,} tokens" for e in found[-_SHOWN:])
        more = f"\n  and {count(len(found) - _SHOWN, 'older one')}" if len(found) > _SHOWN else ""
        raise ConfigError(
            f"--why: the log holds {len(found)} conversations; name one by any checkpoint of it:\n{shown}{more}"
        )


def split_runs(lines: Iterable[str]) -> tuple[list[list[CacheEvent]], list[tuple[int, str]]]:
    """Events of each run, and (number, problem) of every line that is none."""
    runs: list[list[CacheEvent]] = []
    bad: list[tuple[int, str]] = []
    broken = True
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = decode(line)
        except ValueError as error:
            bad.append((number, str(error)))
            broken = True
            continue
        if broken or event.seq <= runs[-1][-1].seq:
            runs.append([])
        broken = False
        runs[-1].append(event)
    return runs, bad


def table_of(retained: dict[int, Retained]) -> Table:
    """One row per checkpoint, the oldest first."""
    table = plain_table("checkpoint>", "tokens>", "origin", "parent>", "bytes>", "admitted>", "last use>", "uses>")
    for r in sorted(retained.values(), key=lambda r: r.checkpoint):
        parent = "" if r.parent is None else str(r.parent)
        used = str(r.last_use_seq)
        table.add_row(
            str(r.checkpoint), f"{r.boundary:,}", str(r.origin or "?"), parent, show_bytes(r.n_bytes),
            str(r.admitted_seq), used, str(r.uses),
        )  # fmt: skip
    return table


def _show(log: Replay, seq: int | None) -> None:
    retained = log.retained(seq)
    if retained:
        print_table(table_of(retained))
    at = log.last_seq if seq is None else seq
    unique = show_bytes(log.total_bytes(seq))
    typer.echo(
        f"after event {at} of {log.last_seq}: {count(len(retained), 'checkpoint')}, {unique} unique"
        + ("; the log's beginning is missing" if not log.whole else "")
        + ("; a broken invariant latched the cache off" if log.latched else "")
    )


def _line(event: CacheEvent) -> str:
    where = f"of {', '.join(f'{p:,}' for p in event.points)}" if event.points else f"at {event.boundary:,}"
    words = [f"{event.seq}: {event.kind} {where}"]
    if event.checkpoint is not None:
        words.append(f"checkpoint {event.checkpoint}")
    if event.n_bytes:
        words.append(show_bytes(event.n_bytes))
    if event.reason:
        words.append(event.reason)
    return ", ".join(words)
