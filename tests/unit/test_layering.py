"""Who may know what: the layers of the package, read from its imports.

    cli ─► server ─► engine ─► cache ─► core
                       ├────► store ───► cache (types only) ─► core
                       └────► backend ─► cache (types only) ─► core     native/ only from backend/

Imports under ``if TYPE_CHECKING`` and inside functions count: knowing a type is knowing.  The rules are
plain tables over the syntax tree; each has a test that it finds what it forbids.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "gufo_gguf"
MAX_LINES = 450

SERVER_MAY_NAME = (
    *(f"backend.chat.{name}" for name in ("ChatInput", "Rendered", "TemplateInfo")),
    *(f"backend.message_parser.{name}" for name in ("ChatMessage", "MessageDelta")),
)

API_MAY_NAME = (
    *(f"backend.chat.{name}" for name in ("ChatInput", "Rendered")),
    *(f"backend.message_parser.{name}" for name in ("ChatMessage", "MessageDelta", "MessageParser", "ToolCall")),
)

# Decision logs are read without an engine.
CLI_MAY_READ = ("cache.types", "cache.events", "cache.replay")

# Package -> what it may import of ours, besides itself.  "" is gufo_gguf/__init__.py and its neighbours.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "core": (),
    "cache": ("core",),
    "store": ("core", "cache.types"),
    # SamplingParams and the like: plain values that the engine hands down.
    "backend": ("core", "cache.types", "engine.types"),
    "models": ("core",),
    "engine": ("core", "cache", "store", "backend"),
    # Of the backend the server knows values alone, never a context or a handle.
    "server": ("core", "engine", "cache.types", "backend.base.BackendInfo", *SERVER_MAY_NAME),
    "cli": ("core", "engine", "server", "models", "store", "backend", "api", *CLI_MAY_READ),
    # The Python API hands out the engine's values, and knows no HTTP.
    "api": ("core", "engine", "models.default", "cache.types", "backend.base.BackendInfo", *API_MAY_NAME),
    "": ("core", "engine", "api"),
}

# Foreign module -> the packages that may import it.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "llama_cpp": ("backend",),
    "ctypes": ("backend",),
    "cffi": (),
    "fastapi": ("server",),
    "starlette": ("server",),
    "sse_starlette": ("server",),
    "uvicorn": ("server", "cli"),
    "typer": ("cli",),
    "gguf": ("models", "backend"),
    "socket": ("server", "cli"),
    "http": ("server", "cli"),
}

# What a pure, replayable package has no use for: files, threads, clocks, chance.
IMPURE = {
    *("asyncio", "concurrent", "multiprocessing", "queue", "select", "selectors", "signal", "threading", "_thread"),
    *("glob", "io", "mmap", "os", "pathlib", "shutil", "subprocess", "sys", "tempfile"),
    *("datetime", "random", "secrets", "time", "uuid"),
}

# Threads start in these files and nowhere else; the locks of the second list guard what they share.
START_THREADS = {"engine/bridge.py", "engine/disk_writer.py", "store/reader.py"}
HOLD_LOCKS = START_THREADS | {"engine/engine.py", "engine/stream.py", "store/catalogue.py", "server/chat/clock.py"}
THREAD_MODULES = {"threading", "_thread", "concurrent", "multiprocessing"}
THREAD_STARTERS = {"Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "Process", "Pool"}
THREAD_STARTING_CALLS = {"to_thread", "run_in_executor", "start_new_thread", "run_in_threadpool"}

READ_ENVIRONMENT = {"core/env.py"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


@dataclass(frozen=True)
class Module:
    """One source file: its path below the package, as posix, and its syntax tree."""

    path: str
    tree: ast.Module

    @property
    def layer(self) -> str:
        return self.path.split("/")[0] if "/" in self.path else ""

    def imports(self) -> Iterator[tuple[str, int]]:
        """Dotted names of everything imported, each with its line; ``from a import b`` gives ``a.b``."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield f"{self._base(node)}.{alias.name}".strip("."), node.lineno

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        here = [PACKAGE, *self.path.split("/")[:-1]]
        return ".".join([*here[: len(here) - node.level + 1], *([node.module] if node.module else [])])


def module(path: str, text: str) -> Module:
    return Module(path, ast.parse(text))


@cache
def modules() -> list[Module]:
    folder = ROOT / PACKAGE
    paths = sorted(folder.rglob("*.py"))
    return [module(p.relative_to(folder).as_posix(), p.read_text(encoding="utf-8")) for p in paths]


def layer_faults(m: Module) -> list[str]:
    """Imports of ours that the table does not allow."""
    allowed = MAY_IMPORT.get(m.layer)
    if allowed is None:
        return [f"{m.path}: the package {m.layer}/ is not in the table of layers"]
    faults = []
    for name, line in m.imports():
        if name.split(".")[0] != PACKAGE:
            continue
        target = name.removeprefix(PACKAGE).strip(".")
        own = m.layer != "" and (target == m.layer or target.startswith(f"{m.layer}."))
        top_level = m.layer == "" or target in ("", "__version__")
        if own or (top_level and target.split(".")[0] not in MAY_IMPORT):
            continue
        if not any(target == a or target.startswith(f"{a}.") for a in allowed):
            faults.append(f"{m.path}:{line}: {m.layer or PACKAGE} may not import {name}")
    return faults


def foreign_faults(m: Module) -> list[str]:
    faults = []
    for name, line in m.imports():
        top = name.split(".")[0]
        if top in ONLY_IN and m.layer not in ONLY_IN[top]:
            faults.append(f"{m.path}:{line}: {top} belongs to {', '.join(ONLY_IN[top]) or 'nobody'}")
        if m.layer == "cache" and top in IMPURE:
            faults.append(f"{m.path}:{line}: cache/ is pure and may not import {top}")
    return faults


def thread_faults(m: Module) -> list[str]:
    faults = []
    for name, line in m.imports():
        parts = name.split(".")
        if parts[0] in THREAD_MODULES and m.path not in HOLD_LOCKS:
            faults.append(f"{m.path}:{line}: {parts[0]} is used in {', '.join(sorted(HOLD_LOCKS))} alone")
        elif parts[0] in THREAD_MODULES and parts[-1] in THREAD_STARTERS and m.path not in START_THREADS:
            faults.append(f"{m.path}:{line}: threads start in {', '.join(sorted(START_THREADS))} alone")
    for node in ast.walk(m.tree):
        if not isinstance(node, ast.Attribute) or m.path in START_THREADS:
            continue
        base = node.value.id if isinstance(node.value, ast.Name) else ""
        if node.attr in THREAD_STARTING_CALLS or (base in THREAD_MODULES and node.attr in THREAD_STARTERS):
            faults.append(f"{m.path}:{node.lineno}: threads start in {', '.join(sorted(START_THREADS))} alone")
    return faults


def environment_faults(m: Module) -> list[str]:
    if m.path in READ_ENVIRONMENT:
        return []
    lines = [
        node.lineno
        for node in ast.walk(m.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in ENVIRONMENT
    ]
    lines += [line for name, line in m.imports() if name in {f"os.{attribute}" for attribute in ENVIRONMENT}]
    return [f"{m.path}:{line}: environment variables are read in core/env.py alone" for line in sorted(lines)]


def docstring_faults(m: Module) -> list[str]:
    if not m.tree.body or ast.get_docstring(m.tree):
        return []
    return [f"{m.path}: the module says nowhere what it is and why"]


RULES = [layer_faults, foreign_faults, thread_faults, environment_faults, docstring_faults]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__.removesuffix("_faults"))
def test_package_keeps_the_rule(rule) -> None:
    found = modules()
    assert len(found) > 10, "the package was not found"
    faults = [fault for m in found for fault in rule(m)]
    assert not faults, "\n".join(faults)


def test_files_stay_short() -> None:
    """A file that grows past the limit holds a second idea."""
    files = [
        p
        for folder in (PACKAGE, "native", "tests", "benchmarks")
        for p in (ROOT / folder).rglob("*")
        if p.suffix in (".py", ".cpp", ".h") and p.is_file()
    ]
    assert len(files) > 10
    long = {str(p.relative_to(ROOT)): n for p in files if (n := p.read_bytes().count(b"\n")) > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines: {long}"


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (layer_faults, "core/a.py", "from gufo_gguf.cache import types"),
        (layer_faults, "cache/a.py", "import gufo_gguf.backend.base"),
        (layer_faults, "cache/a.py", "from ..store import lock"),
        (layer_faults, "cache/a.py", "def f():\n    from gufo_gguf.engine.types import Event"),
        (layer_faults, "store/a.py", "from gufo_gguf.cache.retention import victims_order"),
        (layer_faults, "backend/a.py", "from gufo_gguf.cache import ledger"),
        (layer_faults, "server/a.py", "if TYPE_CHECKING:\n    import gufo_gguf.backend.llama"),
        (layer_faults, "server/a.py", "from gufo_gguf.cache.index import PrefixIndex"),
        (layer_faults, "server/a.py", "from gufo_gguf.backend.chat import MessageParser"),
        (layer_faults, "engine/a.py", "from gufo_gguf.server import app"),
        (layer_faults, "newcomer/a.py", ""),
        (layer_faults, "api.py", "from gufo_gguf.cache.index import PrefixIndex"),
        (foreign_faults, "engine/a.py", "import llama_cpp"),
        (foreign_faults, "models/a.py", "import ctypes as c"),
        (foreign_faults, "engine/a.py", "from fastapi import FastAPI"),
        (foreign_faults, "cache/a.py", "import time"),
        (foreign_faults, "cache/a.py", "from os.path import join"),
        (thread_faults, "engine/a.py", "import threading"),
        (thread_faults, "engine/stream.py", "import threading\nt = threading.Thread()"),
        (thread_faults, "engine/stream.py", "from threading import Thread"),
        (thread_faults, "server/a.py", "import asyncio\nasync def f(g):\n    await asyncio.to_thread(g)"),
        (environment_faults, "server/a.py", "import os\nx = os.environ['A']"),
        (environment_faults, "cli/a.py", "from os import getenv"),
        (docstring_faults, "core/a.py", "x = 1"),
    ],
)
def test_rule_finds_what_it_forbids(rule, path: str, text: str) -> None:
    assert rule(module(path, text))


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (layer_faults, "cache/a.py", "from gufo_gguf.cache.types import Tokens\nfrom gufo_gguf.core import errors"),
        (layer_faults, "store/a.py", "from gufo_gguf.cache.types import Tokens"),
        (layer_faults, "store/a.py", "from gufo_gguf.cache import types"),
        (layer_faults, "engine/a.py", "from . import types\nfrom gufo_gguf.backend.base import Backend"),
        (layer_faults, "cli/a.py", "from gufo_gguf import __version__"),
        (foreign_faults, "store/a.py", "import os"),
        (thread_faults, "engine/bridge.py", "import threading\nt = threading.Thread()"),
        (thread_faults, "engine/stream.py", "import threading\nc = threading.Condition()"),
        (environment_faults, "core/env.py", "import os\nx = os.environ['A']"),
        (environment_faults, "store/a.py", "import os\nos.fsync(3)"),
        (docstring_faults, "core/__init__.py", ""),
    ],
)
def test_rule_allows_what_it_must(rule, path: str, text: str) -> None:
    assert not rule(module(path, text))
