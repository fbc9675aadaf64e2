"""What every test area may use: generated models, and the rule for tests that need libgufo.

A test marked ``native`` is skipped only when no native library was ever built or named; a damaged
or incomplete one fails it.  With GUFO_REQUIRE_NATIVE=1 (as the full test run sets it) nothing is
skipped, so that a build that did not happen cannot pass as a green run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from gufo_gguf.backend.libpath import POINTER
from gufo_gguf.core import env
from gufo_gguf.models.tiny import write_tiny

os.environ.setdefault("GUFO_CONFIG", os.devnull)  # servers of tests do not read the developer's own gufo.toml

TinyModel = Callable[..., Path]

_GENERATOR = (
    "blocks.py",
    "chat.jinja",
    "corpus.py",
    "qwen4exp.py",
    "recipe.py",
    "tensors.py",
    "tiny.py",
    "tokenizer.py",
)
"""Sources in gufo_gguf/models that decide a tiny model's bytes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    native = [item for item in items if item.get_closest_marker("native")]
    if not native or os.environ.get("GUFO_REQUIRE_NATIVE") == "1":
        return
    if env.native_dir() is None and not POINTER.exists():
        skip = pytest.mark.skip(reason="the native library is not built: run `make native` (or set GUFO_NATIVE_DIR)")
        for item in native:
            item.add_marker(skip)


def tiny_model_path(arch: str, ftype: str = "f16", seed: int = 0) -> Path:
    """A tiny model in the cache folder, made on first use; for code that has no fixture at hand.

    The folder's name is a digest of the generator, so a changed generator makes new files.
    """
    folder = env.cache_dir() / "models" / f"tiny-{_generator_digest()}"
    path = folder / f"{arch}-{ftype}-{seed}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_tiny(arch, path, seed=seed, ftype=ftype)
    return path


@cache
def _generator_digest() -> str:
    folder = Path(__file__).parents[1] / "gufo_gguf" / "models"
    digest = hashlib.sha256()
    for name in _GENERATOR:
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    return digest.hexdigest()[:16]


@pytest.fixture(scope="session")
def tiny_model() -> TinyModel:
    """``tiny_model(arch, ftype="f16", seed=0)``: path of a generated model."""
    return tiny_model_path
