"""One process per cache folder.

Two writers in one folder would delete each other's unpublished files as orphans, so the second one
gets an error that names the folder and the holder.  The lock is a ``flock`` on v1/LOCK: it goes with
the process, however that dies, and a stale file means nothing.  Looking is possible without it:
``holder`` only asks, and the read-only commands work on a folder in use.
"""

from __future__ import annotations

import os

from gufo_gguf.core.errors import StoreError
from gufo_gguf.store.fs import FileSystem, LockHeld, close_quietly
from gufo_gguf.store.layout import LOCK_NAME, Layout


class FolderLock:
    """The right to change a cache folder, held until ``release`` or the end of the process."""

    def __init__(self, fs: FileSystem, layout: Layout) -> None:
        """Take the lock.  Raises StoreError naming the folder and the holder's pid."""
        self._fs = fs
        try:
            self._handle: int | None = fs.lock(layout.base, LOCK_NAME, f"{os.getpid()}\n")
        except LockHeld as held:
            raise StoreError(_in_use(fs.root, held.text)) from None
        except OSError as e:
            raise StoreError(f"the cache folder {fs.root} cannot be locked: {e.strerror or e}") from e

    def release(self) -> None:
        """Idempotent."""
        if self._handle is not None:
            close_quietly(self._fs, self._handle)
            self._handle = None


def _in_use(root: str, text: str) -> str:
    pid = text.strip()
    holder = f"process {pid}" if pid.isdigit() else "another process"
    return f"the cache folder {root} is in use by {holder}; stop it or give another folder with --cache-disk"
