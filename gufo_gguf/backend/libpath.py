"""Where the native libraries lie.

`make native` builds into the cache folder, outside the checkout, and leaves a pointer in the
checkout:

    <checkout>/.build/native.json  ->  <cache>/native/lib-<kind>-<key>/{libgufo,libllama,...}.so

Computing the key here again was rejected: it needs the compiler and the sources, and a wheel has
neither.  A pointer that leads nowhere (the cache folder was emptied) is said, not searched around.
Standard library only: it runs before llama.cpp's bindings may be imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gufo_gguf.core import env
from gufo_gguf.core.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parents[2]
POINTER = CHECKOUT / ".build" / "native.json"
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


def library_name(stem: str) -> str:
    """File name of a shared library on this system: ``gufo`` -> ``libgufo.so``."""
    return f"lib{stem}{_SUFFIX}"


def library_dir(pointer: Path = POINTER) -> Path:
    """The folder that holds libgufo, libllama, libllama-common and the ggml libraries.

    Raises ConfigError naming the remedy when nothing was built, or what was built is gone.
    """
    chosen = env.native_dir()
    if chosen is not None:
        return _complete(chosen, f"GUFO_NATIVE_DIR={chosen}")
    try:
        text = pointer.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            "the native library is not built: run `make native` in the checkout (or set GUFO_NATIVE_DIR)"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read {pointer}: {error}; run `make native` again") from error
    try:
        folder = Path(json.loads(text)["dir"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{pointer} is damaged; run `make native` again") from error
    return _complete(folder, str(pointer))


def _complete(folder: Path, source: str) -> Path:
    missing = [n for n in map(library_name, ("gufo", "llama")) if not (folder / n).is_file()]
    if missing:
        raise ConfigError(f"{source} names {folder}, which lacks {' and '.join(missing)}; run `make native`")
    return folder


def build_info(folder: Path) -> dict[str, object]:
    """What the build wrote about itself (kind, versions, flags); empty for a folder made by other means."""
    try:
        info = json.loads((folder / "build.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}
