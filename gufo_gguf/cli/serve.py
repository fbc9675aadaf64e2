"""``gufo serve``: load a model and answer HTTP until a signal comes.

Every flag has a variable GUFO_<FLAG> that gives its default; the flag wins.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gufo_gguf.cli.console import loading_bar
from gufo_gguf.cli.sizes import parse_bytes
from gufo_gguf.core.errors import ConfigError
from gufo_gguf.engine.types import SamplingParams
from gufo_gguf.server.run import bind
from gufo_gguf.server.run import serve as run_server
from gufo_gguf.server.settings import Limits, ServerSettings

_MODEL = "Model"
_RUN = "How it runs"
_CACHE = "Cache"
_HTTP = "HTTP"
_MIN_STAGING_BYTES = 4096
_SAMPLING = "What a request that does not say gets"


def _option(*names: str, help: str, panel: str, **more: Any) -> Any:
    long = next(n for n in names if n.startswith("--"))
    variable = "GUFO_" + long.split("/")[0].removeprefix("--").upper().replace("-", "_")
    return typer.Option(*names, help=help, rich_help_panel=panel, envvar=variable, **more)


def _size(*names: str, help: str, **more: Any) -> Any:
    """A number of bytes; 8G and 512M are understood."""
    return _option(*names, help=help, panel=_CACHE, parser=parse_bytes, metavar="SIZE", **more)


def read_keys(keys: list[str], file: Path | None) -> tuple[str, ...]:
    """Keys of --api-key (commas separate several) and of a file (one a line, # comments)."""
    found = [part.strip() for key in keys for part in key.split(",")]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"--api-key-file {file}: {error.strerror}") from error
        found += [line.strip() for line in lines if not line.lstrip().startswith("#")]
    out = tuple(dict.fromkeys(key for key in found if key))
    if (keys or file is not None) and not out:
        # serving without any key instead would be the opposite of what was asked for
        raise ConfigError("--api-key / --api-key-file: no key in it; give one, or leave the flag out")
    return out


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template-file {path}: {getattr(error, 'strerror', None) or error}") from error


def _on_or_off(flag: str, value: str) -> bool | None:
    known = {"auto": None, "on": True, "off": False}
    if value not in known:
        raise ConfigError(f"{flag} {value}: must be auto, on or off")
    return known[value]


def _set_up_logging(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if not verbose:
        logging.getLogger("asyncio").setLevel(logging.WARNING)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


def serve(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A GGUF file (the first part of a split one), or a name: owlet, smollm2.", show_default="owlet"
        ),
    ] = None,
    alias: Annotated[str | None, _option("--alias", "-a", help="Name shown to clients.", panel=_MODEL)] = None,
    chat_template_file: Annotated[
        Path | None, _option("--chat-template-file", help="Jinja template instead of the model's.", panel=_MODEL)
    ] = None,
    ctx_size: Annotated[
        int,
        _option("--ctx-size", "-c", min=0, help="Tokens per session; 0 = what the model was trained with.", panel=_RUN),
    ] = 0,
    sessions: Annotated[
        int, _option("--sessions", "--parallel", "-j", "-np", min=1, max=256, help="Sessions at once.", panel=_RUN)
    ] = 1,
    threads: Annotated[int, _option("--threads", "-t", min=0, help="0 = physical cores.", panel=_RUN)] = 0,
    batch_size: Annotated[int, _option("--batch-size", "-b", min=1, help="Tokens per pass.", panel=_RUN)] = 2048,
    ubatch_size: Annotated[
        int, _option("--ubatch-size", "-ub", min=1, help="Tokens per computation.", panel=_RUN)
    ] = 512,
    n_gpu_layers: Annotated[int, _option("--n-gpu-layers", "-ngl", min=-1, help="-1 = all that fit.", panel=_RUN)] = -1,
    cache_type_k: Annotated[str, _option("--cache-type-k", "-ctk", help="Type of the keys.", panel=_RUN)] = "f16",
    cache_type_v: Annotated[str, _option("--cache-type-v", "-ctv", help="Type of the values.", panel=_RUN)] = "f16",
    swa_full: Annotated[
        bool, _option("--swa-full", help="Keep all rows of sliding-window layers.", panel=_RUN)
    ] = False,
    prefill_chunk: Annotated[
        int, _option("--prefill-chunk", min=1, help="Prompt tokens between two decode passes.", panel=_RUN)
    ] = 512,
    max_queue: Annotated[
        int, _option("--max-queue", min=0, help="Requests that may wait; 503 beyond.", panel=_RUN)
    ] = 64,
    no_cache: Annotated[bool, _option("--no-cache", help="Remember nothing.", panel=_CACHE)] = False,
    cache_ram_bytes: Annotated[
        int | None,
        _size("--cache-ram-bytes", help="RAM for checkpoints; 0 = none.", show_default="automatic"),
    ] = None,
    cache_disk: Annotated[
        Path | None, _option("--cache-disk", help="Folder for checkpoints that outlive the server.", panel=_CACHE)
    ] = None,
    cache_disk_bytes: Annotated[
        int, _size("--cache-disk-bytes", help="Most the folder may take.", show_default="8G")
    ] = 8 << 30,
    cache_disk_staging_bytes: Annotated[
        int, _size("--cache-disk-staging-bytes", help="Buffer for reading and writing it.", show_default="1M")
    ] = 1 << 20,
    cache_log: Annotated[
        Path | None, _option("--cache-log", help="Append every decision of the cache as JSON lines.", panel=_CACHE)
    ] = None,
    host: Annotated[str, _option("--host", help="Address to listen on.", panel=_HTTP)] = "127.0.0.1",
    port: Annotated[int, _option("--port", min=0, max=65535, help="0 = any free one.", panel=_HTTP)] = 8080,
    api_key: Annotated[
        list[str] | None, _option("--api-key", help="Key clients must send; several: repeat.", panel=_HTTP)
    ] = None,
    api_key_file: Annotated[Path | None, _option("--api-key-file", help="Keys, one a line.", panel=_HTTP)] = None,
    isolate_keys: Annotated[
        bool, _option("--isolate-keys", help="Share no cached state between API keys.", panel=_HTTP)
    ] = False,
    cors_origin: Annotated[
        list[str] | None, _option("--cors-origin", help="Origin of web pages that may call; * = all.", panel=_HTTP)
    ] = None,
    keep_noise: Annotated[
        bool, _option("--keep-noise", help="Leave clients' per-request nonces in system messages.", panel=_HTTP)
    ] = False,
    seed: Annotated[int, _option("--seed", "-s", min=-1, max=2**32 - 1, help="-1 = random.", panel=_SAMPLING)] = -1,
    temp: Annotated[float, _option("--temp", min=0.0, help="Temperature; 0 = greedy.", panel=_SAMPLING)] = 0.8,
    top_k: Annotated[int, _option("--top-k", help="0 = off.", panel=_SAMPLING)] = 40,
    top_p: Annotated[float, _option("--top-p", min=0.0, max=1.0, help="1 = off.", panel=_SAMPLING)] = 0.95,
    min_p: Annotated[float, _option("--min-p", min=0.0, max=1.0, help="0 = off.", panel=_SAMPLING)] = 0.05,
    n_predict: Annotated[
        int, _option("--n-predict", "-n", min=-1, help="Most tokens of an answer; -1 = no limit.", panel=_SAMPLING)
    ] = -1,
    reasoning_format: Annotated[
        str, _option("--reasoning-format", help="auto, none, deepseek.", panel=_SAMPLING)
    ] = "auto",
    reasoning: Annotated[str, _option("--reasoning", help="auto, on or off.", panel=_SAMPLING)] = "auto",
    verbose: Annotated[bool, _option("--verbose", "-v", help="Log more.", panel=_HTTP)] = False,
) -> None:
    """Serve a model over HTTP: OpenAI's, Anthropic's and llama-server's APIs."""
    _set_up_logging(verbose)
    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=read_keys(api_key or [], api_key_file),
        cors_origins=tuple(cors_origin or ()),
        limits=Limits(),
        sampling=SamplingParams(
            temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=None if seed == -1 else seed
        ),
        max_tokens=None if n_predict < 0 else n_predict,
        isolate_keys=isolate_keys,
        normalise_noise=not keep_noise,
        reasoning_format=reasoning_format,
        thinking=_on_or_off("--reasoning", reasoning),
    )
    if ctx_size * sessions >= 2**31:
        raise ConfigError(
            f"--ctx-size {ctx_size} times --sessions {sessions} is more than a context can count (2^31 tokens); "
            "choose a smaller --ctx-size"
        )
    if no_cache and cache_disk is not None:
        raise ConfigError("--no-cache and --cache-disk contradict each other; leave one of them out")
    if cache_disk_staging_bytes < _MIN_STAGING_BYTES:
        raise ConfigError(f"--cache-disk-staging-bytes {cache_disk_staging_bytes}: use at least {_MIN_STAGING_BYTES}")
    template = _read_template(chat_template_file)
    sock = bind(settings)  # a port in use shows before a model is loaded
    try:
        # imported late: --help and a wrong flag need no native library
        from gufo_gguf.backend.llama import LlamaOptions
        from gufo_gguf.engine.engine import Engine, EngineOptions
        from gufo_gguf.models.default import model_path

        model = model_path(model)
        options = EngineOptions(
            llama=LlamaOptions(
                n_ctx=ctx_size,
                n_slots=sessions,
                n_batch=batch_size,
                n_ubatch=ubatch_size,
                n_threads=threads,
                n_gpu_layers=n_gpu_layers,
                cache_type_k=cache_type_k,
                cache_type_v=cache_type_v,
                swa_full=swa_full,
                chat_template=template,
            ),
            cache=not no_cache,
            cache_ram_bytes=cache_ram_bytes,
            cache_log=cache_log,
            cache_disk=cache_disk,
            cache_disk_bytes=cache_disk_bytes,
            cache_disk_staging_bytes=cache_disk_staging_bytes,
            prefill_chunk=prefill_chunk,
            max_queue=max_queue,
            alias=alias,
        )
        bar, on_progress = loading_bar(model.name)
        with bar:
            engine = Engine.load(model, options, on_progress)
    except BaseException:
        sock.close()
        raise
    run_server(engine, settings.with_model_path(model), sock, say=lambda line: print(line, flush=True))
