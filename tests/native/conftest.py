"""One small backend for the native tests of sampling and templates."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gufo_gguf.backend import native
from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions


@pytest.fixture(scope="package")
def backend(tiny_model: Callable[..., Path]) -> Iterator[LlamaBackend]:
    with LlamaBackend(tiny_model("llama"), LlamaOptions(n_ctx=1024, n_slots=1, n_threads=1, n_batch=256)) as opened:
        yield opened


@pytest.fixture
def lib(backend: LlamaBackend) -> ctypes.CDLL:
    return native.library()
