"""Flags that several commands share: which model, how it runs, what a request that does not say gets.

A command that loads a model is written as

    @with_model()
    def serve(chosen: Chosen, port: … = 8080) -> None: ...

and gets a MODEL argument, ``-hf``, ``--config`` and a flag for each name of EngineFlags, all in place of
``chosen``.  So every command has the same names, variables, defaults and checks.  Each flag has a
variable: --ctx-size is GUFO_CTX_SIZE.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import typer

from gufo_gguf.cli.config import use_config
from gufo_gguf.cli.sizes import parse_bytes
from gufo_gguf.core.errors import ConfigError
from gufo_gguf.engine.flags import DEFAULTS, EngineFlags, check_flags
from gufo_gguf.engine.types import SamplingParams

MODEL = "Model"
RUN = "How it runs"
CACHE = "Cache"
SAMPLING = "What a request that does not say gets"


def variable_of(flag: str) -> str:
    """The environment variable of a flag: GUFO_CTX_SIZE of --ctx-size."""
    return "GUFO_" + flag.split("/")[0].removeprefix("--").upper().replace("-", "_")


def option(*names: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """A flag with its variable; the first long name is the one that config files use."""
    long = next(n for n in names if n.startswith("--"))
    return typer.Option(*names, help=help, rich_help_panel=panel, envvar=variable_of(long), **more)


def size(*names: str, help: str, **more: Any) -> Any:
    """A number of bytes; 8G and 512M are understood."""
    return option(*names, help=help, panel=CACHE, parser=parse_bytes, metavar="SIZE", **more)


# Name of EngineFlags -> (name of the parameter, its type and flag).
_ENGINE: dict[str, tuple[str, Any]] = {
    "alias": ("alias", Annotated[str | None, option("--alias", "-a", help="Name shown to clients.", panel=MODEL)]),
    "chat_template": (
        "chat_template_file",
        Annotated[
            Path | None, option("--chat-template-file", help="Jinja template instead of the model's.", panel=MODEL)
        ],
    ),
    "ctx_size": (
        "ctx_size",
        Annotated[
            int,
            option(
                "--ctx-size", "-c", min=0, help="Tokens per session; 0 = what the model was trained with.", panel=RUN
            ),
        ],
    ),
    "sessions": (
        "sessions",
        Annotated[
            int, option("--sessions", "--parallel", "-j", "-np", min=1, max=256, help="Sessions at once.", panel=RUN)
        ],
    ),
    "threads": (
        "threads",
        Annotated[int, option("--threads", "-t", min=0, help="0 = physical cores.", panel=RUN)],
    ),
    "batch_size": (
        "batch_size",
        Annotated[int, option("--batch-size", "-b", min=1, help="Tokens per pass.", panel=RUN)],
    ),
    "ubatch_size": (
        "ubatch_size",
        Annotated[int, option("--ubatch-size", "-ub", min=1, help="Tokens per computation.", panel=RUN)],
    ),
    "n_gpu_layers": (
        "n_gpu_layers",
        Annotated[int, option("--n-gpu-layers", "-ngl", min=-1, help="-1 = all that fit.", panel=RUN)],
    ),
    "cache_type_k": (
        "cache_type_k",
        Annotated[str, option("--cache-type-k", "-ctk", help="Type of the keys.", panel=RUN)],
    ),
    "cache_type_v": (
        "cache_type_v",
        Annotated[str, option("--cache-type-v", "-ctv", help="Type of the values.", panel=RUN)],
    ),
    "swa_full": (
        "swa_full",
        Annotated[bool, option("--swa-full", help="Keep all rows of sliding-window layers.", panel=RUN)],
    ),
    "prefill_chunk": (
        "prefill_chunk",
        Annotated[int, option("--prefill-chunk", min=1, help="Prompt tokens between two decode passes.", panel=RUN)],
    ),
    "max_queue": (
        "max_queue",
        Annotated[int, option("--max-queue", min=0, help="Requests that may wait; 503 beyond.", panel=RUN)],
    ),
    "cache": ("no_cache", Annotated[bool, option("--no-cache", help="Remember nothing.", panel=CACHE)]),
    "cache_ram_bytes": (
        "cache_ram_bytes",
        Annotated[
            int | None,
            size("--cache-ram-bytes", help="RAM for checkpoints; 0 = none.", show_default="automatic"),
        ],
    ),
    "cache_disk": (
        "cache_disk",
        Annotated[
            Path | None, option("--cache-disk", help="Folder for checkpoints that outlive the process.", panel=CACHE)
        ],
    ),
    "cache_disk_bytes": (
        "cache_disk_bytes",
        Annotated[int, size("--cache-disk-bytes", help="Most the folder may take.", show_default="8G")],
    ),
    "cache_disk_staging_bytes": (
        "cache_disk_staging_bytes",
        Annotated[
            int,
            size("--cache-disk-staging-bytes", help="Buffer for reading and writing it.", show_default="1M"),
        ],
    ),
    "cache_disk_spacing": (
        "cache_disk_spacing",
        Annotated[
            int,
            option(
                "--cache-disk-spacing",
                min=1,
                help="Tokens between checkpoints of a conversation that are written at once.",
                panel=CACHE,
            ),
        ],
    ),
    "cache_log": (
        "cache_log",
        Annotated[
            Path | None, option("--cache-log", help="Append every decision of the cache as JSON lines.", panel=CACHE)
        ],
    ),
}

_Model = Annotated[
    str | None,
    typer.Argument(
        help="A GGUF file (the first part of a split one), or a name: owlet, smollm2.",
        show_default=False,
        envvar=variable_of("--model"),
    ),
]
_Hub = Annotated[
    str | None,
    option("--hf-repo", "-hf", metavar="ORG/REPO[:QUANT]", help="A model of the Hugging Face hub.", panel=MODEL),
]
_Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="File with flags; else ./gufo.toml, else the user's.",
        rich_help_panel=MODEL,
        envvar=variable_of("--config"),
        callback=use_config,
        is_eager=True,
        show_default=False,
    ),
]

_DEFAULT_SAMPLING = SamplingParams()
Seed = Annotated[int, option("--seed", "-s", min=-1, max=2**32 - 1, help="-1 = random.", panel=SAMPLING)]
Temp = Annotated[float, option("--temp", min=0.0, help="Temperature; 0 = greedy.", panel=SAMPLING)]
TopK = Annotated[int, option("--top-k", help="0 = off.", panel=SAMPLING)]
TopP = Annotated[float, option("--top-p", min=0.0, max=1.0, help="1 = off.", panel=SAMPLING)]
MinP = Annotated[float, option("--min-p", min=0.0, max=1.0, help="0 = off.", panel=SAMPLING)]
NPredict = Annotated[
    int, option("--n-predict", "-n", min=-1, help="Most tokens of an answer; -1 = no limit.", panel=SAMPLING)
]
Reasoning = Annotated[str, option("--reasoning", help="auto, on or off.", panel=SAMPLING)]
ApiKey = Annotated[list[str] | None, option("--api-key", help="Key clients must send; several: repeat.", panel="HTTP")]
ClientKey = Annotated[list[str] | None, option("--api-key", help="The server's key.", panel="Server")]


def sampling(temp: float, top_k: int, top_p: float, min_p: float, seed: int) -> SamplingParams:
    """What the flags of the same names say."""
    return SamplingParams(temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=None if seed == -1 else seed)


def on_or_off(flag: str, value: str) -> bool | None:
    """True, False or None for on, off or auto."""
    known = {"auto": None, "on": True, "off": False}
    if value not in known:
        raise ConfigError(f"{flag} {value}: must be auto, on or off")
    return known[value]


def read_keys(keys: list[str], file: Path | None) -> tuple[str, ...]:
    """Keys of --api-key (commas separate several) and of a file (one a line, # comments).

    A key is bytes: those that are no UTF-8 are kept as surrogates, as in the process's arguments.
    """
    found = [part.strip() for key in keys for part in key.split(",")]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8-sig", errors="surrogateescape").split("\n")
        except OSError as error:
            raise ConfigError(f"--api-key-file {file}: {error.strerror}") from error
        found += [line.strip() for line in lines if not line.lstrip().startswith("#")]
    out = tuple(dict.fromkeys(key for key in found if key))
    if (keys or file is not None) and not out:
        # serving without any key instead would be the opposite of what was asked for
        raise ConfigError("--api-key / --api-key-file: no key in it; give one, or leave the flag out")
    return out


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template-file {path}: {getattr(error, 'strerror', None) or error}") from error


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a command line says about the model and how it runs, checked as far as no model is needed."""

    model: str | None
    hf_repo: str | None
    flags: EngineFlags

    @property
    def named(self) -> bool:
        return self.model is not None or self.hf_repo is not None

    def path(self) -> Path:
        """The model's file, fetched where a name or a repository says so; the default model without either."""
        from gufo_gguf.models.default import find_model

        return find_model(self.model, self.hf_repo)


def with_model(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of EngineFlags (or those of them that are named) in place of ``chosen``."""
    wanted = names or tuple(_ENGINE)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "chosen"]

        @wraps(command)
        def run(ctx: typer.Context, **given: Any) -> None:
            del given["config"]
            flags = {name: given.pop(_ENGINE[name][0]) for name in wanted}
            command(chosen=_choose(ctx, given.pop("model"), given.pop("hf_repo"), flags), **given)

        parameters = [
            _parameter("ctx", typer.Context, inspect.Parameter.empty),
            _parameter("model", _Model, None),
            _parameter("hf_repo", _Hub, None),
            _parameter("config", _Config, None),
            *(_parameter(_ENGINE[name][0], _ENGINE[name][1], _default(name)) for name in wanted),
            *(_parameter(p.name, hints[p.name], p.default) for p in own),
        ]
        run.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        return run

    return decorate


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _default(name: str) -> Any:
    value = cast(dict[str, Any], DEFAULTS)[name]
    return not value if name == "cache" else value


def _choose(ctx: typer.Context, model: str | None, hf_repo: str | None, given: dict[str, Any]) -> Chosen:
    if model is not None and hf_repo is not None:
        match _stronger(ctx, "model", "hf_repo"):
            case "model":
                hf_repo = None
            case "hf_repo":
                model = None
            case _:
                raise ConfigError(f"{model} and -hf {hf_repo}: name one model")
    if "cache" in given:
        given["cache"] = not given["cache"]
        if not given["cache"] and given["cache_disk"] is not None:
            match _stronger(ctx, "no_cache", "cache_disk"):
                case "no_cache":
                    given["cache_disk"] = None
                case "cache_disk":
                    given["cache"] = True
    template = given.get("chat_template")
    if template is not None:
        given["chat_template"] = _read_template(template)
    return Chosen(model, hf_repo, check_flags(**cast(EngineFlags, given)))


_SOURCES = ("DEFAULT_MAP", "ENVIRONMENT", "COMMANDLINE")


def _stronger(ctx: typer.Context, a: str, b: str) -> str | None:
    """Of two settings that contradict each other, the one from the stronger source; None: both from one."""
    ranks = {}
    for name in (a, b):
        source = getattr(ctx.get_parameter_source(name), "name", "")
        ranks[name] = _SOURCES.index(source) if source in _SOURCES else -1
    return None if ranks[a] == ranks[b] else max(ranks, key=ranks.__getitem__)
