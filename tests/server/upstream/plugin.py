"""A pytest plugin that lets llama.cpp's server tests run here.

It takes the place of their ``utils`` module: everything of it stays but ``ServerProcess.start`` and
``stop``, which start this server in a thread on a generated model.  What that model says is not the
point of a test that runs here, so their patterns of its text match anything.  To be loaded (``-p``)
by a pytest that runs in their folder tools/server/tests.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from gufo_gguf.backend.llama import LlamaOptions
from gufo_gguf.engine.engine import Engine, EngineOptions
from gufo_gguf.engine.types import SamplingParams
from gufo_gguf.server.run import bind, make_server
from gufo_gguf.server.settings import ServerSettings
from tests.conftest import tiny_model_path
from tests.server.upstream.applicable import reason_not_to_run

TINY = (None, "ggml-org/test-model-stories260K")
"""Models of theirs that a generated one can stand for."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = reason_not_to_run(item.name)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _template(server: Any, folder: Path) -> str | None:
    if server.chat_template_file:
        # relative to the folder they run in
        return (folder / server.chat_template_file).resolve().read_text(encoding="utf-8")
    return str(server.chat_template) if server.chat_template else None


def _engine(server: Any, folder: Path) -> Engine:
    n_slots = server.n_slots or 1
    n_batch = server.n_batch or 512
    options = LlamaOptions(
        n_ctx=(server.n_ctx or 4096) // (1 if server.kv_unified else n_slots),  # theirs counts all slots
        n_slots=n_slots,
        n_batch=n_batch,
        n_ubatch=min(server.n_ubatch or 512, n_batch),
        n_threads=1,
        chat_template=_template(server, folder),
    )
    more = EngineOptions(
        llama=options, cache_ram_bytes=64 << 20, alias=server.model_alias or "tiny", prefill_chunk=n_batch
    )
    return Engine.load(tiny_model_path("llama"), more)


def _settings(server: Any) -> ServerSettings:
    return ServerSettings(
        port=0,
        drain_s=0,
        api_keys=(server.api_key,) if server.api_key else (),
        cors_origins=(server.cors_origins,) if server.cors_origins else (),
        sampling=SamplingParams(seed=server.seed, temperature=server.temperature),
        max_tokens=server.n_predict if server.n_predict and server.n_predict > 0 else None,
        slots_endpoint=bool(server.server_slots),
        metrics_endpoint=bool(server.server_metrics),
        reasoning_format=server.reasoning_format or "auto",
        thinking={"on": True, "off": False}.get(server.reasoning),
        model_path="tiny.gguf",
        log_requests=False,
    )


def _adapt(utils: Any, folder: Path) -> None:
    process = utils.ServerProcess
    request = process.make_request

    def start(self: Any, timeout_seconds: int = 60) -> None:
        assert self.model_hf_repo in TINY, f"{self.model_hf_repo} cannot be stood for"
        settings = _settings(self)
        sock = bind(settings)
        up = threading.Event()
        self.gufo = make_server(_engine(self, folder), settings, up.set)
        self.thread = threading.Thread(target=self.gufo.run, kwargs={"sockets": [sock]}, daemon=True)
        self.thread.start()
        assert up.wait(timeout_seconds)
        self.server_port = sock.getsockname()[1]
        utils.server_instances.add(self)

    def stop(self: Any) -> None:
        utils.server_instances.discard(self)
        if getattr(self, "gufo", None) is not None:
            self.gufo.handle_exit(15, None)
            self.thread.join(30)
            self.gufo = None

    def make_request(self: Any, method: str, path: str, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.debug and isinstance(data, dict):
            data = {"verbose": True, **data}  # their --verbose asks for it in every answer
        result = request(self, method, path, data, *args, **kwargs)
        result.headers = utils.requests.structures.CaseInsensitiveDict(result.headers)
        return result

    process.start, process.stop, process.make_request = start, stop, make_request
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.match_regex = lambda regex, text: isinstance(text, str)


def _install(folder: Path) -> None:
    """Before their conftest is read, which imports ``utils``."""
    sys.modules["wget"] = types.ModuleType("wget")  # only downloads use it
    spec = importlib.util.spec_from_file_location("utils", folder / "utils.py")
    assert spec is not None and spec.loader is not None
    utils = importlib.util.module_from_spec(spec)
    sys.modules["utils"] = utils
    spec.loader.exec_module(utils)
    _adapt(utils, folder)


_install(Path.cwd())
