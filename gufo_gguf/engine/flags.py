"""The settings of an engine under the names that users write, and the one way from there to EngineOptions.

    gufo serve --ctx-size 8192       ┐
    GUFO_CTX_SIZE=8192               ├─► EngineFlags ─► engine_options() ─► EngineOptions
    ctx-size = 8192 in gufo.toml     │
    Engine(path, ctx_size=8192)      ┘

Names, defaults and what contradicts what are here and nowhere else.  Rejected: EngineOptions itself as
that form (its inner names are llama.cpp's, and reading it needs the native library, which --help has
to do without).
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from gufo_gguf.core.errors import ConfigError

if TYPE_CHECKING:
    from gufo_gguf.engine.engine import EngineOptions

MIN_STAGING_BYTES = 4096
_MAX_CELLS = 2**31
"""A context counts its cells in 31 bits."""


class EngineFlags(TypedDict, total=False):
    """What is left out is as in DEFAULTS.  Sizes are in bytes."""

    alias: str | None
    """Name shown to clients; None = the file's name."""
    chat_template: str | None
    """Jinja text instead of the model's own template."""
    ctx_size: int
    """Tokens per session; 0 = what the model was trained with."""
    sessions: int
    """Requests that run at once, each in a slot of ``ctx_size`` tokens."""
    threads: int
    """0 = physical cores."""
    batch_size: int
    ubatch_size: int
    n_gpu_layers: int
    """-1 = all that fit."""
    cache_type_k: str
    cache_type_v: str
    swa_full: bool
    """Keep all rows of sliding-window layers."""
    prefill_chunk: int
    """Prompt tokens between two decode passes."""
    max_queue: int
    """Requests that may wait."""
    cache: bool
    """False: nothing is remembered, not even in a live slot."""
    cache_ram_bytes: int | None
    """None = half of the free RAM, at most 32 GiB; 0 = no RAM tier."""
    cache_disk: str | Path | None
    """Folder for checkpoints that outlive the process."""
    cache_disk_bytes: int
    cache_disk_staging_bytes: int
    cache_disk_spacing: int
    """Tokens between checkpoints of one conversation that are written at once."""
    cache_log: str | Path | None
    """File that every decision of the cache is appended to."""


DEFAULTS: EngineFlags = {
    "alias": None,
    "chat_template": None,
    "ctx_size": 0,
    "sessions": 1,
    "threads": 0,
    "batch_size": 2048,
    "ubatch_size": 512,
    "n_gpu_layers": -1,
    "cache_type_k": "f16",
    "cache_type_v": "f16",
    "swa_full": False,
    "prefill_chunk": 512,
    "max_queue": 64,
    "cache": True,
    "cache_ram_bytes": None,
    "cache_disk": None,
    "cache_disk_bytes": 8 << 30,
    "cache_disk_staging_bytes": 1 << 20,
    "cache_disk_spacing": 2048,
    "cache_log": None,
}


def check_flags(**flags: Unpack[EngineFlags]) -> EngineFlags:
    """The flags with the defaults filled in.  Raises ConfigError for what cannot work on any machine."""
    unknown = sorted(flags.keys() - DEFAULTS.keys())
    if unknown:
        close = difflib.get_close_matches(unknown[0], DEFAULTS, 1)
        raise ConfigError(f"{unknown[0]}: there is no such setting" + (f"; did you mean {close[0]}?" if close else ""))
    full: EngineFlags = {**DEFAULTS, **flags}
    if full["ctx_size"] * full["sessions"] >= _MAX_CELLS:
        raise ConfigError(
            f"--ctx-size {full['ctx_size']} times --sessions {full['sessions']} is more than a context can count "
            "(2^31 tokens); choose a smaller --ctx-size"
        )
    if not full["cache"] and full["cache_disk"] is not None:
        raise ConfigError("--no-cache and --cache-disk contradict each other; leave one of them out")
    for name in ("cache_ram_bytes", "cache_disk_bytes"):
        n_bytes = full[name]  # type: ignore[literal-required]
        if n_bytes is not None and n_bytes < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {n_bytes}: a size is 0 or more")
    if full["cache_disk_spacing"] < 1:
        raise ConfigError(f"--cache-disk-spacing {full['cache_disk_spacing']}: use 1 or more")
    if full["cache_disk_staging_bytes"] < MIN_STAGING_BYTES:
        raise ConfigError(
            f"--cache-disk-staging-bytes {full['cache_disk_staging_bytes']}: use at least {MIN_STAGING_BYTES}"
        )
    return full


def engine_options(**flags: Unpack[EngineFlags]) -> EngineOptions:
    """What ``Engine.load`` takes.  Raises ConfigError; what only the model can tell is checked when it loads."""
    full = check_flags(**flags)
    from gufo_gguf.backend.llama import LlamaOptions
    from gufo_gguf.engine.engine import EngineOptions

    return EngineOptions(
        llama=LlamaOptions(
            n_ctx=full["ctx_size"],
            n_slots=full["sessions"],
            n_batch=full["batch_size"],
            n_ubatch=full["ubatch_size"],
            n_threads=full["threads"],
            n_gpu_layers=full["n_gpu_layers"],
            cache_type_k=full["cache_type_k"],
            cache_type_v=full["cache_type_v"],
            swa_full=full["swa_full"],
            chat_template=full["chat_template"],
        ),
        cache=full["cache"],
        cache_ram_bytes=full["cache_ram_bytes"],
        cache_log=_path(full["cache_log"]),
        cache_disk=_path(full["cache_disk"]),
        cache_disk_bytes=full["cache_disk_bytes"],
        cache_disk_staging_bytes=full["cache_disk_staging_bytes"],
        cache_disk_spacing=full["cache_disk_spacing"],
        prefill_chunk=full["prefill_chunk"],
        max_queue=full["max_queue"],
        alias=full["alias"],
    )


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)
