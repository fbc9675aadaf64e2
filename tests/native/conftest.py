"""One small backend, its own template and others, for the native tests of sampling and templates."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gufo_gguf.backend import native
from gufo_gguf.backend.chat import ChatFormat
from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions


@pytest.fixture(scope="package")
def backend(tiny_model: Callable[..., Path]) -> Iterator[LlamaBackend]:
    with LlamaBackend(tiny_model("llama"), LlamaOptions(n_ctx=1024, n_slots=1, n_threads=1, n_batch=256)) as opened:
        yield opened


@pytest.fixture(scope="package")
def lib(backend: LlamaBackend) -> ctypes.CDLL:
    return native.library()


@pytest.fixture(scope="package")
def own(lib: ctypes.CDLL, backend: LlamaBackend) -> Iterator[ChatFormat]:
    """The generated models' own template: ChatML with tools and reasoning."""
    chat = ChatFormat(lib, backend.model_ptr)
    yield chat
    chat.close()


@pytest.fixture(scope="package")
def of(lib: ctypes.CDLL, backend: LlamaBackend) -> Callable[[str], ChatFormat]:
    """The format of another template, with that model's vocabulary."""
    return lambda source: ChatFormat(lib, backend.model_ptr, source)
