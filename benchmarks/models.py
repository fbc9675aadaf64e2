"""Models and programs that several benchmarks use, by name."""

from __future__ import annotations

from pathlib import Path

from benchmarks.agent.bound import State
from gufo_gguf.backend.libpath import library_dir
from gufo_gguf.core import env
from gufo_gguf.core.errors import ConfigError


def bench_model(name: str) -> Path:
    """A GGUF file, owlet or smollm2 (downloaded), or the name of a tiny architecture (made on first use)."""
    path = Path(name)
    if path.suffix == ".gguf":
        return path
    if name in ("owlet", "smollm2"):
        from gufo_gguf.models.default import model_path

        return model_path(path)
    from gufo_gguf.models.tiny import write_tiny

    path = env.cache_dir() / "models" / f"bench-{name}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tiny(name, path)
    return path


def find_program(name: str) -> Path:
    """A program of upstream in the build tree that the libraries came from, or beside them.

    ConfigError says how to build it.
    """
    found = [p for p in [library_dir() / name] if p.exists()]
    own = env.variable("GUFO_LLAMA_TOOLS")
    if own:
        found += [p for p in [Path(own) / name] if p.exists()]
    key = "-".join(library_dir().name.split("-")[1:2])
    built = library_dir().parent.glob(f"upstream-{key}-*/bin/{name}")
    found += sorted(built, key=lambda p: p.stat().st_mtime, reverse=True)
    if not found:
        raise ConfigError(f"{name} is not built: run `make tools`, or name its folder in GUFO_LLAMA_TOOLS")
    return found[0]


def state_of(model: Path) -> State:
    """Row and private bytes of a model's state, as the backend inventories it."""
    from gufo_gguf.backend.llama import LlamaBackend, LlamaOptions

    with LlamaBackend(model, LlamaOptions(n_ctx=512, n_slots=1, n_threads=1)) as backend:
        inventory = backend.info.inventory
        if inventory is None:
            raise ConfigError(f"{model.name} cannot be cached: {backend.info.uncacheable}")
        return State(inventory.row_bytes, inventory.private_bytes)
