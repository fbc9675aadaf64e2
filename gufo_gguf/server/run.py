"""Running the application: sockets, signals, and an end that does not hang.

uvicorn by itself waits for open streams for ever after SIGTERM, asks the application to shut down
only after that, and then raises the signal again, which ends the process as if it had been killed.
Here a signal

    1. refuses new requests (503, Retry-After), for at most ``drain_s`` while the running ones finish
    2. cancels what is left; each stream ends with an error event
    3. lets uvicorn close its connections (cuts them after a second), and the application its engine
    4. ends the process with status 0

A second signal goes on to the next step at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from gufo_gguf.core.errors import ConfigError
from gufo_gguf.server.app import create_app
from gufo_gguf.server.connection import Connection
from gufo_gguf.server.port import EnginePort
from gufo_gguf.server.settings import ServerSettings
from gufo_gguf.server.state import State

log = logging.getLogger("gufo.server")

_CLOSE_S = 2
"""How long connections may take to close once nothing runs any more."""


def bind(settings: ServerSettings) -> socket.socket:
    """A bound socket, so that a port in use is found before a model is loaded.

    Raises ConfigError naming the address and the remedy.
    """
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {settings.host}: no such address ({error.strerror or error})") from error
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {settings.host} port {settings.port} ({error.strerror or error}); choose another --port"
        ) from error
    return sock


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn with a bounded end, and without raising the signal again."""

    def __init__(self, config: uvicorn.Config, state: State, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self.state = state
        self._announce = announce
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """In the main thread, between two bytecodes: only flags are set here."""
        self._signals += 1
        self.should_exit = True
        self.state.active.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._drain()
        # a client that does not read would hold its connection until uvicorn cancels it, with a traceback each
        asyncio.get_running_loop().call_later(_CLOSE_S / 2, self._abort)
        await super().shutdown(sockets)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()

    async def _drain(self) -> None:
        active, seconds = self.state.active, self.state.settings.drain_s
        n = len(active)
        word = "request is" if n == 1 else "requests are"
        log.info("stopping: %s", f"{n} {word} under way and may take {seconds:.0f} s more" if n else "nothing runs")
        seen = min(self._signals, 1)  # two that came before this line are two
        drain = asyncio.create_task(active.drain(seconds))
        while not drain.done():
            if self._signals > seen:
                drain.cancel()
                if len(active):
                    log.info("told again: what is under way (%d) is cancelled", len(active))
                active.cancel_all()
                break
            await asyncio.wait((drain,), timeout=0.1)


def make_server(engine: EnginePort, settings: ServerSettings, announce: Callable[[], None] = lambda: None) -> Server:
    """A server that is not running yet; ``announce`` is called when it takes connections."""
    app = create_app(engine, settings)
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=_CLOSE_S,
        timeout_keep_alive=75,
    )
    return Server(config, app.state.gufo, announce)


def serve(
    engine: EnginePort,
    settings: ServerSettings,
    sock: socket.socket | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serve until SIGINT or SIGTERM; the engine is closed at the end.

    The address is the last thing said.  Raises ConfigError when it cannot listen.
    """
    sock = sock or bind(settings)
    where = address_of(sock)
    try:
        if not settings.api_keys and not _is_loopback(sock):
            log.warning("%s can be reached from other machines and asks for no --api-key", where)
        make_server(engine, settings, lambda: say(f"listening on {where}")).run(sockets=[sock])
    finally:
        sock.close()
        engine.close()


def _is_loopback(sock: socket.socket) -> bool:
    host = str(sock.getsockname()[0])
    return host.startswith("127.") or host in ("::1", "localhost")
