"""The cache folder: where things lie, one builder at a time, and nothing half made in sight.

    <cache>/downloads/llama_cpp_python-V.tar.gz          the archive, checked
    <cache>/models/NAME.gguf                             the default model
    <cache>/native/lock                                  held during a build
    <cache>/native/source-V-SHA/                         the archive's llama.cpp
    <cache>/native/upstream-KIND-KEY/                    build tree of llama.cpp; bin/ has its libraries and tools
    <cache>/native/overlay-KIND-KEY/{source,build}/      our sources as copied for the build, and its tree
    <cache>/native/lib-KIND-KEY/                         finished: libgufo with the libraries it was linked to

Build trees are kept: a killed build goes on with the objects it has.  Whatever is used from outside
(source-, lib-) appears by a rename of a finished folder; a name that exists is complete.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError

KEEP_LIBRARIES = 16
"""Finished library folders kept per cache; an edit of our sources makes one, mostly of hard links."""
_TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class CacheDir:
    root: Path

    @property
    def downloads(self) -> Path:
        return self.root / "downloads"

    @property
    def native(self) -> Path:
        return self.root / "native"

    def source(self, version: str, sha256: str) -> Path:
        return self.native / f"source-{version}-{sha256[:8]}"

    def upstream(self, kind: str, key: str) -> Path:
        return self.native / f"upstream-{kind}-{key}"

    def overlay(self, kind: str, key: str) -> Path:
        return self.native / f"overlay-{kind}-{key}"

    def library(self, kind: str, key: str) -> Path:
        return self.native / f"lib-{kind}-{key}"


@contextmanager
def locked(path: Path, say: Callable[[str], None], poll_s: float = 0.5) -> Iterator[int]:
    """Hold the lock file; yields its descriptor.

    The descriptor is to be handed to the compiler processes (``pass_fds``): should this process be
    killed, the lock lasts until the last of them is gone, so two builds never write one tree.
    flock, not lockf: it belongs to the open file, children included, and any close does not drop it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        told = False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    holder = os.pread(fd, 64, 0).decode(errors="replace").strip() or "unknown"
                    say(f"waiting for another build (process {holder}) that holds {path}")
                    told = True
                time.sleep(poll_s)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield fd
    finally:
        # Closing releases the lock, unless a compiler process still holds the same open file.
        os.close(fd)


def publish(target: Path, fill: Callable[[Path], None]) -> Path:
    """Make ``target`` by filling a temporary sibling and renaming it; an existing target stays.

    The caller holds the lock.  A failure or a kill leaves at most a ``.tmp-`` folder, which the next
    call removes.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for stale in target.parent.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(stale, ignore_errors=True)
    if target.exists():
        return target
    temporary = target.parent / f"{_TEMPORARY}{target.name}-{os.getpid()}"
    temporary.mkdir()
    try:
        fill(temporary)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link where the file system allows one, else a copy; symbolic links stay what they are."""
    if source.is_symlink():
        target.symlink_to(os.readlink(source))
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def write_text_atomic(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{_TEMPORARY}{path.name}-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def forget_old_libraries(cache: CacheDir, keep: Path, n_keep: int = KEEP_LIBRARIES) -> list[Path]:
    """Remove the library folders linked to longest ago, all but ``n_keep``; returns the removed ones.

    Age is the folder's time, which every `make` that links to it renews.  A running server keeps the
    files it has mapped.
    """
    others = [p for p in cache.native.glob("lib-*") if p != keep]
    others.sort(key=lambda p: p.stat().st_mtime, reverse=True)
    gone = others[max(n_keep - 1, 0) :]
    for folder in gone:
        shutil.rmtree(folder, ignore_errors=True)
    return gone


def usage_error(path: Path, error: OSError) -> BuildError:
    return BuildError(f"cannot use the cache folder {path}: {error.strerror or error}; GUFO_CACHE_DIR names another")
