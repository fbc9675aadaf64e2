"""What the HTTP side can be told; everything about the model belongs to ``EngineOptions``.

One frozen value, made once by the command line (or a test) and handed to ``create_app``.  Nothing in
the server reads a flag, a variable or a file after that.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from gufo_gguf.engine.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may ask for.  Beyond a limit the answer is 400, 413 or 503, naming it."""

    body_bytes: int = 64 << 20
    prompt_tokens: int | None = None
    """None = whatever fits the context."""
    choices: int = 16
    """Prompts times ``n`` in one request."""
    stop_strings: int = 64
    stop_chars: int = 1024
    logprobs: int = 100
    messages: int = 20_000
    streams: int = 256
    """Requests being answered at the same time; the engine's queue is shorter than this."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8080
    """0 = any free port; the one taken is printed."""
    api_keys: tuple[str, ...] = ()
    """Empty: no key is asked for."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server; ``*`` = all, ``localhost`` = pages of this machine.
    Empty: none."""
    limits: Limits = field(default_factory=Limits)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """What a request that does not say gets."""
    max_tokens: int | None = None
    """Most tokens of an answer whose request gives no limit; None = until the context is full."""
    keepalive_s: float = 10.0
    """A stream that has been silent this long sends an event without content."""
    timeout_s: float | None = None
    """A request that is not answered in whole after this long is ended (504); None = no limit.  A request
    may ask for less by its field ``timeout``."""
    drain_s: float = 5.0
    """After SIGTERM, running requests have this long; then they are cancelled."""
    isolate_keys: bool = False
    """Histories of different API keys never share cached state."""
    normalise_noise: bool = True
    """Fix per-request nonces that clients put at the head of a system message (see ``chat/noise.py``)."""
    reasoning_format: str = "auto"
    thinking: bool | None = None
    """Whether models think before they answer, for requests that do not say; None = as the template does."""
    slots_endpoint: bool = True
    metrics_endpoint: bool = True
    model_path: str = ""
    """Shown by /props."""
    log_requests: bool = True
    """One line per request: method, path, status, sizes, times.  Never text, never a key."""

    def with_model_path(self, path: Path) -> ServerSettings:
        return replace(self, model_path=str(path))
