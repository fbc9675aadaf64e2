"""``gufo doctor [MODEL]``: what is installed, what it runs on, and what the cache will do with a model.

Without a model: build, devices, budgets, disk folder.  With one, it is loaded with a small context:
its state's sizes do not depend on --ctx-size, and a look should not allocate what a server would.
Nothing is written, except that the first look at a model remembers the digest of its weights.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gufo_gguf import __version__
from gufo_gguf.cli.findings import (
    BuildFacts,
    DiskFacts,
    Finding,
    Level,
    ModelFacts,
    build_findings,
    disk_findings,
    model_findings,
)
from gufo_gguf.cli.sizes import parse_bytes, show_bytes
from gufo_gguf.core import env
from gufo_gguf.core.errors import StoreError

if TYPE_CHECKING:
    from gufo_gguf.backend.llama import LlamaBackend

_LOOK_CTX = 8192
"""Longer than any window plus micro-batch, so that a sliding window's private size is the real one."""
_COLOURS = {Level.NOTE: "cyan", Level.WARNING: "yellow", Level.PROBLEM: "red"}

Section = dict[str, str]


def doctor(
    model: Annotated[
        Path | None, typer.Argument(help="A GGUF file, or the name of a model, to look at.", show_default=False)
    ] = None,
    ctx_size: Annotated[int, typer.Option("--ctx-size", "-c", min=0, envvar="GUFO_CTX_SIZE", help="As of serve.")] = 0,
    sessions: Annotated[int, typer.Option("--sessions", "-j", min=1, envvar="GUFO_SESSIONS", help="As of serve.")] = 1,
    threads: Annotated[int, typer.Option("--threads", "-t", min=0, envvar="GUFO_THREADS", help="As of serve.")] = 0,
    ubatch_size: Annotated[
        int, typer.Option("--ubatch-size", "-ub", min=1, envvar="GUFO_UBATCH_SIZE", help="As of serve.")
    ] = 512,
    cache_type_k: Annotated[
        str, typer.Option("--cache-type-k", "-ctk", envvar="GUFO_CACHE_TYPE_K", help="As of serve.")
    ] = "f16",
    cache_type_v: Annotated[
        str, typer.Option("--cache-type-v", "-ctv", envvar="GUFO_CACHE_TYPE_V", help="As of serve.")
    ] = "f16",
    swa_full: Annotated[bool, typer.Option("--swa-full", envvar="GUFO_SWA_FULL", help="As of serve.")] = False,
    cache_ram_bytes: Annotated[
        int | None,
        typer.Option(parser=parse_bytes, metavar="SIZE", envvar="GUFO_CACHE_RAM_BYTES", help="As of serve."),
    ] = None,
    cache_disk: Annotated[Path | None, typer.Option(envvar="GUFO_CACHE_DISK", help="As of serve.")] = None,
    cache_disk_bytes: Annotated[
        int, typer.Option(parser=parse_bytes, metavar="SIZE", envvar="GUFO_CACHE_DISK_BYTES", help="As of serve.")
    ] = 8 << 30,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Length of conversations to count; several: repeat.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say what is installed, what is cached and what fits; status 1 when something does not work."""
    sections: dict[str, Section] = {}
    findings: list[Finding] = []
    table: list[dict[str, int]] = []

    facts = _build(sections, threads)
    findings += build_findings(facts)
    if cache_disk is not None:
        findings += disk_findings(_disk(sections, cache_disk, cache_disk_bytes))
    if model is not None:
        from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions
        from gufo_gguf.cache.types import CacheLimits, StateShape
        from gufo_gguf.engine.budget import fit_table
        from gufo_gguf.models.default import model_path

        options = LlamaOptions(
            n_ctx=_LOOK_CTX, n_batch=max(ubatch_size, 512), n_ubatch=ubatch_size, n_threads=threads,
            cache_type_k=cache_type_k, cache_type_v=cache_type_v, swa_full=swa_full,
        )  # fmt: skip
        with LlamaBackend(model_path(model), options) as backend:
            looked = _model(sections, backend, ctx_size, sessions, cache_ram_bytes)
        findings += model_findings(looked)
        if looked.uncacheable is None:
            shape = StateShape(looked.row_bytes, looked.private_bytes, 0)
            on_disk = cache_disk_bytes if cache_disk is not None else 0
            table = fit_table(shape, CacheLimits(looked.ram_budget), on_disk, looked.n_ctx, tuple(sorted(tokens or ())))
    if as_json:
        typer.echo(json.dumps({"sections": sections, "fit": table, "findings": [asdict(f) for f in findings]}))
    else:
        _show(sections, table, findings, with_disk=cache_disk is not None)
    if any(f.level is Level.PROBLEM for f in findings):
        raise typer.Exit(1)


# -- gathering -----------------------------------------------------------------------------------
def _build(sections: dict[str, Section], threads: int) -> BuildFacts:
    from gufo_gguf.backend import native
    from gufo_gguf.backend.devices import devices, has_cub_top_k, system_info
    from gufo_gguf.backend.libpath import build_info, library_dir
    from gufo_gguf.backend.llama import default_threads

    folder = library_dir()
    info = build_info(folder)
    found = devices()
    flags = info.get("flags")
    shown = [str(f).removeprefix("-D") for f in flags] if isinstance(flags, list) else []
    own = [
        f for f in shown if not f.startswith(("CMAKE_", "LLAMA_BUILD", "BUILD_SHARED", "LLAMA_USE", "LLAMA_OPENSSL"))
    ]
    toolkit = str(info.get("toolkit", "")).splitlines()
    sections["build"] = {
        "gufo": __version__,
        "kind": str(info.get("kind", "unknown")),
        "llama.cpp": f"llama-cpp-python {info['upstream_version']}, commit {info.get('commit', '?')}"
        if "upstream_version" in info
        else "unknown",
        "flags": " ".join(own) or "unknown",
        **({"toolkit": toolkit[-1]} if toolkit else {}),
        "library": f"{folder} (ABI {native.ABI_VERSION})",
        "instructions": system_info(),
    }
    sections["devices"] = {
        d.name: f"{d.description} ({d.kind})"
        + (f", {show_bytes(d.free_bytes)} of {show_bytes(d.total_bytes)} free" if d.total_bytes else "")
        for d in found
    }
    cores = default_threads()
    sections["devices"]["threads"] = f"{threads or cores} of {cores} usable cores"
    return BuildFacts(
        info=info,
        cub_top_k=has_cub_top_k(folder),
        graph_opt=env.variable("GGML_CUDA_GRAPH_OPT"),
        has_gpu=any("GPU" in d.kind for d in found),
        chosen_threads=threads or cores,
        allowed_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or cores,
    )


def _model(
    sections: dict[str, Section], backend: LlamaBackend, ctx_size: int, sessions: int, cache_ram_bytes: int | None
) -> ModelFacts:
    import psutil

    from gufo_gguf.engine.budget import automatic_ram_bytes

    info, inventory = backend.info, backend.info.inventory
    automatic = automatic_ram_bytes(info.model_bytes)
    facts = ModelFacts(
        arch=info.arch,
        memory=info.memory,
        uncacheable=info.uncacheable,
        row_bytes=inventory.row_bytes if inventory else 0,
        private_bytes=inventory.private_bytes if inventory else 0,
        model_bytes=info.model_bytes,
        ram_budget=automatic if cache_ram_bytes is None else cache_ram_bytes,
        ram_available=psutil.virtual_memory().available,
        n_ctx=ctx_size or info.n_ctx_train,
        n_ctx_train=info.n_ctx_train,
        has_template=bool(backend.meta("tokenizer.chat_template")),
        swa_full=backend.options.swa_full,
        components=tuple(c.id for c in inventory.components) if inventory else (),
    )
    slot = facts.n_ctx * facts.row_bytes + facts.private_bytes
    sections["model"] = {
        "name": f"{info.model_name} ({info.arch})",
        "size": f"{info.n_params / 1e6:,.1f} M parameters, {show_bytes(info.model_bytes)}",
        "trained context": f"{info.n_ctx_train:,} tokens",
        "identity": info.identity,
    }
    how = "no" if info.uncacheable else "yes, cut at any token" if not facts.private_bytes else "yes, at checkpoints"
    sections["state"] = {"memory kind": info.memory, "cached": how}
    if inventory is not None:
        groups: dict[tuple[str, str], list[int]] = {}
        for c in inventory.components:
            groups.setdefault((str(c.kind), c.dtype), []).append(c.n_bytes)
        for (kind, dtype), sizes in groups.items():
            per = " a token" if kind == "rows" else ""
            key = f"{kind} ({dtype})"
            sections["state"][key] = f"{sum(sizes):,} bytes{per} in {len(sizes)} components"
        sections["state"]["a slot's context"] = (
            f"{show_bytes(slot)} for {facts.n_ctx:,} tokens, {show_bytes(slot * sessions)} for {sessions} sessions"
        )
        sections["state"]["copies go through"] = "pinned host memory" if backend.pinned else "ordinary host memory"
    budget = show_bytes(facts.ram_budget)
    sections["state"]["RAM budget"] = f"{budget} (automatic)" if cache_ram_bytes is None else budget
    return facts


def _disk(sections: dict[str, Section], folder: Path, budget: int) -> DiskFacts:
    from gufo_gguf.store.browse import browse, holder, open_for_reading

    base = next((p for p in (folder, *folder.absolute().parents) if p.exists()), folder)
    free = 0
    problem = ""
    try:
        room = os.statvfs(base)
        free = room.f_bavail * room.f_frsize
    except OSError as error:
        problem = f"{base}: {error.strerror}"
    if base.exists() and not base.is_dir():
        problem = f"{base} is not a folder"
    elif not os.access(base, os.W_OK | os.X_OK):
        problem = f"{base} cannot be written to"
    used = count = 0
    pid = None
    if not problem and (folder / "v1").exists():
        try:
            fs = open_for_reading(str(folder))
            try:
                shelf = browse(fs)
            finally:
                fs.shut()
            used, count, pid = shelf.usage.used_bytes, len(shelf.records), holder(str(folder))
        except StoreError as error:
            problem = str(error)
    sections["disk"] = {
        "folder": str(folder),
        "budget": show_bytes(budget),
        "held": f"{count} checkpoints, {show_bytes(used)}",
        "free on the disk": show_bytes(free),
    }
    in_use = f"{folder} is in use by process {pid}" if pid else ""
    return DiskFacts(str(folder), problem, in_use, budget, free, used)


# -- showing -------------------------------------------------------------------------------------
def _show(sections: dict[str, Section], fit: list[dict[str, int]], findings: list[Finding], *, with_disk: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for name, section in sections.items():
        console.print(f"[bold]{name}[/]")
        lines = Table.grid(padding=(0, 2))
        lines.add_column(no_wrap=True)
        lines.add_column(overflow="fold")
        for key, value in section.items():
            lines.add_row(f"  {escape(key)}", escape(value))
        console.print(lines)
    if fit:
        console.print("[bold]conversations that stay warm, one checkpoint each, sharing nothing[/]")
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for column in ("tokens", "one takes", "in RAM", *(["on disk"] if with_disk else [])):
            table.add_column(column, justify="right")
        for row in fit:
            cells: list[Any] = [f"{row['tokens']:,}", show_bytes(row["bytes"]), row["ram"]]
            table.add_row(*map(str, cells), *([str(row["disk"])] if with_disk else []))
        console.print(table)
    for finding in findings:
        console.print(f"[{_COLOURS[finding.level]}]{finding.level}[/]: {escape(finding.text)}")
        if finding.remedy:
            console.print(f"  → {escape(finding.remedy)}")
    if not findings:
        console.print("[green]nothing to warn about[/]")
