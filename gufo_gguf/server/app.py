"""The application: routes, middleware and life of the server, put together in one place."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware

from gufo_gguf import __version__
from gufo_gguf.server import openapi
from gufo_gguf.server.chat.clock import ConversationClock
from gufo_gguf.server.errors import install_handlers
from gufo_gguf.server.middleware import Guard, LastResort, RequestLog
from gufo_gguf.server.port import EnginePort
from gufo_gguf.server.routes import anthropic, cache, cancel, chat, completions, llama, metrics, models, responses, root
from gufo_gguf.server.settings import ServerSettings
from gufo_gguf.server.state import Active, State

_LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"

ROUTERS = tuple(
    m.router for m in (anthropic, cache, cancel, chat, completions, llama, metrics, models, responses, root)
)


def create_app(
    engine: EnginePort, settings: ServerSettings | None = None, *, now: Callable[[], float] = time.time
) -> FastAPI:
    """The server around a loaded engine.  The engine is closed when the application shuts down.

    ``now`` is the clock that templates print (seconds since 1970).
    """

    settings = settings or ServerSettings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        state: State = app.state.gufo
        await state.active.drain(0)  # whoever runs the app has drained with its own patience
        await run_in_threadpool(engine.close)

    app = FastAPI(
        title="gufo",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gufo = State(
        engine=engine,
        settings=settings,
        active=Active(engine, settings.limits.streams, settings.timeout_s),
        clock=ConversationClock(now),
        started_s=now(),
        fingerprint=f"b{__version__}-gufo-{engine.info.identity[:10]}",
    )
    install_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    openapi.install(app)
    # the last added is the outermost
    app.add_middleware(Guard, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin for origin in settings.cors_origins if origin != "localhost"],
            allow_origin_regex=_LOCAL_PAGES if "localhost" in settings.cors_origins else None,
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
        )
    app.add_middleware(LastResort)
    if settings.log_requests:
        app.add_middleware(RequestLog)
    return app
