"""``gufo serve``: load a model and answer HTTP until a signal comes.

The flags about the model and how it runs are in ``flags.py``; those of the HTTP side are here.
"""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gufo_gguf.cli.console import loading_bar
from gufo_gguf.cli.flags import (
    SAMPLING,
    ApiKey,
    Chosen,
    MinP,
    NPredict,
    Reasoning,
    Seed,
    Temp,
    TopK,
    TopP,
    on_or_off,
    option,
    read_keys,
    sampling,
    with_model,
)
from gufo_gguf.cli.sizes import count, show_bytes
from gufo_gguf.core.errors import ConfigError
from gufo_gguf.engine.ablation import Ablation
from gufo_gguf.engine.flags import engine_options
from gufo_gguf.engine.types import SamplingParams
from gufo_gguf.server.settings import Limits, ServerSettings

if TYPE_CHECKING:
    from gufo_gguf.engine.engine import Engine

_HTTP = "HTTP"
_DEFAULT = SamplingParams()
_REASONING_FORMATS = ("auto", "none", "deepseek", "deepseek-legacy")


def _set_up_logging(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if not verbose:
        logging.getLogger("asyncio").setLevel(logging.WARNING)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _summary(engine: Engine) -> str:
    """What is served and what remembers, in one line: a budget that came out small should not be a surprise."""
    info, status = engine.info, engine.cache_status()
    model = f"{engine.model_id}: {count(info.n_slots, 'session')} of {count(info.n_ctx, 'token')}"
    if not status["enabled"]:
        return f"{model}; nothing is cached" + (f" ({info.uncacheable})" if info.uncacheable else "")
    disk = status["disk"]
    on_disk = f" and {show_bytes(disk['budget_bytes'])} of disk" if disk else ", nothing outlives a stop (--cache-disk)"
    return f"{model}; the cache may take {show_bytes(engine.ram_bytes)} of RAM{on_disk}"


@with_model()
def serve(
    chosen: Chosen,
    host: Annotated[str, option("--host", help="Address to listen on.", panel=_HTTP)] = "127.0.0.1",
    port: Annotated[int, option("--port", min=0, max=65535, help="0 = any free one.", panel=_HTTP)] = 8080,
    api_key: ApiKey = None,
    api_key_file: Annotated[Path | None, option("--api-key-file", help="Keys, one a line.", panel=_HTTP)] = None,
    isolate_keys: Annotated[
        bool, option("--isolate-keys", help="Share no cached state between API keys.", panel=_HTTP)
    ] = False,
    cors_origin: Annotated[
        list[str] | None, option("--cors-origin", help="Origin of web pages that may call; * = all.", panel=_HTTP)
    ] = None,
    keep_noise: Annotated[
        bool, option("--keep-noise", help="Leave clients' per-request nonces in system messages.", panel=_HTTP)
    ] = False,
    timeout: Annotated[
        float, option("--timeout", "-to", min=0.0, help="Seconds a request may take; 0 = no limit.", panel=_HTTP)
    ] = 0.0,
    seed: Seed = -1,
    temp: Temp = _DEFAULT.temperature,
    top_k: TopK = _DEFAULT.top_k,
    top_p: TopP = _DEFAULT.top_p,
    min_p: MinP = _DEFAULT.min_p,
    n_predict: NPredict = -1,
    reasoning_format: Annotated[
        str, option("--reasoning-format", help="auto, none, deepseek, deepseek-legacy.", panel=SAMPLING)
    ] = "auto",
    reasoning: Reasoning = "auto",
    verbose: Annotated[bool, option("--verbose", "-v", help="Log more.", panel=_HTTP)] = False,
    without: Annotated[list[str] | None, typer.Option("--without", hidden=True)] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's, Anthropic's and llama-server's APIs."""
    _set_up_logging(verbose)
    if reasoning_format not in _REASONING_FORMATS:
        raise ConfigError(f"--reasoning-format {reasoning_format}: must be one of {', '.join(_REASONING_FORMATS)}")
    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=read_keys(api_key or [], api_key_file),
        cors_origins=tuple(cors_origin or ()),
        limits=Limits(),
        sampling=sampling(temp, top_k, top_p, min_p, seed),
        max_tokens=None if n_predict < 0 else n_predict,
        timeout_s=timeout if 0 < timeout < math.inf else None,
        isolate_keys=isolate_keys,
        normalise_noise=not keep_noise,
        reasoning_format=reasoning_format,
        thinking=on_or_off("--reasoning", reasoning),
    )
    # imported late, here and below: FastAPI costs a second that other commands and a wrong flag need not wait
    # for, and neither need a native library
    from gufo_gguf.server import run

    sock = run.bind(settings)  # a port in use shows before a model is loaded
    try:
        path = chosen.path()
        from gufo_gguf.engine.engine import Engine

        options = replace(engine_options(**chosen.flags), ablation=Ablation.named(without or ()))
        bar, on_progress = loading_bar(path.name)
        with bar:
            engine = Engine.load(path, options, on_progress)
        engine.chat.warm_up()
    except BaseException:
        sock.close()
        raise
    print(_summary(engine), flush=True)
    run.serve(engine, settings.with_model_path(path), sock, say=lambda line: print(line, flush=True))
