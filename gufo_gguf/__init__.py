"""A local server for hybrid GGUF models whose cache remembers exact states.

The Python API is here too, loaded on first use, so that importing a part of the package stays cheap:

    from gufo_gguf import Engine
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gufo_gguf.api import Answer, AnswerStream, ChatOptions, Checkpoint, Conversation, Engine, Options, Usage
    from gufo_gguf.core.errors import GufoError
    from gufo_gguf.engine.types import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "AnswerStream",
    "ChatOptions",
    "Checkpoint",
    "Conversation",
    "Engine",
    "GufoError",
    "Options",
    "SamplingParams",
    "Usage",
    "__version__",
]

_ELSEWHERE = {"GufoError": "gufo_gguf.core.errors", "SamplingParams": "gufo_gguf.engine.types"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_ELSEWHERE.get(name, "gufo_gguf.api")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
