"""The virtual environment `.venv`: made once, renewed when pyproject.toml changes, else left alone.

The stamp is written last and holds a digest of what the environment was made from, so an interrupted
run is finished by the next one.  File times were rejected: a fresh clone has them in any order.

llama.cpp's bindings come out of the same checked archive as the native sources, installed from the
file: pip would otherwise keep a wheel without a library in its cache, and hand it to other projects.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import cachedir, fetch, needs
from .cachedir import CacheDir
from .console import run_logged, say, step
from .errors import BuildError
from .native import cmake_is_usable
from .needs import Probe
from .recipe import Upstream


@dataclass(frozen=True)
class Venv:
    checkout: Path

    @property
    def root(self) -> Path:
        return self.checkout / ".venv"

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.root / "made-from.json"

    @property
    def log(self) -> Path:
        return self.checkout / ".build" / "venv.log"


def digest(checkout: Path) -> str:
    """Everything the environment depends on: the two files, this Python, and where the checkout lies."""
    total = hashlib.sha256()
    for part in (checkout / "pyproject.toml", checkout / "native" / "upstream.json"):
        total.update(part.read_bytes())
    total.update(f"{sysconfig.get_python_version()} {sys.platform} {checkout}".encode())
    return total.hexdigest()


def is_ready(venv: Venv, extras: Sequence[str]) -> bool:
    made_from, have = _read_stamp(venv)
    return made_from == digest(venv.checkout) and set(extras) <= have and venv.python.exists()


def ensure(venv: Venv, extras: Sequence[str], cache: CacheDir, kind: str, environ: Mapping[str, str]) -> None:
    """Make or renew the environment with these extras and all that it has already."""
    if is_ready(venv, extras):
        return
    lacks = needs.missing(kind, environ, cache.root)
    if lacks:
        raise BuildError(needs.message(kind, lacks))
    with cachedir.locked(venv.checkout / ".build" / "venv.lock", say):
        if is_ready(venv, extras):
            return
        wanted = sorted(set(extras) | _read_stamp(venv)[1])
        _make(venv, wanted, cache, environ)
        stamp = {"digest": digest(venv.checkout), "extras": wanted}
        cachedir.write_text_atomic(venv.stamp, json.dumps(stamp, indent=2) + "\n")


def _make(venv: Venv, extras: Sequence[str], cache: CacheDir, environ: Mapping[str, str]) -> None:
    env = {**environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **fetch.BINDINGS_ENV}
    # Activated environments and PYTHONPATH would leak other packages into this one.
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        env.pop(name, None)

    def pip(label: str, *arguments: str) -> None:
        run_logged([str(venv.python), "-m", "pip", *arguments], venv.log, label, env=env, summarize=fetch.pip_status)

    venv.log.parent.mkdir(parents=True, exist_ok=True)
    venv.log.unlink(missing_ok=True)
    if not _works(venv):
        step(1, f"virtual environment .venv (Python {sysconfig.get_python_version()})")
        shutil.rmtree(venv.root, ignore_errors=True)
        run_logged([sys.executable, "-m", "venv", str(venv.root)], venv.log, "python -m venv", env=env)
    else:
        step(1, "virtual environment .venv: exists")

    upstream = Upstream.read(venv.checkout / "native" / "upstream.json")
    step(2, f"llama.cpp bindings of {upstream.package} {upstream.version} (nothing is compiled)")
    if not _has(venv, upstream.package, upstream.version):
        with cachedir.locked(cache.native / "lock", say):
            archive = fetch.archive(cache, upstream, venv.log, env, python=str(venv.python))
        pip("bindings", "install", str(archive))
    step(3, f"gufo-gguf and its packages {', '.join(extras)}".rstrip())
    probe = Probe()
    missing = [] if cmake_is_usable(probe) else [f"cmake>={'.'.join(map(str, needs.MIN_CMAKE))}"]
    missing += [] if probe.which("ninja") else ["ninja"]
    package = f"{venv.checkout}[{','.join(extras)}]" if extras else str(venv.checkout)
    pip("packages", "install", *missing, "--editable", package)


def _works(venv: Venv) -> bool:
    """The environment's Python starts, has pip, and is the version that asks (not one upgraded away)."""
    program = "import sys, pip; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([str(venv.python), "-c", program], capture_output=True, text=True)
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.strip() == sysconfig.get_python_version()


def _has(venv: Venv, package: str, version: str) -> bool:
    name = f"{package.replace('-', '_')}-{version}.dist-info"
    return any((venv.root / "lib").glob(f"python*/site-packages/{name}"))


def _read_stamp(venv: Venv) -> tuple[str, set[str]]:
    try:
        stamp = json.loads(venv.stamp.read_text(encoding="utf-8"))
        return str(stamp["digest"]), set(stamp["extras"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", set()
