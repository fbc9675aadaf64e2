"""The one place that reads (and, for the bindings, writes) environment variables.

    GUFO_CACHE_DIR     downloads, native builds, default model; else $XDG_CACHE_HOME/gufo-gguf,
                       else ~/.cache/gufo-gguf (macOS: ~/Library/Caches/gufo-gguf)
    XDG_CONFIG_HOME    where the user's gufo.toml lies, in gufo-gguf/; else ~/.config
                       (macOS: ~/Library/Application Support/gufo-gguf)
    GUFO_NATIVE_DIR    folder with libgufo and libllama to load instead of the one `make` linked
    LLAMA_CPP_LIB_PATH what the llama.cpp bindings read when they are imported; we set it
    ROCBLAS_DEFAULT_ATOMICS_MODE
                       what rocBLAS reads before its first product; 0 unless it is set

Settings of the server are flags (the command line gives each a variable as its default).  Only what
must be known before any flag is parsed, where files lie, is here.

This file imports nothing but the standard library and is loaded by path from the build scripts,
which run before the package can be imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

APP = "gufo-gguf"
LIB_PATH_VARIABLE = "LLAMA_CPP_LIB_PATH"
ROCBLAS_VARIABLE = "ROCBLAS_DEFAULT_ATOMICS_MODE"


def variable(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The value of a variable; unset and empty are both None."""
    return (os.environ if environ is None else environ).get(name) or None


def cache_dir(environ: Mapping[str, str] | None = None, platform: str = sys.platform) -> Path:
    """The cache folder, absolute; it need not exist yet."""
    own = variable("GUFO_CACHE_DIR", environ)
    if own is not None:
        return Path(own).expanduser().absolute()
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / APP
    xdg = variable("XDG_CACHE_HOME", environ)
    # The XDG specification has relative values ignored.
    base = Path(xdg) if xdg is not None and Path(xdg).is_absolute() else Path.home() / ".cache"
    return base / APP


def config_dir(environ: Mapping[str, str] | None = None, platform: str = sys.platform) -> Path:
    """The folder of the user's gufo.toml, absolute; it need not exist."""
    if platform == "darwin":
        return Path.home() / "Library" / "Application Support" / APP
    xdg = variable("XDG_CONFIG_HOME", environ)
    base = Path(xdg) if xdg is not None and Path(xdg).is_absolute() else Path.home() / ".config"
    return base / APP


def native_dir(environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder of native libraries that the user chose, if any."""
    value = variable("GUFO_NATIVE_DIR", environ)
    return None if value is None else Path(value).expanduser().absolute()


def set_bindings_library_dir(folder: Path, environ: MutableMapping[str, str] | None = None) -> None:
    """Make the llama.cpp bindings load their libraries from ``folder``.

    Must run before the first ``import llama_cpp`` of the process; afterwards it has no effect.
    """
    (os.environ if environ is None else environ)[LIB_PATH_VARIABLE] = str(folder)


def forbid_rocblas_atomics(environ: MutableMapping[str, str] | None = None) -> None:
    """Have rocBLAS sum in a fixed order, so that equal passes give equal bytes; a value that is set stays.

    Its manual names products whose order varies by default.  Must run before the first product of the
    process; without a HIP build nobody reads it.
    """
    (os.environ if environ is None else environ).setdefault(ROCBLAS_VARIABLE, "0")
