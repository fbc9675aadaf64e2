"""The pinned archive: through pip, checked by sha256, unpacked once.

pip rather than a URL: whoever has a mirror, a proxy or an offline folder of packages has told pip
already.  The price is that pip builds the archive's metadata while it downloads (some seconds).
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .cachedir import CacheDir, publish
from .console import run_logged, say
from .errors import BuildError
from .recipe import Upstream

BINDINGS_ENV = {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
"""The bindings' own build then compiles nothing; they load our libraries."""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path: Path, expected: str) -> None:
    """BuildError when the file is not the pinned one; the file is removed, so that a retry fetches anew."""
    actual = sha256_of(path)
    if actual != expected:
        path.unlink(missing_ok=True)
        raise BuildError(
            f"{path.name} is not the pinned release: its sha256 is {actual}, native/upstream.json says {expected}.\n"
            "The download was damaged or the package index serves another file; it was removed. Run make again; "
            "if that says the same, do not build from it."
        )


def archive(
    cache: CacheDir, upstream: Upstream, log: Path, environ: Mapping[str, str], python: str = sys.executable
) -> Path:
    """The checked archive in the cache, downloaded with that Python's pip if need be."""
    path = cache.downloads / upstream.archive
    if path.is_file():
        verify(path, upstream.sha256)
        return path
    cache.downloads.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=cache.downloads) as folder:
        package = f"{upstream.package}=={upstream.version}"
        run_logged(
            [python, "-m", "pip", "download", "--no-deps", "--no-binary", upstream.package, package, "-d", folder],
            log,
            f"downloading {package}",
            env={**environ, **BINDINGS_ENV, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            summarize=pip_status,
            advice=f"Without a network, put {upstream.archive} into {cache.downloads}.",
        )
        found = Path(folder) / upstream.archive
        if not found.is_file():
            names = ", ".join(sorted(os.listdir(folder))) or "nothing"
            raise BuildError(f"pip downloaded {names} instead of {upstream.archive}")
        verify(found, upstream.sha256)
        found.replace(path)
    return path


def pip_status(line: str) -> str | None:
    """pip's lines that tell a person something."""
    words = ("Collecting", "Downloading", "Building", "Installing", "Preparing", "Getting", "Successfully")
    text = line.strip()
    return text.split(" (from")[0][:90] if text.startswith(words) else None


def source(cache: CacheDir, upstream: Upstream, path: Path) -> Path:
    """The archive's llama.cpp folder, unpacked; everything else in the archive stays out."""
    root = cache.source(upstream.version, upstream.sha256)
    if not root.exists():
        say(f"    unpacking {path.name}")
    top = upstream.archive.removesuffix(".tar.gz")
    prefix = f"{top}/{upstream.source}/"

    def fill(target: Path) -> None:
        with tarfile.open(path) as tar:
            # The nested .git entry points nowhere and only confuses version scripts.
            members = [m for m in tar if m.name.startswith(prefix) and not m.name.startswith(f"{prefix}.git")]
            if not members:
                raise BuildError(f"{path.name} holds no {upstream.source}")
            for member in members:
                member.name = member.name.removeprefix(prefix)
            # Python 3.11.0 to 3.11.3 lack the filter; the archive is known by its hash all the same.
            if hasattr(tarfile, "data_filter"):
                tar.extraction_filter = tarfile.data_filter
            tar.extractall(target, members=members)

    return publish(root, fill)
