"""``gufo doctor [MODEL]``: what is installed, what it runs on, and what the cache will do with a model.

Without a model: build, devices, memory, disk folder; also when nothing is built.  With one, it is loaded
with a small context: its state's sizes do not depend on --ctx-size, and a look should not allocate what
a server would.
Nothing is written, except that the first look at a model remembers the digest of its weights.
"""

from __future__ import annotations

import json
import os
import platform
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
    missing_build,
    model_findings,
)
from gufo_gguf.cli.flags import Chosen, option, with_model
from gufo_gguf.cli.hip_findings import HipFacts, kfd_problem
from gufo_gguf.cli.sizes import count, show_bytes
from gufo_gguf.core import env
from gufo_gguf.core.cores import allowed_cores
from gufo_gguf.core.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from gufo_gguf.backend.devices import Device
    from gufo_gguf.backend.llama import LlamaBackend

_LOOK_CTX = 8192
"""Longer than any window plus micro-batch, so that a sliding window's private size is the real one."""
_COLOURS = {Level.NOTE: "cyan", Level.WARNING: "yellow", Level.PROBLEM: "red"}

Section = dict[str, str]


@with_model(
    "ctx_size", "sessions", "threads", "ubatch_size", "cache_type_k", "cache_type_v", "swa_full",
    "cache_ram_bytes", "cache_disk", "cache_disk_bytes",
)  # fmt: skip
def doctor(
    chosen: Chosen,
    tokens: Annotated[
        list[int] | None, option("--tokens", min=1, help="Length of conversations to count; several: repeat.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say what is installed, what is cached and what fits; status 1 when something does not work."""
    flags = chosen.flags
    sections: dict[str, Section] = {}
    findings: list[Finding] = []
    table: list[dict[str, int]] = []

    built = _build(sections, flags["threads"])
    _memory(sections)
    findings += build_findings(built) if isinstance(built, BuildFacts) else [built]
    disk = flags["cache_disk"]
    if disk is not None:
        findings += disk_findings(_disk(sections, Path(disk), flags["cache_disk_bytes"]))
    if chosen.named and isinstance(built, BuildFacts):
        table = _look_at(chosen, tuple(sorted(tokens or ())), sections, findings)
    elif chosen.named:
        findings.append(Finding(Level.NOTE, "the model was not looked at: that needs the native library"))
    if as_json:
        typer.echo(json.dumps({"sections": sections, "fit": table, "findings": [asdict(f) for f in findings]}))
    else:
        _show(sections, table, findings, with_disk=disk is not None, hint=not chosen.named)
    if any(f.level is Level.PROBLEM for f in findings):
        raise typer.Exit(1)


# -- gathering -----------------------------------------------------------------------------------
def _look_at(
    chosen: Chosen, lengths: tuple[int, ...], sections: dict[str, Section], findings: list[Finding]
) -> list[dict[str, int]]:
    """Load the model; its sections and findings, and how many conversations fit."""
    from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions
    from gufo_gguf.cache.types import CacheLimits, StateShape
    from gufo_gguf.engine.budget import fit_table

    flags = chosen.flags
    options = LlamaOptions(
        n_ctx=_LOOK_CTX,
        n_batch=max(flags["ubatch_size"], 512),
        n_ubatch=flags["ubatch_size"],
        n_threads=flags["threads"],
        cache_type_k=flags["cache_type_k"],
        cache_type_v=flags["cache_type_v"],
        swa_full=flags["swa_full"],
    )
    with LlamaBackend(chosen.path(), options) as backend:
        looked = _model(sections, backend, flags["ctx_size"], flags["sessions"], flags["cache_ram_bytes"])
    findings += model_findings(looked)
    if looked.uncacheable is not None:
        return []
    shape = StateShape(looked.row_bytes, looked.private_bytes, 0)
    on_disk = flags["cache_disk_bytes"] if flags["cache_disk"] is not None else 0
    return fit_table(shape, CacheLimits(looked.ram_budget), on_disk, looked.n_ctx, lengths)


def _build(sections: dict[str, Section], threads: int) -> BuildFacts | Finding:
    """What was built and what it sees; the problem instead when nothing was, and the report goes on."""
    sections["build"] = {"gufo": __version__, "python": platform.python_version(), "system": platform.platform()}
    try:
        return _built(sections, threads)
    except (ConfigError, ImportError, OSError) as error:
        return missing_build(error)


def _built(sections: dict[str, Section], threads: int) -> BuildFacts:
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
    sections["build"] |= {
        "kind": str(info.get("kind", "unknown")),
        "llama.cpp": f"llama-cpp-python {info['upstream_version']}, commit {info.get('commit', '?')}"
        if "upstream_version" in info
        else "unknown",
        "flags": " ".join(own) or "unknown",
        **({"toolkit": toolkit[-1]} if toolkit else {}),
        "library": f"{folder} (ABI {native.ABI_VERSION})",
        "instructions": system_info(),
    }
    sections["devices"] = {d.name: f"{d.description} ({d.kind}){_device_memory(d)}" for d in found}
    cores = default_threads()
    sections["devices"]["threads"] = f"{threads or cores} of {cores} usable cores"
    return BuildFacts(
        info=info,
        cub_top_k=has_cub_top_k(folder),
        graph_opt=env.variable("GGML_CUDA_GRAPH_OPT"),
        has_gpu=any("GPU" in d.kind for d in found),
        chosen_threads=threads or cores,
        allowed_cores=allowed_cores(),
        hip=HipFacts(
            kfd_problem(), env.variable("GGML_CUDA_ENABLE_UNIFIED_MEMORY"), env.variable(env.ROCBLAS_VARIABLE)
        ),
    )


def _device_memory(device: Device) -> str:
    """Of a device with memory of its own; the processor's is the machine's, see the next section."""
    if not device.total_bytes or device.kind == "CPU":
        return ""
    return f", {show_bytes(device.free_bytes)} of {show_bytes(device.total_bytes)} unused"


def _memory(sections: dict[str, Section]) -> None:
    import psutil

    from gufo_gguf.core.memory import cgroup_available
    from gufo_gguf.engine.budget import automatic_ram_bytes

    memory = psutil.virtual_memory()
    left = cgroup_available()
    sections["memory"] = {
        "installed": show_bytes(memory.total),
        "available": f"{show_bytes(memory.available)}, without swapping and with file caches given up",
        **({"left to this process": f"{show_bytes(left)}, by the limit of its control group"} if left else {}),
        "automatic RAM budget": f"{show_bytes(automatic_ram_bytes())} (half of what is available, at most 32 GiB), "
        "less for a model's own bytes",
    }


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
    how = (
        f"no: {info.uncacheable}"
        if info.uncacheable
        else "yes, cut at any token"
        if not facts.private_bytes
        else "yes, at checkpoints"
    )
    sections["state"] = {"memory kind": info.memory, "cached": how}
    if inventory is not None:
        groups: dict[tuple[str, str], list[int]] = {}
        for c in inventory.components:
            groups.setdefault((str(c.kind), c.dtype), []).append(c.n_bytes)
        for (kind, dtype), sizes in groups.items():
            per = " a token" if kind == "rows" else ""
            key = f"{kind} ({dtype})"
            sections["state"][key] = f"{sum(sizes):,} bytes{per} in {count(len(sizes), 'component')}"
        all_slots = f"{show_bytes(slot * sessions)} for {count(sessions, 'session')}"
        sections["state"]["a slot's context"] = f"{show_bytes(slot)} for {facts.n_ctx:,} tokens, {all_slots}"
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
    used = held = 0
    pid = None
    if not problem and (folder / "v1").exists():
        try:
            fs = open_for_reading(str(folder))
            try:
                shelf = browse(fs)
            finally:
                fs.shut()
            used, held, pid = shelf.usage.used_bytes, len(shelf.records), holder(str(folder))
        except StoreError as error:
            problem = str(error)
    sections["disk"] = {
        "folder": str(folder),
        "budget": show_bytes(budget),
        "held": f"{count(held, 'checkpoint')}, {show_bytes(used)}",
        "free on the disk": show_bytes(free),
    }
    in_use = f"{folder} is in use by process {pid}" if pid else ""
    return DiskFacts(str(folder), problem, in_use, budget, free, used)


# -- showing -------------------------------------------------------------------------------------
def _show(
    sections: dict[str, Section], fit: list[dict[str, int]], findings: list[Finding], *, with_disk: bool, hint: bool
) -> None:
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
        console.print("[bold]how many conversations of N tokens stay warm, if they share nothing[/]")
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for column in ("N tokens", "one takes", "in RAM", *(["on disk"] if with_disk else [])):
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
    if hint:
        console.print("`gufo doctor MODEL` says whether a model's state is cached and how many conversations fit")
