"""``gufo cache``: look into a cache folder, check it, empty it; ask a log why.

    gufo cache ls --cache-disk DIR            what is there
    gufo cache show ID --cache-disk DIR       one checkpoint and what it shares
    gufo cache check --cache-disk DIR         every checksum; status 1 on damage
    gufo cache check --url http://…           a running server's own recount
    gufo cache rm ID... --cache-disk DIR      refused on a folder in use; --all for every checkpoint
    gufo cache replay FILE                    a decision log (see ``replay.py``)

All but ``rm`` read only and work on a folder in use.  No command shows text or tokens.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from gufo_gguf.cli.client import Client
from gufo_gguf.cli.console import plain_table, print_table
from gufo_gguf.cli.replay import replay
from gufo_gguf.cli.sizes import count, show_age, show_bytes
from gufo_gguf.core.errors import ConfigError
from gufo_gguf.store.browse import Shelf, browse, holder, open_for_reading, remove
from gufo_gguf.store.check import check_store
from gufo_gguf.store.types import Damage

if TYPE_CHECKING:
    from gufo_gguf.store.catalogue import DiskRecord

cache_app = typer.Typer(help="Look into a cache folder or a decision log.", no_args_is_help=True)
cache_app.command()(replay)

_Disk = Annotated[Path, typer.Option("--cache-disk", envvar="GUFO_CACHE_DISK", help="The folder.", show_default=False)]
_MaybeDisk = Annotated[
    Path | None, typer.Option("--cache-disk", envvar="GUFO_CACHE_DISK", help="The folder.", show_default=False)
]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]


@cache_app.command()
def ls(cache_disk: _Disk, as_json: _Json = False) -> None:
    """List the checkpoints in a folder, oldest first."""
    shelf = _look(cache_disk)
    rows = [_row(shelf, record) for record in shelf.records]
    if as_json:
        damaged = [{"id": key, "state": str(damage)} for key, damage in shelf.damaged]
        typer.echo(json.dumps({"checkpoints": rows, "damaged": damaged, "used_bytes": shelf.usage.used_bytes}))
        return
    short = shelf.short_ids()
    table = plain_table("id", "model", "tokens>", "origin", "its own>", "shared>", "age>", "state")
    now = time.time()
    for row in rows:
        table.add_row(
            short[row["id"]],
            _plain(row["model"]),
            f"{row['tokens']:,}",
            row["origin"],
            show_bytes(row["unique_bytes"]),
            show_bytes(row["shared_bytes"]),
            show_age(now - row["created_s"]) if row["created_s"] else "?",
            "ok",
        )
    for key, damage in shelf.damaged:
        table.add_row(short[key], "?", "?", "?", "?", "?", "?", f"[red]{damage.reason}[/]")
    if table.row_count:
        print_table(table)
    pid = holder(str(cache_disk))
    typer.echo(_totals(shelf) + (f"; in use by process {_printable(pid)}" if pid else ""))


@cache_app.command()
def show(
    ident: Annotated[str, typer.Argument(metavar="ID", help="Beginning of an id.")],
    cache_disk: _Disk,
    as_json: _Json = False,
) -> None:
    """Show one checkpoint: what it is made of, and which others need the same files."""
    shelf = _look(cache_disk)
    found = shelf.find(ident)
    if isinstance(found, Damage):
        raise ConfigError(f"this checkpoint cannot be restored: {found}; `gufo cache rm` removes it")
    row = _row(shelf, found)
    private = found.private
    row |= {
        "scope": found.scope,
        "labels": dict(found.labels),
        "chunks": len(found.chunks),
        "chunk_rows": found.chunk_rows,
        "row_bytes": found.row_bytes,
        "private_bytes": private.private.n_bytes,
        "tail_bytes": private.tail.n_bytes,
        "logits_bytes": private.logits.n_bytes,
        "inputs": [mark.position for mark in found.inputs],
        "shares_with": _sharers(shelf, found),
    }
    if as_json:
        typer.echo(json.dumps(row))
        return
    sizes = {name for name in row if name.endswith("_bytes")}
    table = plain_table("", "", header=False)
    for name, value in row.items():
        if name == "created_s":
            table.add_row("created", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if value else "?")
        elif name == "labels":
            for label, text in value.items():
                table.add_row(_plain(f"label {label}"), _plain(text))
        elif name == "shares_with":
            lines = [
                f"{other['id'][:8]} ({other['tokens']:,} tokens): {count(other['chunks'], 'chunk')}" for other in value
            ]
            table.add_row("shares with", "\n".join(lines) or "none")
        else:
            text = (
                show_bytes(value) if name in sizes else f"{value:,}" if isinstance(value, int) else _plain(str(value))
            )
            table.add_row(name.removesuffix("_bytes").replace("_", " "), text)
    print_table(table)


@cache_app.command()
def check(
    cache_disk: _MaybeDisk = None,
    url: Annotated[str | None, typer.Option("--url", help="A running server, instead of a folder.")] = None,
    api_key: Annotated[str, typer.Option("--api-key", envvar="GUFO_API_KEY", help="Its key.")] = "",
) -> None:
    """Verify every checksum of a folder, or have a server recount its cache; status 1 on damage."""
    if (cache_disk is None) == (url is None):
        raise ConfigError("name what to check: --cache-disk DIR or --url http://…, one of them")
    good = _check_folder(cache_disk) if cache_disk is not None else _check_server(Client(url or "", api_key))
    if not good:
        raise typer.Exit(1)


@cache_app.command()
def rm(
    cache_disk: _Disk,
    idents: Annotated[
        list[str] | None, typer.Argument(metavar="ID...", help="Beginnings of ids.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every checkpoint, instead of ids.")] = False,
) -> None:
    """Remove checkpoints and the files that only they need.  All of those named, or none."""
    if every == bool(idents):
        raise ConfigError("name what to remove: ids as `gufo cache ls` shows them, or --all")
    records, freed = remove(str(cache_disk), None if every else idents)
    for record in records:
        typer.echo(f"removed {record.key} ({count(record.n_tokens, 'token')})")
    typer.echo(f"{count(len(records), 'checkpoint')} removed, {show_bytes(freed)} freed")


# -- parts ---------------------------------------------------------------------------------------
def _look(folder: Path) -> Shelf:
    fs = open_for_reading(str(folder))
    try:
        return browse(fs)
    finally:
        fs.shut()


def _totals(shelf: Shelf) -> str:
    """The folder in one line; the same of every command.  Bytes are blocks on disk, manifests included."""
    usage = shelf.usage
    loose = sum(f.disk_bytes for f in (shelf.catalogue.file(key) for key, _ in shelf.catalogue.loose()) if f)
    unlisted = loose + usage.debris_bytes
    text = f"{count(len(shelf.records), 'checkpoint')} in {count(usage.n_files, 'file')}, "
    text += f"{show_bytes(usage.used_bytes)} on disk"
    text += f"; {count(len(shelf.damaged), 'damaged one')} cannot be restored" if shelf.damaged else ""
    return text + (f"; {show_bytes(unlisted)} of that in files that no checkpoint lists" if unlisted else "")


def _row(shelf: Shelf, record: DiskRecord) -> dict[str, Any]:
    unique, shared = shelf.catalogue.shares(record)
    return {
        "id": record.key,
        "model": record.labels.get("model", "?"),
        "tokens": record.n_tokens,
        "origin": str(record.origin),
        "unique_bytes": unique,
        "shared_bytes": shared,
        "created_s": record.created_s,
    }


def _sharers(shelf: Shelf, record: DiskRecord) -> list[dict[str, Any]]:
    mine = set(record.chunks.keys())
    others = ((other, len(mine.intersection(other.chunks.keys()))) for other in shelf.records if other is not record)
    return [{"id": other.key, "tokens": other.n_tokens, "chunks": n} for other, n in others if n]


def _check_folder(folder: Path) -> bool:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("checking"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    fs = open_for_reading(str(folder))
    try:
        totals = _totals(browse(fs))
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("check", total=None)
            report = check_store(fs, progress=lambda done, total: bar.update(task, completed=done, total=total))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror or error}") from error
    finally:
        fs.shut()
    for damage in report.damage:
        typer.echo(f"damaged: {damage}")
    for key in report.lost:
        typer.echo(f"cannot be restored: checkpoint {key}")
    typer.echo(totals)
    bad = f"{count(len(report.damage), 'damaged file')}, {count(len(report.lost), 'checkpoint')} lost"
    read = f"{show_bytes(report.n_bytes)} of content read: "
    typer.echo(read + (bad if report.damage else "every checksum is right"))
    return not report.damage


def _check_server(client: Client) -> bool:
    found = client.get("/v1/cache/check")
    for problem in found["problems"]:
        typer.echo(f"problem: {problem}")
    typer.echo(
        "every reference and byte adds up" if not found["problems"] else count(len(found["problems"]), "problem")
    )
    return not found["problems"]


def _printable(text: str) -> str:
    """Text from a file, without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _plain(text: str) -> str:
    """The same for a table: no markup either."""
    return escape(_printable(text))
