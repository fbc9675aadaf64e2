"""A server around the scripted engine: over ASGI for whole answers, over a real socket for streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from gufo_gguf.server.run import address_of, bind, make_server
from gufo_gguf.server.settings import ServerSettings
from tests.server.standin import StandinEngine


@dataclass
class Running:
    """A server in a thread, and clients of it."""

    engine: StandinEngine
    url: str
    http: httpx.Client
    openai: openai.OpenAI
    server: _Server

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def error(self, path: str, **body: object) -> dict[str, object]:
        """The error object of a request that must be refused as 400."""
        answer = self.post(path, **body)
        assert answer.status_code == 400, answer.text
        error: dict[str, object] = answer.json()["error"]
        return error


Serve = Callable[..., Running]


class _Server:
    """One uvicorn in a thread."""

    def __init__(self, engine: StandinEngine, settings: ServerSettings) -> None:
        sock = bind(settings)
        up = threading.Event()
        self.uvicorn = make_server(engine, settings, up.set)
        self._thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [sock]}, daemon=True)
        self._thread.start()
        assert up.wait(10)
        url = address_of(sock)
        self.http = httpx.Client(base_url=url, timeout=30)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
        self.running = Running(engine, url, self.http, self.openai, self)

    def exchange_engine(self, engine: StandinEngine) -> Running:
        """Starting and stopping a server takes half a second; a new engine in a running one nothing."""
        state = self.uvicorn.state
        state.engine = state.active.engine = engine
        self.running.engine = engine
        return self.running

    def stop(self) -> None:
        self.http.close()
        self.openai.close()
        self.uvicorn.handle_exit(15, None)
        self._thread.join(10)
        assert not self._thread.is_alive()


@contextmanager
def running_server(engine: Any, settings: ServerSettings) -> Iterator[Running]:
    """A server around any engine; the engine is closed at the end."""
    server = _Server(engine, settings)
    try:
        yield server.running
    finally:
        server.stop()


@pytest.fixture(scope="session")
def _shared() -> Iterator[_Server]:
    server = _Server(StandinEngine(), ServerSettings(port=0, drain_s=0.2))
    yield server
    server.stop()


@pytest.fixture
def serve(_shared: _Server) -> Iterator[Serve]:
    """``serve(engine, settings)``: with settings of its own a server of its own, else the shared one."""
    own: list[_Server] = []

    def start(engine: StandinEngine | None = None, settings: ServerSettings | None = None) -> Running:
        if settings is None:
            return _shared.exchange_engine(engine or StandinEngine())
        own.append(_Server(engine or StandinEngine(), settings))
        return own[-1].running

    yield start
    for server in own:
        server.stop()


@pytest.fixture
def running(serve: Serve) -> Running:
    return serve()
